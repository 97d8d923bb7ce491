"""Schemes: how one fused group's weight is stored and computed, under compressed-tensors' names."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import RecipeError


@dataclass(frozen=True)
class Scheme:
    """A weight format. `bits` 16 stands for the source's own type (FP16, BF16 or FP32), stored untouched.

    `group_size` counts input channels that share a scale; 0 means one scale per output channel.
    """

    name: str
    bits: int
    group_size: int = 0
    symmetric: bool = True

    @property
    def quantized(self) -> bool:
        """Whether the weight is stored as integer codes with scales."""
        return self.bits < 16

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits a weight, 16-bit scales and packed zero points counted, for rows of `in_features` weights."""
        if not self.quantized:
            return 16.0
        group = self.group_size or in_features
        zero = 0 if self.symmetric else self.bits
        return self.bits + (16 + zero) / group


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("FP16", 16),
        Scheme("W8A16", 8),
        Scheme("W4A16_G32", 4, 32),
        Scheme("W4A16_G64", 4, 64),
        Scheme("W4A16_G128", 4, 128),
        Scheme("W4A16_G32_ASYM", 4, 32, symmetric=False),
        Scheme("W4A16_G64_ASYM", 4, 64, symmetric=False),
        Scheme("W4A16_G128_ASYM", 4, 128, symmetric=False),
    )
}


def scheme(name: str) -> Scheme:
    """The scheme called `name`; RecipeError names the known ones."""
    try:
        return SCHEMES[name]
    except KeyError:
        raise RecipeError(f"unknown scheme {name!r}", next=f"Known schemes: {', '.join(SCHEMES)}") from None
