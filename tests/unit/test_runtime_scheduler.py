"""The scheduler alone: what a step holds, who is admitted, who waits, who is preempted. No model."""

from __future__ import annotations

import time

import numpy as np
import pytest

from quantkit.errors import RecipeError, RequestError
from quantkit.runtime.block_pool import BlockPool
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.scheduler import Scheduler, SchedulerConfig


class Bench:
    """A scheduler and the part an engine plays around it: computing, drawing (always token 7), finishing."""

    def __init__(self, num_blocks=1000, caching=False, **config):
        self.pool = BlockPool(num_blocks)
        self.config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 1024} | config)
        self.cache = PrefixCache(self.pool, self.config.block_size, "id", enabled=caching)
        self.scheduler = Scheduler(self.config, self.pool, self.cache)
        self.now, self.count, self.done = 0.0, 0, []

    def request(self, prompt, generate=8, *, priority=0, deadline=None, parent=None):
        tokens = np.asarray(prompt if not isinstance(prompt, int) else [self.count * 1000 + i for i in range(prompt)])
        made = Request(
            f"r{self.count}", SamplingParams(), tokens.astype(np.int32), len(tokens), len(tokens) + generate, 0,
            frozenset(), (priority, float("inf") if deadline is None else deadline, self.count), self.now,
            deadline=deadline, parent=parent, num_tokens=len(tokens),
        )  # fmt: skip
        self.count += 1
        return made

    def add(self, *args, **kwargs):
        made = self.request(*args, **kwargs)
        self.scheduler.add(made)
        return made

    def step(self):
        step = self.scheduler.schedule(self.now)
        counts = {request.request_id: count for request, count in step.items()}
        assert sum(counts.values()) <= self.config.max_num_batched_tokens
        for request, count in step.items():
            request.num_computed += count
            self.cache.publish(request)
            if request.lacks == 0:
                request.append(7)
                if request.num_tokens == request.max_total:
                    self.scheduler.remove(request)
                    self.done.append(request.request_id)
        self.now += 0.01
        total = self.pool.counts()
        assert total.free + total.cached + total.used == total.total
        assert self.scheduler.promised == sum(r.promised for r in self.scheduler.running) <= self.pool.num_idle
        return counts

    def drain(self, limit=10_000):
        for _ in range(limit):
            if not self.scheduler.running and not len(self.scheduler.waiting):
                return
            self.step()
        raise RuntimeError("the scheduler made no end of it")


def test_two_long_prompts_share_the_first_step_and_one_is_chunked():
    bench = Bench()
    bench.add(800)
    bench.add(800)
    assert bench.step() == {"r0": 800, "r1": 224}
    assert bench.step() == {"r0": 1, "r1": 576}


def test_decodes_come_before_prompts():
    bench = Bench(max_num_batched_tokens=64)
    bench.add(10)
    bench.step()
    bench.add(200)
    assert list(bench.step().items()) == [("r0", 1), ("r1", 63)]


def test_a_prompt_longer_than_the_step_leaves_room_for_short_ones_behind_it():
    bench = Bench(max_num_batched_tokens=128)
    bench.add(1000)
    bench.add(20)
    assert bench.step() == {"r0": 108, "r1": 20}


def test_short_requests_do_not_starve_a_long_one():
    bench = Bench(max_num_batched_tokens=64)
    bench.add(1000, 2)
    steps = 0
    while "r0" not in bench.done and steps < 200:
        if len(bench.scheduler.waiting) < 8:
            bench.add(60, 1)
        bench.step()
        steps += 1
    assert steps < 2 * 1000 / 64 + 4


def test_long_requests_do_not_starve_a_short_one():
    bench = Bench(max_num_batched_tokens=64, max_num_seqs=4)
    for _ in range(3):
        bench.add(2000, 2)
    short = bench.add(16, 2)
    for _ in range(6):
        bench.step()
    assert short.request_id in bench.done


def test_no_evict_admits_only_what_can_finish():
    bench = Bench(num_blocks=11, max_num_seqs=4)  # 160 tokens
    bench.add(40, 40)
    bench.add(40, 40)
    bench.add(40, 40)
    assert set(bench.step()) == {"r0", "r1"}
    bench.drain()
    assert bench.scheduler.preemptions == 0
    assert bench.done == ["r0", "r1", "r2"]


def test_max_utilization_preempts_the_least_urgent_and_all_finish():
    bench = Bench(num_blocks=11, max_num_seqs=4, admission="max-utilization")
    for _ in range(3):
        bench.add(40, 60)
    assert set(bench.step()) == {"r0", "r1"}
    bench.drain()
    assert bench.scheduler.preemptions > 0
    assert sorted(bench.done) == ["r0", "r1", "r2"]
    assert bench.done[0] == "r0"
    assert bench.pool.counts().free == 10


def test_what_can_never_fit_is_refused_at_once_with_the_numbers():
    bench = Bench(num_blocks=11)
    with pytest.raises(RequestError, match=r"need 11 cache blocks, there are 10 \(160 tokens\)"):
        bench.add(100, 70)
    bench.add(100, 61)  # its last token is never written
    bench.drain()


def test_step_too_small_for_the_batch_is_a_usage_error():
    with pytest.raises(RecipeError, match="max_num_batched_tokens 8 is less than max_num_seqs 16"):
        SchedulerConfig(max_num_batched_tokens=8)


def test_order_is_priority_then_deadline_then_arrival():
    bench = Bench(max_num_seqs=1)
    bench.add(4, 1)
    bench.add(4, 1, deadline=50.0)
    bench.add(4, 1, deadline=20.0)
    bench.add(4, 1, priority=-1)
    bench.add(4, 1, priority=3, deadline=1.0)
    bench.drain()
    assert bench.done == ["r3", "r2", "r1", "r0", "r4"]


