"""Rotary position embeddings: cosine and sine tables of every supported kind.

Formulas and the order of float32 operations follow Transformers' `modeling_rope_utils.ROPE_INIT_FUNCTIONS`, so that
tables are equal bit for bit. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv
2402.13753), Llama 3.1's frequency smoothing (its reference code, `apply_scaling`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from quantkit.models.spec import RopeSpec


def cos_sin(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of `rope` for positions 0 ... num_positions - 1; attention factors (yarn, longrope) folded in.

    Longrope picks its long factors when `num_positions` exceeds `original_max_position_embeddings`, for all
    positions alike: one engine keeps one table, sized by the longest sequence it admits.

    Returns:
        (cos, sin), each float32 `[num_positions, rotary_dim // 2]`.
    """
    inverse, factor = inverse_frequencies(rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse[None, :]
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    """(radians a position turns each pair of channels, float32 `[rotary_dim // 2]`; factor on cosine and sine)."""
    return _INVERSE[rope.kind](rope, num_positions)


def _powers(rope: RopeSpec) -> torch.Tensor:
    """theta ** (2 i / rotary_dim), float32 `[rotary_dim // 2]`."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rope.rotary_dim
    return torch.as_tensor(rope.theta**exponents)


def _default(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(rope), 1.0


def _linear(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(rope) / rope.params["factor"], 1.0


def _llama3(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    """Long wavelengths slowed by `factor`, short ones kept, a linear blend between."""
    factor, original = rope.params["factor"], rope.params["original_max_position_embeddings"]
    low, high = rope.params["low_freq_factor"], rope.params["high_freq_factor"]
    inverse = 1.0 / _powers(rope)
    wavelength = 2 * math.pi / inverse
    slowed = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, slowed), 1.0


def _yarn(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
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
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)


def _longrope(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    """LongRoPE as Phi-3 uses it: one factor a channel, and the attention factor of its equation for the scale."""
    params = rope.params
    factor, original = params["factor"], params["original_max_position_embeddings"]
    attention = params.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = params["long_factor"] if num_positions > original else params["short_factor"]
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(rope)), float(attention)


_INVERSE: dict[str, Callable[[RopeSpec, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
