"""GPU cards by target: the peaks that their maker publishes.

NVIDIA's documents: A100, A10, L4, L40S, H100 and H200 Tensor Core GPU data sheets, the GA102, Ada and RTX Blackwell
architecture white papers (RTX 3090, 4090, 5090) and the Blackwell data sheet (HGX B200, per GPU). Throughput is without
sparsity, where a document gives only figures with it, half of those; FP16 and FP8 products are summed in FP32, as all
kernels here do, which on GeForce cards runs at half the rate of sums in FP16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.compile.targets import TARGETS
from quantkit.errors import RecipeError

PREFIX = "cuda:"


@dataclass(frozen=True)
class Card:
    """A card's peaks. bandwidth: of its memory, bytes a second. fp16, int8, fp8: dense matrix products, operations a
    second (a multiply-add is two); fp8 is None where the tensor cores have none."""

    name: str
    target: str
    bandwidth: float
    fp16: float
    int8: float
    fp8: float | None = None

    def line(self) -> str:
        """One line for people."""
        rates = [("FP16", self.fp16), ("INT8", self.int8), *([("FP8", self.fp8)] if self.fp8 else [])]
        products = ", ".join(f"{rate / 1e12:,.0f} in {name}" for name, rate in rates)
        return f"{self.name} ({self.target}): {self.bandwidth / 1e9:,.0f} GB/s; T operations/s: {products}"


CARDS = (
    Card("A100", "sm_80", 2039e9, 312e12, 624e12),
    Card("A100 40GB", "sm_80", 1555e9, 312e12, 624e12),
    Card("RTX 3090", "sm_86", 936e9, 71e12, 284e12),
    Card("A10", "sm_86", 600e9, 125e12, 250e12),
    Card("RTX 4090", "sm_89", 1008e9, 165.2e12, 660.6e12, 330.3e12),
    Card("L4", "sm_89", 300e9, 121e12, 242e12, 242e12),
    Card("L40S", "sm_89", 864e9, 362e12, 733e12, 733e12),
    Card("H100", "sm_90", 3350e9, 989e12, 1979e12, 1979e12),
    Card("H100 PCIe", "sm_90", 2000e9, 756e12, 1513e12, 1513e12),
    Card("H200", "sm_90", 4800e9, 989e12, 1979e12, 1979e12),
    Card("B200", "sm_100", 8000e9, 2250e12, 4500e12, 4500e12),
    Card("RTX 5090", "sm_120", 1792e9, 209.5e12, 838e12, 419e12),
)
"""A target's first stands for it where none is named: A100 with 80 GB, H100 SXM."""


def card_for(target: str, name: str | None = None) -> Card:
    """The card called `name` of a target written `cuda:sm_90`, or the one that stands for the target.

    Case, spaces and hyphens of the name do not matter. RecipeError (of the command line) names the known ones.
    """
    bare = target.removeprefix(PREFIX)
    if bare == target or bare not in TARGETS:
        known = ", ".join(PREFIX + each for each in TARGETS)
        raise RecipeError(f"unknown target {target!r}", where="--target", next=f"Known: {known}")
    cards = [card for card in CARDS if card.target == bare]
    if name is None:
        return cards[0]
    found = [card for card in cards if _key(card.name) == _key(name)]
    if found:
        return found[0]
    elsewhere = next((card for card in CARDS if _key(card.name) == _key(name)), None)
    what = f"no card {name!r} of {target} is known" if elsewhere is None else f"{name!r} is not a card of {target}"
    of_it = f"; {elsewhere.name} is {PREFIX}{elsewhere.target}" if elsewhere is not None else ""
    raise RecipeError(what, where="--card", next=f"Known: {', '.join(card.name for card in cards)}{of_it}")


def card_of_device(device: str, target: str) -> Card | None:
    """The card that a device's name speaks of ("NVIDIA H200"), or the one that stands for its target (`sm_90`); None
    for a target of which no card is known."""
    cards = [card for card in CARDS if card.target == target]
    named = [card for card in cards if _words(card.name) <= _words(device)]
    return max(named, key=lambda card: len(_words(card.name)), default=cards[0] if cards else None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()
