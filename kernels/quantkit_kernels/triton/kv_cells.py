"""Cells of the paged cache inside kernels: stored as the CPU stores them (`ops/kv_cells.py`), read as tiles.

A tile holds one KV head's keys or values for a matrix product, channels along its columns in the order that costs least
to make: queries are brought into it (`to_tile`) and outputs out of it (`from_tile`) once. Its numbers are float16, or
bfloat16 for such a cache:

    INT8    the bits of code + 128, as they stand, are the subnormal FP16 number (code + 128)·2⁻²⁴, which matrix
            instructions take like any other (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores")
    FP8     converted, which is exact; machines have the instruction from sm_89 on
    INT4    code·scale + minimum of the token's group, rounded to float16; the bits of a code under an exponent of 2¹⁰
            are 1024 + code, or 1024 + 16·code
    FP16, BF16   as they are

The calibrated scale of a channel is nobody's business here: attention folds it into the query and its output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit_kernels.cache_formats import CACHE_FORMATS, GROUPS, group_of
from quantkit_kernels.triton.spec import Facts

POINTERS = {kind.name: f"*{kind.triton}" for kind in CACHE_FORMATS.values() if kind.triton is not None}
"""Formats that kernels know, and the type of a pointer to their elements."""
INT8_ZERO = tl.constexpr(128.0)
INT8_UNIT = tl.constexpr(2.0**-24)
"""An INT8 tile holds (code + INT8_ZERO) · INT8_UNIT."""
_WHOLE = tl.constexpr(12582912.0)
"""1.5 · 2²³ leaves no bits for fractions: adding it rounds half to even."""


def unknown(cache_format: str, head_dim: int) -> str | None:
    """Why no kernel keeps heads of `head_dim` channels in the format, or None."""
    if cache_format not in POINTERS:
        return f"no kernel for a cache in {cache_format}: {', '.join(POINTERS)} have"
    if cache_format == "INT4" and head_dim % GROUPS[-1]:
        return f"heads of {head_dim} channels: an INT4 cache is read in words of {GROUPS[-1]} codes"
    return None


def refusal(facts: Facts) -> str | None:
    """Why no kernel of the target keeps a cache as the facts say, or None."""
    kind = CACHE_FORMATS[str(facts["cache"])]
    if int(facts["sm"]) < kind.least_sm:
        return f"a cache in {kind.name} has kernels from sm_{kind.least_sm} on; one in INT8 has them everywhere"
    return unknown(kind.name, int(facts["head_dim"]))


def constants(cache_format: str, head_dim: int) -> dict[str, int | str]:
    """What kernels over a cache are told about its cells. SHARING: channels of an INT4 group, 1 in other formats."""
    return {"FORMAT": cache_format, "SHARING": group_of(head_dim) if cache_format == "INT4" else 1}


@triton.jit
def store_cells(
    cells, value, scale, head, channel, fits,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """Store value float32 `[heads, channels]` at the cells that `cells` `[heads, 1]` points to, for heads `head`
    `[heads, 1]` whose scales are float32 `[Hkv, D]`, None for float formats.
    """
    if scale is not None:
        value = tl.div_rn(value, tl.load(scale + head * HEAD_DIM + channel, mask=fits, other=1.0))
    if FORMAT == "INT8":
        code = (tl.clamp(value, -127.0, 127.0) + _WHOLE) - _WHOLE
        tl.store(cells + channel, code.to(tl.int8), mask=fits)
    elif FORMAT == "FP8":
        tl.store(cells + channel, _e4m3(value), mask=fits)
    elif FORMAT == "INT4":
        _store_int4(cells, value, fits, HEAD_DIM, SHARING)
    else:
        tl.store(cells + channel, value.to(cells.dtype.element_ty), mask=fits)


@triton.jit
def _e4m3(value):
    """uint8 codes of float32: half to even, beyond 448 saturating, NaN 0x7f. Bit by bit, alike on every machine."""
    size = tl.minimum(tl.abs(value), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    tiny = ((size * 512.0 + _WHOLE) - _WHOLE).to(tl.int32)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(size < 2.0**-6, tiny, normal) | sign
    return tl.where(value == value, code, 0x7F).to(tl.uint8)


@triton.jit
def _store_int4(cells, value, fits, HEAD_DIM: tl.constexpr, SHARING: tl.constexpr):
    HEADS: tl.constexpr = value.shape[0]
    GROUPS: tl.constexpr = value.shape[1] // SHARING
    HALF: tl.constexpr = SHARING // 2
    groups = tl.reshape(value, (HEADS, GROUPS, SHARING))
    spoiled = tl.max((groups != groups).to(tl.int32), axis=2) > 0
    groups = tl.where(spoiled[:, :, None], 0.0, tl.clamp(groups, -65504.0, 65504.0))
    low = tl.min(groups, axis=2) + 0.0  # + 0: neither this nor the next is -0
    near = low.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    minimum_bits = tl.where(near.to(tl.float32) <= low, bits, tl.where(bits < 0, bits + 1, bits - 1)).to(tl.int16)
    minimum = minimum_bits.to(tl.float16, bitcast=True).to(tl.float32)
    wide = tl.div_rn(tl.max(groups, axis=2) - minimum + 0.0, tl.full((HEADS, GROUPS), 15.0, tl.float32))
    near = wide.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    unit_bits = tl.where(near.to(tl.float32) < wide, bits + 1, bits).to(tl.int16)
    unit = unit_bits.to(tl.float16, bitcast=True).to(tl.float32)
    step = tl.broadcast_to(tl.where(unit == 0.0, 1.0, unit)[:, :, None], (HEADS, GROUPS, SHARING))
    codes = (tl.div_rn(groups - minimum[:, :, None], step) + _WHOLE) - _WHOLE
    codes = tl.reshape(tl.minimum(codes, 15.0).to(tl.int32), (HEADS, GROUPS, 2, HALF))
    first, second = tl.split(tl.permute(codes, (0, 1, 3, 2)))
    # Heads fit as a whole, and so do groups.
    head_fits = tl.max(fits.to(tl.int32), axis=1) > 0
    group = tl.arange(0, GROUPS)
    group_fits = head_fits[:, None] & (group < HEAD_DIM // SHARING)[None, :]
    at = group[None, :, None] * HALF + tl.arange(0, HALF)[None, None, :]
    tl.store(cells[:, :, None] + at, (first | (second << 4)).to(tl.uint8), mask=group_fits[:, :, None])
    minimum_bits = tl.where(spoiled, 0x7E00, minimum_bits.to(tl.int32) & 0xFFFF)
    levels = (cells + HEAD_DIM // 2).to(tl.pointer_type(tl.int32))
    tl.store(levels + group[None, :], (unit_bits.to(tl.int32) & 0xFFFF) | (minimum_bits << 16), mask=group_fits)


@triton.jit
def to_tile(rows, FORMAT: tl.constexpr, SHARING: tl.constexpr):
    """Rows `[R, DIM_BLOCK]` with their channels in the order of a tile's columns."""
    R: tl.constexpr = rows.shape[0]
    D: tl.constexpr = rows.shape[1]
    if FORMAT == "INT8":
        rows = rows.reshape(R, D // 2, 2).permute(0, 2, 1).reshape(R, D)
    elif FORMAT == "INT4":
        rows = rows.reshape(R, D // SHARING, 2, SHARING // 4, 2).permute(0, 4, 2, 1, 3).reshape(R, D)
    return rows


@triton.jit
def from_tile(rows, FORMAT: tl.constexpr, SHARING: tl.constexpr):
    """Rows `[R, DIM_BLOCK]` in the order of a tile's columns, by ascending channel."""
    R: tl.constexpr = rows.shape[0]
    D: tl.constexpr = rows.shape[1]
    if FORMAT == "INT8":
        rows = rows.reshape(R, 2, D // 2).permute(0, 2, 1).reshape(R, D)
    elif FORMAT == "INT4":
        rows = rows.reshape(R, 2, 2, D // SHARING, SHARING // 4).permute(0, 3, 2, 4, 1).reshape(R, D)
    return rows


@triton.jit
def find_cells(table, kv_head, key, seen, KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Index `[T]` in a cache of the cells of a sequence's positions `key`; anything where they are not seen."""
    page = tl.load(table + key // PAGE, mask=seen, other=0)
    return (page * KV_HEADS + kv_head) * PAGE + key % PAGE


@triton.jit
def load_cells(
    cache, cell, seen, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, SHARING: tl.constexpr, DIM_BLOCK: tl.constexpr
):
    """What `tile` makes numbers of: elements of the cells at index `cell` int32 `[T]` where `seen`, and their levels.

    Levels are words of a scale and a minimum a group of an INT4 cell, `[T, groups]`; others have none, and give the
    elements twice.
    """
    CHANNELS: tl.constexpr = 8 if FORMAT == "INT4" else 4 if FORMAT == "INT8" or FORMAT == "FP8" else 2
    CELL: tl.constexpr = HEAD_DIM // CHANNELS + (HEAD_DIM // SHARING if FORMAT == "INT4" else 0)
    words = cache.to(tl.pointer_type(tl.int32))
    # INT8 codes need no zeros where nothing is loaded: whatever the bits, they are finite, and their weight is zero.
    NOTHING: tl.constexpr = None if FORMAT == "INT8" else 0
    lane = tl.arange(0, DIM_BLOCK // CHANNELS)
    at = cell[:, None] * CELL + lane[None, :]
    elements = tl.load(words + at, mask=seen[:, None] & (lane < HEAD_DIM // CHANNELS)[None, :], other=NOTHING)
    levels = elements
    if FORMAT == "INT4":
        group = tl.arange(0, DIM_BLOCK // SHARING)
        at = cell[:, None] * CELL + HEAD_DIM // 8 + group[None, :]
        levels = tl.load(words + at, mask=seen[:, None] & (group < HEAD_DIM // SHARING)[None, :], other=0)
    return elements, levels


@triton.jit
def tile(elements, levels, keep, FORMAT: tl.constexpr, SHARING: tl.constexpr, TYPE: tl.constexpr):
    """Numbers `[T, DIM_BLOCK]` of loaded cells. keep: 0x00FF00FF, in a register (INT8 alone uses it)."""
    if FORMAT == "INT8":
        even = _pairs((elements & keep) ^ 0x00800080, TYPE)
        odd = _pairs(((elements >> 8) & keep) ^ 0x00800080, TYPE)
        numbers = _apart(even, odd)
    elif FORMAT == "FP8":
        even = tl.join(_byte(elements, 0), _byte(elements, 16))
        odd = tl.join(_byte(elements, 8), _byte(elements, 24))
        code = tl.join(even, odd).reshape(elements.shape[0], 4 * elements.shape[1])
        numbers = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "INT4":
        unit = _spread(levels & 0xFFFF, 2 * elements.shape[1])
        minimum = _spread(levels >> 16, 2 * elements.shape[1])
        numbers = _apart(
            _apart(_nibbles(elements, 0) * unit + minimum, _nibbles(elements, 4) * unit + minimum),
            _apart(_nibbles(elements >> 8, 0) * unit + minimum, _nibbles(elements >> 8, 4) * unit + minimum),
        )
    else:
        numbers = _pairs(elements, TYPE)
    return numbers


@triton.jit
def _byte(words, SHIFT: tl.constexpr):
    return (words >> SHIFT).to(tl.uint8)


@triton.jit
def _pairs(words, TYPE: tl.constexpr):
    """int32 words `[T, W]` -> the two numbers of 16 bits in each, `[T, 2·W]`."""
    low = (words & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(TYPE, bitcast=True)
    return tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1])


@triton.jit
def _apart(one, other):
    """Two tiles `[T, N]` side by side, `[T, 2·N]`."""
    return tl.join(one, other).permute(0, 2, 1).reshape(one.shape[0], 2 * one.shape[1])


@triton.jit
def _nibbles(words, SHIFT: tl.constexpr):
    """float16 `[T, 2·W]`: the codes at bits SHIFT.. of both halves of each word."""
    raw = _pairs((words & (0xF000F << SHIFT)) | 0x64006400, tl.float16)
    if SHIFT:
        raw = raw * 0.0625 - 64.0
    else:
        raw -= 1024.0
    return raw


@triton.jit
def _spread(bits, COLUMNS: tl.constexpr):
    """The float16 numbers whose bits `bits` int32 `[T, groups]` holds, each for its group's columns: `[T, COLUMNS]`."""
    number = bits.to(tl.uint16).to(tl.float16, bitcast=True)
    each = tl.broadcast_to(number[:, :, None], (bits.shape[0], bits.shape[1], COLUMNS // bits.shape[1]))
    return tl.reshape(each, (bits.shape[0], COLUMNS))
