"""Steps find their graphs, captured once over buffers that stay, and padding is there before a replay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quantkit.compile.buckets import plan_buckets
from quantkit.runtime.buckets import REASONS, Bucket, Dispatcher, StepShape, planned_sizes
from quantkit.runtime.graph_memory import GraphMemory
from quantkit.runtime.graphs import WARM_UPS, Graphs, OutOfDeviceMemory
from quantkit.runtime.step import Ints, StepInputs

PLANNED = planned_sizes(plan_buckets(24, 256).to_json())
DECODE = [Bucket("decode", size) for size in PLANNED["decode"]]
BLOCKS = 6


class Recorder:
    """A device of arrays. room: graphs it has memory for, a graph of n rows taking n; moving: when buffers move."""

    def __init__(self, room: int = 10**9, moving: Bucket | None = None) -> None:
        self.room, self.moving = room, moving
        sizes = {"token_ids": 256, "positions": 256, "slot_mapping": 256, "seq_lens": 24, "logits_rows": 24}
        self.buffers: dict[str, Ints] = {name: np.full(size, 99, np.int32) for name, size in sizes.items()}
        self.buffers |= {
            "query_start_loc": np.full(25, 99, np.int32),
            "block_table": np.full((24, BLOCKS), 99, np.int32),
        }
        self.events: list[tuple[str, Any]] = []
        self.seen: list[tuple[Bucket, dict[str, Ints], dict[str, int]]] = []

    def write(self, name: str, values: Ints) -> None:
        self.events.append(("write", name))
        self.buffers[name][: len(values)] = values

    def run(self, bucket: Bucket) -> None:
        self.events.append(("run", bucket))

    def capture(self, bucket: Bucket) -> Any:
        self.events.append(("capture", bucket))
        if bucket.size > self.room:
            raise OutOfDeviceMemory(f"{bucket.size} rows need more than {self.room}")
        self.room -= bucket.size
        if bucket == self.moving:
            self.buffers["seq_lens"] = self.buffers["seq_lens"].copy()
        return bucket, dict(self.addresses())

    def replay(self, graph: Any) -> None:
        bucket, addresses = graph
        self.events.append(("replay", bucket))
        self.seen.append((bucket, {name: array.copy() for name, array in self.buffers.items()}, addresses))

    def addresses(self) -> Mapping[str, int]:
        return {name: array.ctypes.data for name, array in self.buffers.items()}


def decode_step(sequences: int, blocks: int = 2) -> StepInputs:
    chance = np.random.default_rng()
    lengths = chance.integers(1, 16 * blocks + 1, sequences)
    return StepInputs.of_sequences(
        [[int(token)] for token in chance.integers(1, 1000, sequences)],
        [[1 + b * blocks + i for i in range(blocks)] for b in range(sequences)],
        starts=[int(length) - 1 for length in lengths],
    )


def prefill_step(tokens: int, logits: str = "last") -> StepInputs:
    return StepInputs.of_sequences([list(range(1, tokens + 1))], [list(range(1, -(-tokens // 64) + 1))],
                                   block_size=64, logits=logits)  # fmt: skip


@pytest.fixture
def ready() -> tuple[Graphs, Recorder]:
    recorder = Recorder()
    graphs = Graphs(recorder, PLANNED, BLOCKS)
    graphs.capture(DECODE)
    recorder.events.clear()
    return graphs, recorder


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        (StepShape(1, 1, 1), Bucket("decode", 1)),
        (StepShape(3, 3, 6), Bucket("decode", 4)),
        (StepShape(16, 16, 6), Bucket("decode", 16)),
        (StepShape(24, 24, 1), Bucket("decode", 24)),
        (StepShape(25, 25, 1), "too_large"),
        (StepShape(2, 2, 7), "too_long"),
        (StepShape(2, 9, 1), "mixed"),
        (StepShape(1, 90, 1), Bucket("prefill", 128)),
        (StepShape(1, 129, 1), "not_captured"),
        (StepShape(5, 5, 1), "shed"),
    ],
)
def test_every_step_has_a_bucket_or_a_counted_reason(shape: StepShape, chosen: Any) -> None:
    have = frozenset({Bucket("prefill", 128), *DECODE} - {Bucket("decode", 8)})
    dispatcher = Dispatcher(PLANNED, have, frozenset({Bucket("decode", 8)}), BLOCKS)
    assert dispatcher.choose(shape) == chosen
    assert dispatcher.choose(shape) == chosen
    counted = dispatcher.replays if isinstance(chosen, Bucket) else dispatcher.fallbacks
    assert counted[chosen] == 2
    assert sum(dispatcher.replays.values()) + sum(dispatcher.fallbacks.values()) == 2
    assert set(dispatcher.fallbacks) == set(REASONS)


def test_graphs_can_be_off() -> None:
    dispatcher = Dispatcher(PLANNED, frozenset(DECODE), frozenset(), BLOCKS, enabled=False)
    assert dispatcher.choose(StepShape(1, 1, 1)) == "disabled"


def test_capture_goes_from_the_largest_down_with_two_warm_ups_each() -> None:
    recorder = Recorder()
    made = Graphs(recorder, PLANNED, BLOCKS).capture(DECODE[::-1] + DECODE)
    order = [event for event in recorder.events if event[0] != "write"]
    assert made.captured == tuple(reversed(DECODE))
    assert order == [
        event for bucket in reversed(DECODE) for event in (*[("run", bucket)] * WARM_UPS, ("capture", bucket))
    ]
    assert (recorder.buffers["slot_mapping"][:24] == -1).all(), "a warm-up must write no cell of the cache"
    assert not recorder.buffers["seq_lens"].any()


def test_padding_is_written_before_the_replay_and_to_buffers_that_stay(ready: tuple[Graphs, Recorder]) -> None:
    graphs, recorder = ready
    before = dict(recorder.addresses())
    for sequences in (3, 24, 1, 7, 2):
        step = decode_step(sequences)
        bucket = graphs.replay(step)
        assert isinstance(bucket, Bucket)
        _, seen, captured_at = recorder.seen[-1]
        assert dict(recorder.addresses()) == before == captured_at
        n, size = sequences, bucket.size
        for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "logits_rows"):
            assert (seen[name][:n] == getattr(step, name)).all(), name
        assert (seen["slot_mapping"][n:size] == -1).all()
        assert not seen["seq_lens"][n:size].any()
        assert seen["query_start_loc"][: size + 1].tolist() == list(range(size + 1))
        assert (seen["block_table"][:n, : step.block_table.shape[1]] == step.block_table).all()
        assert not seen["block_table"][:n, step.block_table.shape[1] :].any()
        assert not seen["block_table"][n:size].any()
        kinds = [kind for kind, _ in recorder.events]
        assert kinds == ["write"] * 7 + ["replay"]
        recorder.events.clear()


def test_a_replay_equals_the_step_alone_whatever_was_replayed_before(ready: tuple[Graphs, Recorder]) -> None:
    graphs, recorder = ready
    step = decode_step(5)
    for between in (decode_step(24), decode_step(8), decode_step(1)):
        graphs.replay(step)
        first = recorder.seen[-1][1]
        graphs.replay(between)
        graphs.replay(step)
        again = recorder.seen[-1][1]
        for name, array in first.items():
            size = 9 if name == "query_start_loc" else 8
            assert (array[:size] == again[name][:size]).all(), name


def test_nothing_is_captured_once_serving(ready: tuple[Graphs, Recorder]) -> None:
    graphs, recorder = ready
    count = graphs.graph_captures_total
    assert count == len(DECODE)
    for sequences in range(1, 30):
        graphs.replay(decode_step(sequences))
    graphs.replay(prefill_step(100))
    assert graphs.graph_captures_total == count
    assert Counter(kind for kind, _ in recorder.events)["capture"] == 0
    with pytest.raises(RuntimeError, match="captured once"):
        graphs.capture(DECODE)
    assert graphs.dispatcher.fallbacks["too_large"] == 5
    assert graphs.dispatcher.fallbacks["not_captured"] == 1


def test_a_step_without_a_graph_touches_nothing(ready: tuple[Graphs, Recorder]) -> None:
    graphs, recorder = ready
    assert graphs.replay(decode_step(25)) == "too_large"
    assert graphs.replay(decode_step(2, blocks=BLOCKS + 1)) == "too_long"
    assert not recorder.events


def test_memory_that_runs_out_drops_the_largest_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(room=30)
    graphs = Graphs(recorder, PLANNED, BLOCKS)
    with caplog.at_level(logging.WARNING):
        made = graphs.capture(DECODE)
    # 24 fits in 30; 16 and 8 do not fit in the 6 left; 4 does, then 2 does, 1 does not.
    assert [bucket.size for bucket in made.captured] == [24, 4, 2]
    assert [bucket.size for bucket in made.shed] == [16, 8, 1]
    assert graphs.graph_captures_total == 3
    assert "no graph for decode steps of 16: 16 rows need more than 6" in caplog.messages[0]
    assert caplog.messages[-1].startswith("memory allows graphs for 3 of 6 buckets")
    assert graphs.replay(decode_step(9)) == "shed"
    assert graphs.replay(decode_step(20)) == Bucket("decode", 24)


def test_a_buffer_that_moves_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="buffers moved while decode 8 was captured"):
        Graphs(Recorder(moving=Bucket("decode", 8)), PLANNED, BLOCKS).capture(DECODE)


@pytest.mark.parametrize(("tokens", "logits"), [(1, "last"), (90, "last"), (128, "none")])
def test_a_prefill_is_padded_with_tokens_of_no_sequence(tokens: int, logits: str) -> None:
    recorder = Recorder()
    graphs = Graphs(recorder, {"decode": (), "prefill": PLANNED["prefill"]}, BLOCKS)
    graphs.capture([Bucket("prefill", 128)])
    step = prefill_step(tokens, logits)
    chosen = graphs.replay(step)
    if tokens == 1:
        assert chosen == "too_large", "one token of one sequence is a decode, and there is no bucket for any"
        return
    assert chosen == Bucket("prefill", 128)
    seen = recorder.seen[-1][1]
    assert seen["query_start_loc"][:2].tolist() == [0, tokens]
    assert (seen["slot_mapping"][tokens:128] == -1).all()
    assert (seen["slot_mapping"][:tokens] >= 0).all()
    assert seen["logits_rows"][0] == (tokens - 1 if logits == "last" else 0)


def test_the_memory_model_counts_one_pool_and_drops_the_largest() -> None:
    memory = GraphMemory(launches=160, token_bytes=50_000)
    assert memory.total([]) == 0
    assert memory.total(DECODE) == len(DECODE) * memory.graph() + 24 * 50_000
    assert memory.within(DECODE, memory.total(DECODE)) == tuple(reversed(DECODE))
    kept = memory.within(DECODE, memory.total(DECODE) - 1)
    assert kept == tuple(reversed(DECODE[:-1]))
    assert memory.within(DECODE, 0) == ()
    totals = [memory.total(DECODE[:count]) for count in range(len(DECODE) + 1)]
    assert all(less < more for less, more in pairwise(totals))
