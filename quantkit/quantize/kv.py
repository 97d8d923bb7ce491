"""Static scales of a quantized KV cache, from what calibration saw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import NumericsError
from quantkit.formats.kv_cache import scale_from_absmax
from quantkit_kernels.tensors import as_array


def kv_scales(absmax: Tensor, cache_format: str, *, where: str = "") -> NDArray[np.float32]:
    """float32 `[Hkv, D]` scales of a cache in `cache_format` (INT8, FP8, INT4), from the greatest magnitudes `[Hkv, D]`
    of keys (or values) as the cache stores them.

    What a scale stands for must have been observed, a head and channel or (FP8) a head: a zero, a NaN or an Inf raises
    NumericsError naming `where` (`layers.3.k`), head and channel, because a scale of 0 or a silent 1.0 would corrupt
    the cache unseen.
    """
    scale = as_array(scale_from_absmax(absmax, cache_format))
    usable = np.isfinite(scale) & (scale > 0)
    if not usable.all():
        head, channel = np.argwhere(~usable)[0].tolist()
        raise NumericsError(
            f"no usable KV scale: head {head}, channel {channel} saw a maximum of {float(absmax[head, channel])}",
            where=where,
            next="Calibrate on more samples, or set the KV format to FP16",
        )
    return scale
