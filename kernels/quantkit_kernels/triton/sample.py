"""A token for each row of logits on the device: temperature, top-k, top-p, min-p, a seeded draw, without a sort.

Every filter keeps a head of one order, larger logits first and lower ids first among equals (docs/decisions/0018);
such a head is told by its last logit and by how many of its equals it takes. A logit's bits, negative ones turned
over, are an integer of the same order, so that the last logit is found by cutting an interval of integers, in four a
pass over the row: top-k counts what lies above a cut, top-p sums weights. What is kept is drawn from by ascending id:
the token at which the running sum of the weights passes a uniform number's share of the whole (Philox 4x64 of seed and
position, as `ops/sample.py` has it; Salmon et al. 2011).

Weights exp((x − max) / temperature) are FP32, and sums of them integers in units of 2⁻⁴⁰: they are exact, so that no
order of adding matters and a row's token depends on that row alone. A uniform number within about 1e-6 of the boundary
of two tokens may give the other one than the float64 reference does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.ops.sample import COLDEST, HOTTEST, SampleRow
from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

BLOCK = 4096
"""Logits that a program looks at together."""
WARPS = 8
_MASK = 2**64 - 1
_UNIT = tl.constexpr(2.0**40)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-(2**31) - 1)
"""Below every logit's key."""
_MOST = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class SampleTensors:
    """How each of R rows is drawn, on the device of the logits.

    temperature: float32 `[R]`, 0 for greedy. top_k: int32 `[R]`, 0 for all. top_p: float64 `[R]`. below: float64 `[R]`,
    how far below the largest logit min-p still keeps one, -infinity for all. seed, position: int64 `[R]`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    below: Tensor
    seed: Tensor
    position: Tensor


def sample_tensors(rows: Sequence[SampleRow], device: torch.device | str = "cpu") -> SampleTensors:
    """The rows' temperature and filters; ValueError for what this kernel leaves to its caller or to the CPU."""
    for row in rows:
        adjusts = row.bias or row.banned or row.repetition != 1.0 or row.presence or row.frequency
        if adjusts or row.logprobs is not None:
            raise ValueError("the sampling kernel takes adjusted logits and reports no log probabilities")
    heat = [0.0 if row.temperature < COLDEST else min(row.temperature, HOTTEST) for row in rows]
    below = [t * math.log(row.min_p) if row.min_p else -math.inf for t, row in zip(heat, rows, strict=True)]
    wrapped = [(row.seed & _MASK) - 2**64 * ((row.seed & _MASK) >> 63) for row in rows]
    return SampleTensors(
        torch.tensor(heat, dtype=torch.float32, device=device),
        torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=device),
        torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device),
        torch.tensor(below, dtype=torch.float64, device=device),
        torch.tensor(wrapped, dtype=torch.int64, device=device),
        torch.tensor([row.position for row in rows], dtype=torch.int64, device=device),
    )


@triton.jit
def _load(logits, at, vocab):
    """Logits at `at`, -infinity behind the vocabulary; -0 as 0, which it equals."""
    return tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32) + 0.0


@triton.jit
def _key(x):
    """int64 in the order of float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _weight(x, largest, heat):
    """exp((x − largest) / heat) in units of 2⁻⁴⁰, int64."""
    return (tl.exp2((x - largest) / heat * _LOG2E) * _UNIT).to(tl.int64)


@triton.jit
def _largest(logits, vocab, BLOCK: tl.constexpr):
    """The largest logit, infinity where one is NaN, and its lowest id."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    who = tl.zeros((BLOCK,), tl.int32)
    spoiled = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = _load(logits, at, vocab)
        spoiled |= (x != x).to(tl.int32)
        who = tl.where(x > top, at, who)
        top = tl.where(x > top, x, top)
    largest = tl.max(top, axis=0)
    token = tl.min(tl.where(top == largest, who, _MOST), axis=0)
    return tl.where(tl.max(spoiled, axis=0) > 0, float("inf"), largest), token


