"""Schemes and number formats: quantize, dequantize, pack, unpack. Pure functions over numpy arrays; the bottom layer.

`schemes` names what a group may be stored as, `integer` computes codes, `packing` lays them out in words,
`kv_cache` holds keys and values in a format of the cache, as tensors. `QuantizedMatrix` is a weight in one of them.
"""

from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES, Scheme, scheme

__all__ = ["SCHEMES", "QuantizedMatrix", "Scheme", "scheme"]
