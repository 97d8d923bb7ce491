"""Block pool and prefix cache: who holds what, what is found again, what is given out next."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.runtime.block_pool import BlockPool
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import SamplingParams

SIZE = 4


def request(tokens, *, salt="", capacity=64):
    tokens = np.asarray(tokens, np.int32)
    return Request("r", SamplingParams(), tokens, len(tokens), capacity, 0, frozenset(), (0, 0.0, 0), 0.0,
                   salt=salt, num_tokens=len(tokens))  # fmt: skip


def computed(pool, cache, tokens, **kwargs):
    """A request whose tokens are all computed and published."""
    made = request(tokens, **kwargs)
    hits = cache.find(made)
    pool.share(hits)
    made.hold(hits)
    made.hold(pool.take(-(-len(tokens) // SIZE) - len(hits)))
    made.num_published, made.num_computed = len(hits), len(tokens)
    cache.publish(made)
    return made


def test_null_block_is_never_given_out():
    pool = BlockPool(5)
    assert 0 not in [block.block_id for block in pool.take(4)]
    with pytest.raises(RuntimeError, match="1 blocks wanted, 0 idle"):
        pool.take(1)


def test_free_cached_used_add_up_through_a_life():
    pool = BlockPool(9)
    cache = PrefixCache(pool, SIZE, "id")
    made = computed(pool, cache, range(10))
    assert pool.counts() == pool.counts().__class__(free=5, cached=0, used=3, total=8)
    pool.release(made.blocks)
    assert pool.counts() == pool.counts().__class__(free=6, cached=2, used=0, total=8)


def test_worthless_blocks_go_first_then_tails_then_heads_in_order_of_release():
    pool = BlockPool(9)
    cache = PrefixCache(pool, SIZE, "id")
    first = computed(pool, cache, range(10))  # blocks 1, 2 full, 3 partial
    second = computed(pool, cache, range(100, 109))  # blocks 4, 5 full, 6 partial
    pool.release(first.blocks)
    pool.release(second.blocks)
    assert pool.idle_order() == [6, 3, 7, 8, 2, 1, 5, 4]


def test_a_block_leaves_the_middle_of_the_free_list_when_shared_again():
    pool = BlockPool(6)
    cache = PrefixCache(pool, SIZE, "id")
    made = computed(pool, cache, range(12))
    pool.release(made.blocks)
    assert pool.idle_order() == [4, 5, 3, 2, 1]
    pool.share([made.blocks[1]])
    assert pool.idle_order() == [4, 5, 3, 1]
    pool.release([made.blocks[1]])
    assert pool.idle_order() == [4, 5, 3, 1, 2]


def test_hit_while_the_owner_lives_counts_two_references_and_still_hits_after_it_is_freed():
    pool = BlockPool(9)
    cache = PrefixCache(pool, SIZE, "id")
    owner = computed(pool, cache, range(9))
    guest = computed(pool, cache, [*range(8), 77])
    assert guest.blocks[:2] == owner.blocks[:2]
    assert [block.ref_count for block in owner.blocks] == [2, 2, 1]
    pool.release(owner.blocks)
    pool.release(guest.blocks)
    assert cache.find(request(range(9))) == owner.blocks[:2]


def test_the_last_token_is_never_covered_by_a_hit():
    pool = BlockPool(9)
    cache = PrefixCache(pool, SIZE, "id")
    computed(pool, cache, range(8))
    assert len(cache.find(request(range(8)))) == 1
    assert len(cache.find(request(range(9)))) == 2
    assert cache.find(request([0])) == []


def test_evicted_blocks_are_not_found():
    pool = BlockPool(3)
    cache = PrefixCache(pool, SIZE, "id")
    pool.release(computed(pool, cache, range(8)).blocks)
    pool.take(1)  # the tail of what was released
    assert len(cache.find(request(range(9)))) == 1


def test_same_tokens_after_other_tokens_are_another_block():
    pool = BlockPool(9)
    cache = PrefixCache(pool, SIZE, "id")
    computed(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.find(request([9, 9, 9, 9, 5, 6, 7, 8, 0])) == []


@pytest.mark.parametrize("change", ["salt", "identity", "disabled"])
def test_other_salt_model_or_a_cache_switched_off_never_hits(change):
    pool = BlockPool(9)
    computed(pool, PrefixCache(pool, SIZE, "id"), range(9))
    cache = PrefixCache(pool, SIZE, "other" if change == "identity" else "id", enabled=change != "disabled")
    assert cache.find(request(range(9), salt="tenant" if change == "salt" else "")) == []


def test_identical_prompts_computed_side_by_side_publish_one_block():
    pool = BlockPool(9)
    cache = PrefixCache(pool, SIZE, "id")
    twins = [request(range(5)), request(range(5))]
    for twin in twins:
        twin.hold(pool.take(2))
        twin.num_computed = 5
        cache.publish(twin)
    assert cache.find(request(range(5))) == [twins[0].blocks[0]]
    for twin in twins:
        pool.release(twin.blocks)
    assert pool.counts().cached == 1


def test_debug_check_catches_a_block_with_other_tokens():
    pool = BlockPool(9)
    cache = PrefixCache(pool, SIZE, "id", check_tokens=True)
    made = computed(pool, cache, range(9))
    assert len(cache.find(request(range(9)))) == 2
    made.blocks[1].tokens = b"other"
    with pytest.raises(RuntimeError, match="holds other tokens"):
        cache.find(request(range(9)))
