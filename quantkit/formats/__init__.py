"""Schemes and number formats: quantize, dequantize, pack, unpack. Pure functions; the bottom layer, torch only.

`schemes` names what a group may be stored as, `integer` computes codes, `packing` lays them out in words,
`kv_cache` holds keys and values in a
format of the cache. `QuantizedMatrix` is a weight in one of them.
"""

from typing import TYPE_CHECKING, Any

from quantkit.formats.schemes import SCHEMES, Scheme, scheme

if TYPE_CHECKING:
    from quantkit.formats.matrix import QuantizedMatrix

__all__ = ["SCHEMES", "QuantizedMatrix", "Scheme", "scheme"]


def __getattr__(name: str) -> Any:
    """`QuantizedMatrix` on demand: naming a scheme (recipes, the command line) must not import torch."""
    if name == "QuantizedMatrix":
        from quantkit.formats.matrix import QuantizedMatrix

        return QuantizedMatrix
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
