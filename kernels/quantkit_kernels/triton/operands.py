"""What every launcher asks of its tensors before it trusts their addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.cache_formats import CACHE_FORMATS

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def expect(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless `tensor` is contiguous, of that shape (None: any size) and of one of the types."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=False)
    )
    if fits and tensor.dtype in dtypes and tensor.is_contiguous():
        return
    want = ", ".join("*" if size is None else str(size) for size in shape)
    types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    strided = "" if tensor.is_contiguous() else ", not contiguous"
    raise ValueError(
        f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strided}: "
        f"the kernel takes contiguous {types} [{want}]"
    )


def expect_cache(
    name: str,
    cache: Tensor,
    scale: Tensor | None,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    cache_format: str,
) -> None:
    """Raise ValueError unless a cache is `[num_blocks, Hkv, block_size, cell]` in its format, with a scale `[Hkv, D]`
    where that is quantized."""
    kind = CACHE_FORMATS[cache_format]
    dtype: torch.dtype = getattr(torch, kind.dtype)
    expect(f"{name}_cache", cache, (None, num_kv_heads, block_size, kind.cell(head_dim)), (dtype,))
    if not kind.scaled and scale is not None:
        raise ValueError(f"{name}_scale is given, but a cache in {cache_format} has none")
    if kind.scaled:
        if scale is None:
            raise ValueError(f"a cache in {cache_format} needs {name}_scale, float32 [{num_kv_heads}, {head_dim}]")
        expect(f"{name}_scale", scale, (num_kv_heads, head_dim), (torch.float32,))