@triton.jit
def _last(logits, vocab, low, high, wanted, largest, heat, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key of low..high from which up logits number `wanted`, or with WEIGHTS weigh it. `low` is one."""
    while low < high:
        part = (high - low + 3) // 4
        first = low + part
        second = first + part
        third = second + part
        a = tl.zeros((BLOCK,), tl.int64)
        b = tl.zeros((BLOCK,), tl.int64)
        c = tl.zeros((BLOCK,), tl.int64)
        for begin in range(0, vocab, BLOCK):
            x = _load(logits, begin + tl.arange(0, BLOCK), vocab)
            key = _key(x)
            each = _weight(x, largest, heat) if WEIGHTS else tl.full((BLOCK,), 1, tl.int64)
            a += tl.where(key >= first, each, 0)
            b += tl.where(key >= second, each, 0)
            c += tl.where(key >= third, each, 0)
        in_first, in_second, in_third = tl.sum(a) >= wanted, tl.sum(b) >= wanted, tl.sum(c) >= wanted
        low = tl.where(in_third, third, tl.where(in_second, second, tl.where(in_first, first, low)))
        end = tl.where(in_third, high, tl.where(in_second, third - 1, tl.where(in_first, second - 1, first - 1)))
        high = tl.minimum(high, end)
    return low


@triton.jit
def _head(logits, vocab, edge, largest, heat, BLOCK: tl.constexpr):
    """How many logits have keys above `edge`, what they weigh, and what one at the edge weighs."""
    count = tl.zeros((BLOCK,), tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    level = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, vocab, BLOCK):
        x = _load(logits, begin + tl.arange(0, BLOCK), vocab)
        key, weight = _key(x), _weight(x, largest, heat)
        count += (key > edge).to(tl.int64)
        total += tl.where(key > edge, weight, 0)
        level = tl.maximum(level, tl.where(key == edge, weight, 0))
    return tl.sum(count), tl.sum(total), tl.max(level)


@triton.jit
def _floor_key(largest, below):
    """The key of the least float32 that is at least largest + below (float64)."""
    bound = largest.to(tl.float64) + below
    near = bound.to(tl.float32)
    return _key(near + 0.0) + (near.to(tl.float64) < bound).to(tl.int64)


@triton.jit
def _uniform(seed, position):
    """The first of Philox 4x64-10's words for counter `position` + 1 and key `seed`, as a number in [0, 1)."""
    zero = seed ^ seed
    word_0, word_1, word_2, word_3 = position + 1, tl.where(position + 1 == 0, zero + 1, zero), zero, zero
    key_0, key_1 = seed, zero
    for _ in tl.static_range(10):
        a, b = tl.full((), 0xD2E7470EE14C6C93, tl.uint64), tl.full((), 0xCA5A826395121157, tl.uint64)
        next_0, next_1 = tl.umulhi(b, word_2) ^ word_1 ^ key_0, b * word_2
        next_2, next_3 = tl.umulhi(a, word_0) ^ word_3 ^ key_1, a * word_0
        word_0, word_1, word_2, word_3 = next_0, next_1, next_2, next_3
        key_0 += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        key_1 += tl.full((), 0xBB67AE8584CAA73B, tl.uint64)
    return (word_0 >> 11).to(tl.int64).to(tl.float64) * (2.0**-53)


@triton.jit
def _drawn(logits, vocab, edge, equals, target, largest, heat, BLOCK: tl.constexpr):
    """The id where the running weight of what is kept passes `target`: keys above `edge`, the first `equals` at it."""
    token = vocab * 0
    running = target * 0
    met = target * 0
    for begin in range(0, vocab, BLOCK):
        x = _load(logits, begin + tl.arange(0, BLOCK), vocab)
        key = _key(x)
        level = (key == edge).to(tl.int64)
        kept = (key > edge) | ((level > 0) & (met + tl.cumsum(level) <= equals))
        weight = tl.where(kept, _weight(x, largest, heat), 0)
        passed = (running + tl.cumsum(weight) <= target).to(tl.int32)
        token += tl.sum(passed)
        running += tl.sum(weight)
        met += tl.sum(level)
    return token


@triton.jit(do_not_specialize=["vocab"])
def sample_kernel(logits, temperature, top_k, top_p, below, seed, position, tokens, vocab, BLOCK: tl.constexpr):
    """Programs (row)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    heat = tl.load(temperature + row)
    largest, token = _largest(logits, vocab, BLOCK)
    if tl.abs(largest) == float("inf"):
        token = -1
    elif heat > 0.0:
        high = _key(largest)
        edge = high * 0 + _LOWEST
        equals = high * 0
        wanted = tl.load(top_k + row).to(tl.int64)
        if (wanted > 0) & (wanted < vocab):
            edge = _last(logits, vocab, edge + 1, high, wanted, largest, heat, False, BLOCK)
            count, _, _ = _head(logits, vocab, edge, largest, heat, BLOCK)
            equals = wanted - count
        share = tl.load(top_p + row)
        if share < 1.0:
            _, over, level = _head(logits, vocab, edge, largest, heat, BLOCK)
            wanted = tl.maximum(tl.ceil(share * (over + equals * level).to(tl.float64)).to(tl.int64), 1)
            edge = _last(logits, vocab, tl.maximum(edge, _LOWEST + 1), high, wanted, largest, heat, True, BLOCK)
            _, over, level = _head(logits, vocab, edge, largest, heat, BLOCK)
            equals = (wanted - over + level - 1) // level
        floor = tl.load(below + row)
        if floor > float("-inf"):
            least = _floor_key(largest, floor)
            equals = tl.where(least > edge, 0, equals)
            edge = tl.maximum(edge, least - 1)
        _, over, level = _head(logits, vocab, edge, largest, heat, BLOCK)
        total = over + equals * level
        place = _uniform(
            tl.load(seed + row).to(tl.uint64, bitcast=True), tl.load(position + row).to(tl.uint64, bitcast=True)
        )
        target = tl.minimum((place * total.to(tl.float64)).to(tl.int64), total - 1)
        token = _drawn(logits, vocab, edge, equals, target, largest, heat, BLOCK)
    tl.store(tokens + row, token)


def sample(logits: Tensor, how: SampleTensors, out: Tensor | None = None) -> Tensor:
    """One draw a row: int32 `[R]` (written to `out` where given), -1 where a row holds NaN or its largest is infinite.

    logits: float16, bfloat16 or float32 `[R, V]`, penalties and bans applied. Raises ValueError for other shapes or
    types.
    """
    rows = logits.shape[0]
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    expect("logits", logits, (rows, None), FLOATS)
    expect("out", out, (rows,), (torch.int32,))
    for name, dtype in _DTYPES.items():
        expect(name, getattr(how, name), (rows,), (dtype,))
    if rows:
        sample_kernel[(rows,)](
            logits, how.temperature, how.top_k, how.top_p, how.below, how.seed, how.position, out, logits.shape[1],
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "below": torch.float64,
    "seed": torch.int64,
    "position": torch.int64,
}


def _refusal(facts: Facts) -> str | None:
    return None


def _signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {
        "logits": f"*{facts['dtype']}", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp64", "below": "*fp64",
        "seed": "*i64", "position": "*i64", "tokens": "*i32", "vocab": int(facts["vocab"]),
    }  # fmt: skip
    return Signature(arguments, {"BLOCK": BLOCK}, num_warps=WARPS)


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], 1, 1)


SPECS = (KernelSpec("sample", "sample", sample_kernel, _refusal, _signature, _grid),)