def test_whoever_waited_too_long_goes_first_whatever_its_priority():
    bench = Bench(max_num_seqs=1, ageing_s=0.5)
    bench.add(4, 2, priority=9)
    for _ in range(200):
        bench.add(4, 2, priority=0)
        bench.step()
    assert "r0" in bench.done
    assert bench.done.index("r0") <= 0.5 / 0.01 / 2 + 2


def test_a_head_that_does_not_fit_is_passed_a_bounded_number_of_times():
    bench = Bench(num_blocks=11, max_num_seqs=4, max_bypass=5)
    bench.add(16, 33)  # 3 blocks for 33 steps
    bench.step()
    big = bench.add(100, 50)  # 10 blocks: waits for the whole pool
    small = [bench.add(8, 4) for _ in range(20)]
    bench.drain()
    before = [name for name in bench.done[: bench.done.index(big.request_id)] if name in {s.request_id for s in small}]
    assert 1 <= len(before) <= 5
    assert len(bench.done) == 22


@pytest.mark.parametrize("when", ["waiting", "prefilling", "running", "preempted"])
def test_removed_request_returns_its_blocks(when):
    bench = Bench(num_blocks=11, max_num_seqs=4, admission="max-utilization", max_num_batched_tokens=32)
    if when == "preempted":
        bench.add(40, 60)
    subject = bench.add(40, 60)
    if when == "prefilling":
        bench.step()
        assert 0 < subject.num_computed < subject.prompt_len
    elif when == "running":
        for _ in range(5):
            bench.step()
        assert subject.num_output > 0
    elif when == "preempted":
        while not subject.preemptions:
            bench.step()
    bench.scheduler.remove(subject)
    if when == "preempted":
        bench.drain()
    assert bench.pool.counts().free == 10
    assert bench.scheduler.promised == 0


def test_prefix_statistics_count_once_across_retries_and_preemptions():
    bench = Bench(num_blocks=11, caching=True, admission="max-utilization")
    shared = list(range(48))
    bench.add([*shared, 1], 1)
    bench.drain()
    for i in range(3):
        bench.add([*shared, 100 + i], 60)
    bench.drain()
    assert bench.scheduler.preemptions > 0
    assert (bench.scheduler.prefix_queries, bench.scheduler.prefix_hits) == (4 * 49, 3 * 48)


def test_answers_to_one_prompt_compute_it_once():
    bench = Bench(caching=True, max_num_batched_tokens=64)
    first = bench.add(list(range(160)), 8)
    others = [bench.add(list(range(160)), 8, parent=first) for _ in range(3)]
    computed = 0
    while not all(other.admitted for other in others):
        computed += sum(bench.step().values())
    computed += sum(bench.step().values())
    assert [other.cached_tokens for other in others] == [144] * 3
    assert computed < 160 + 3 * 16 + 3 * 8
    assert all(block.ref_count == 4 for block in first.blocks[:9])


def test_ten_thousand_queued_requests_are_cheap_to_hold_and_to_cancel():
    bench = Bench(num_blocks=4, max_num_seqs=1)
    blocker = bench.add(16, 17)
    bench.step()
    requests = [bench.request(8) for _ in range(10_000)]
    begin = time.process_time()
    for made in requests:
        bench.scheduler.add(made)
    for _ in range(20):
        bench.scheduler.schedule(bench.now)
    for made in requests:
        bench.scheduler.remove(made)
    each = (time.process_time() - begin) / 10_000
    assert each < 100e-6  # CPU time; scanning a queue this long costs several times that
    assert len(bench.scheduler.waiting) == 0
    bench.scheduler.remove(blocker)
    assert bench.pool.counts().free == 3


def test_step_with_thousands_waiting_touches_few_of_them():
    bench = Bench(num_blocks=11, max_num_seqs=4)
    bench.add(100, 60)
    bench.step()
    for _ in range(5000):
        bench.add(60, 60)
    bench.step()
    begin = time.process_time()
    for _ in range(20):
        bench.step()
    assert (time.process_time() - begin) / 20 < 0.005


@pytest.mark.parametrize("admission", ["no-evict", "max-utilization"])
@pytest.mark.parametrize("seed", range(6))
def test_books_balance_through_random_traffic_and_aborts_and_everyone_finishes(admission, seed):
    random = np.random.default_rng(seed)
    bench = Bench(num_blocks=24, caching=True, max_num_seqs=5, max_num_batched_tokens=40, admission=admission)
    alive, aborted = {}, 0
    for _ in range(400):
        if random.random() < 0.3:
            shared = [int(random.integers(0, 3))] * int(random.integers(0, 60))
            prompt = shared + random.integers(0, 100, int(random.integers(1, 40))).tolist()
            made = bench.add(prompt, int(random.integers(1, 120)), priority=int(random.integers(0, 3)))
            alive[made.request_id] = made
        if alive and random.random() < 0.05:
            bench.scheduler.remove(alive.pop(random.choice(sorted(alive))))
            aborted += 1
        bench.step()
        for name in bench.done:
            alive.pop(name, None)
    bench.drain()
    assert len(bench.done) + aborted == bench.count
    counts = bench.pool.counts()
    assert counts.used == 0
    assert sum(block.ref_count for block in bench.pool.blocks) == 0
    assert bench.scheduler.promised == 0
    assert bench.scheduler.prefix_hits > 0
    assert (bench.scheduler.preemptions > 0) == (admission == "max-utilization")
