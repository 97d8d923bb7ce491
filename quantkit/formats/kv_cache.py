"""Keys and values in the formats of the paged cache: calibrated scales, cells, and what cells stand for.

`quantkit_kernels.cache_formats` names the formats and `quantkit_kernels.ops.kv_cells` defines their cells, which
kernels store alike; here what is not finite is refused.
"""

from __future__ import annotations

from torch import Tensor

from quantkit.formats import integer
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import kv_cells
from quantkit_kernels.tensors import as_array


def scale_from_absmax(absmax: Tensor, cache_format: str) -> Tensor:
    """float32 `[Hkv, D]` scales that map the greatest magnitude seen, `absmax` `[Hkv, D]`, to the format's `top`.

    A format with one scale a head (FP8) takes its largest channel's for all.
    """
    kind = CACHE_FORMATS[cache_format]
    if kind.top is None:
        raise ValueError(f"a cache in {cache_format} has no scales")
    most = absmax.float()
    if kind.per_head:
        most = most.amax(-1, keepdim=True).expand_as(most).contiguous()
    return most / kind.top


def quantize(x: Tensor, scale: Tensor | None, cache_format: str) -> Tensor:
    """Cells `[T, Hkv, cell]` of float keys or values `[T, Hkv, D]`; scale: float32 `[Hkv, D]`, positive, or None.

    NaN or Inf raises NumericsError; ValueError where the format cannot hold heads of D channels.
    """
    integer.require_finite(as_array(x), where="KV cache")
    return kv_cells.store(x.float(), scale, cache_format)


def dequantize(cells: Tensor, scale: Tensor | None, cache_format: str, head_dim: int) -> Tensor:
    """float32 `[T, Hkv, D]` from cells and their scales."""
    values = kv_cells.load(cells, cache_format, head_dim)
    return values if scale is None else values * scale
