from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit_kernels.ops import sample as op
from quantkit_kernels.ops.sample import Sampled, SampleRow
from quantkit_kernels.triton import sample as kernel
from tests.ops.test_sample import assert_agrees, random_logits, random_row


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn(logits: np.ndarray, rows: list[SampleRow]) -> list[Sampled]:
    """What the kernel makes of a poisoned output."""
    out = torch.full((len(rows) + 2,), -77, dtype=torch.int32)
    kernel.sample(torch.from_numpy(logits), kernel.sample_tensors(rows), out[: len(rows)])
    assert out[len(rows) :].tolist() == [-77, -77]
    return [Sampled(token if token >= 0 else None) for token in out[: len(rows)].tolist()]


def plain(row: SampleRow) -> SampleRow:
    """The row without what is applied to the logits before."""
    return SampleRow(
        temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p, seed=row.seed,
        position=row.position,
    )  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 2, 17, 129, 1000, 4099, 8192])
def test_random_rows_are_drawn_as_the_plain_form_draws_them(vocab: int, rng: np.random.Generator) -> None:
    logits = random_logits(rng, 12, vocab)
    rows = [plain(random_row(rng, vocab)) for _ in range(12)]
    for values, row, got in zip(logits, rows, drawn(logits, rows), strict=True):
        assert_agrees(values, row, got)


def test_greedy_is_the_lowest_id_of_the_largest(rng: np.random.Generator) -> None:
    logits = np.round(rng.standard_normal((20, 5000))).astype(np.float32)
    logits[0] = -0.0
    logits[0, 4500:] = 0.0
    assert [got.token for got in drawn(logits, [SampleRow()] * 20)] == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_a_row_without_a_finite_largest_draws_nothing(spoiled: float) -> None:
    logits = np.zeros((4, 5000), np.float32)
    logits[0, 4321] = spoiled
    logits[1] = -np.inf
    logits[2, 7] = -np.inf
    tokens = [got.token for got in drawn(logits, [SampleRow(temperature=1.0)] * 4)]
    assert tokens[:2] == [None, None]
    assert None not in tokens[2:]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_p": 0.5}, 2), ({"top_p": 0.5000001}, 3), ({"top_p": 0.25}, 1), ({"top_p": 1e-12}, 1),
        ({"top_p": 0.75}, 3), ({"top_p": 0.7500001}, 4), ({"top_k": 3}, 3), ({"top_k": 3, "top_p": 0.5}, 2),
        ({"top_k": 2, "top_p": 0.5}, 1), ({"min_p": 1.0}, 4), ({}, 4), ({"top_k": 4, "min_p": 1.0, "top_p": 0.75}, 3),
    ],
)  # fmt: skip
def test_filters_cut_equals_exactly_at_their_bound_by_id(filters: dict[str, float], kept: int) -> None:
    values = np.full(4500, -1000.0, np.float32)  # in two blocks
    ids = [5, 140, 141, 4400]
    values[ids] = 2.5
    rows = [SampleRow(temperature=1.0, seed=seed, **filters) for seed in range(32)]  # type: ignore[arg-type]
    assert {got.token for got in drawn(np.tile(values, (32, 1)), rows)} <= set(ids[:kept])
    wanted = [got.token for got in op.reference(np.tile(values, (32, 1)), rows)]
    assert [got.token for got in drawn(np.tile(values, (32, 1)), rows)] == wanted


def test_the_stream_of_seeds_and_positions_is_the_reference_s(rng: np.random.Generator) -> None:
    """Over equal logits the token is the uniform number itself, to 12 bits."""
    seeds = [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, *rng.integers(0, 2**63, 20).tolist()]
    rows = [SampleRow(temperature=1.0, seed=s, position=i * 10**i % 2**62) for i, s in enumerate(seeds)]
    tokens = [got.token for got in drawn(np.zeros((len(rows), 4096), np.float32), rows)]
    assert tokens == [int(op.uniform(row.seed, row.position) * 4096) for row in rows]


def test_a_row_is_drawn_alike_alone_and_among_others(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 6, 5000)
    rows = [plain(random_row(rng, 5000)) for _ in range(6)]
    alone = [drawn(logits[i : i + 1], rows[i : i + 1])[0] for i in range(6)]
    assert drawn(logits, rows) == alone


def test_logits_of_half_precision_are_drawn_from_as_they_are(rng: np.random.Generator) -> None:
    halves = rng.standard_normal((8, 3000)).astype(np.float16)
    rows = [plain(random_row(rng, 3000)) for _ in range(8)]
    out = kernel.sample(torch.from_numpy(halves), kernel.sample_tensors(rows))
    assert [Sampled(t) for t in out.tolist()] == drawn(halves.astype(np.float32), rows)


def test_rows_that_ask_for_more_are_refused() -> None:
    for row in (SampleRow(bias={1: 2.0}), SampleRow(repetition=1.1), SampleRow(logprobs=0)):
        with pytest.raises(ValueError, match="takes adjusted logits"):
            kernel.sample_tensors([row])
