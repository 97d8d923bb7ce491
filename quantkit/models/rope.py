"""Rotary position embeddings: cosine and sine tables of every supported kind.

Formulas and the order of float32 operations follow Transformers' `modeling_rope_utils.ROPE_INIT_FUNCTIONS`. Powers,
cosines and sines are taken in float64 and rounded once; torch takes them in float32, so that its tables may differ from
these by one unit in the last place. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv
2402.13753), Llama 3.1's frequency smoothing (its reference code, `apply_scaling`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quantkit.models.spec import RopeSpec

_ROWS = 4096
"""Positions taken in float64 at a time."""


def cos_sin(rope: RopeSpec, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Tables of `rope` for positions 0 ... num_positions - 1; attention factors (yarn, longrope) folded in.

    Longrope picks its long factors when `num_positions` exceeds `original_max_position_embeddings`, for all
    positions alike: one engine keeps one table, sized by the longest sequence it admits.

    Returns:
        (cos, sin), each float32 `[num_positions, rotary_dim // 2]`.
    """
    inverse, factor = inverse_frequencies(rope, num_positions)
    cos, sin = (np.empty((num_positions, len(inverse)), np.float32) for _ in range(2))
    positions = np.arange(num_positions, dtype=np.float32)[:, None]
    with np.errstate(all="ignore"):
        for start in range(0, num_positions, _ROWS):
            part = slice(start, start + _ROWS)
            angles = (positions[part] * inverse).astype(np.float64)
            cos[part], sin[part] = np.cos(angles), np.sin(angles)
        return cos * np.float32(factor), sin * np.float32(factor)


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> tuple[NDArray[np.float32], float]:
    """(radians a position turns each pair of channels, float32 `[rotary_dim // 2]`; factor on cosine and sine)."""
    with np.errstate(all="ignore"):  # what a hostile theta or factor makes of them is for the caller to look at
        return _INVERSE[rope.kind](rope, num_positions)


def _powers(rope: RopeSpec) -> NDArray[np.float32]:
    """theta ** (2 i / rotary_dim), float32 `[rotary_dim // 2]`."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    return np.power(float(rope.theta), exponents, dtype=np.float64).astype(np.float32)


def _default(rope: RopeSpec, num_positions: int) -> tuple[NDArray[np.float32], float]:
    return 1.0 / _powers(rope), 1.0


def _linear(rope: RopeSpec, num_positions: int) -> tuple[NDArray[np.float32], float]:
    return 1.0 / _powers(rope) / rope.params["factor"], 1.0


def _llama3(rope: RopeSpec, num_positions: int) -> tuple[NDArray[np.float32], float]:
    """Long wavelengths slowed by `factor`, short ones kept, a linear blend between."""
    factor, original = rope.params["factor"], rope.params["original_max_position_embeddings"]
    low, high = rope.params["low_freq_factor"], rope.params["high_freq_factor"]
    inverse = 1.0 / _powers(rope)
    wavelength = 2 * math.pi / inverse
    slowed = np.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(between, blended, slowed), 1.0


def _yarn(rope: RopeSpec, num_positions: int) -> tuple[NDArray[np.float32], float]:
    """YaRN, section 3.2 ("NTK-by-parts") and 3.4 (attention temperature)."""
    params, dim = rope.params, rope.rotary_dim
    factor, original = params["factor"], params["original_max_position_embeddings"]

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    attention = params.get("attention_factor")
    if attention is None:
        one, all_dim = params.get("mscale"), params.get("mscale_all_dim")
        attention = temperature(one) / temperature(all_dim) if one and all_dim else temperature(1.0)

    first, last = dimension(params["beta_fast"]), dimension(params["beta_slow"])
    if params["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    powers = _powers(rope)
    kept = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - first) / (last - first), 0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)


def _longrope(rope: RopeSpec, num_positions: int) -> tuple[NDArray[np.float32], float]:
    """LongRoPE as Phi-3 uses it: one factor a channel, and the attention factor of its equation for the scale."""
    params = rope.params
    factor, original = params["factor"], params["original_max_position_embeddings"]
    attention = params.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = params["long_factor"] if num_positions > original else params["short_factor"]
    return 1.0 / (np.array(factors, dtype=np.float32) * _powers(rope)), float(attention)


_INVERSE: dict[str, Callable[[RopeSpec, int], tuple[NDArray[np.float32], float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
