"""Formats of the paged key-value cache: what a cell holds, one position of one head. Plain data; imports nothing.

Quantized formats hold x / scale, scale float32 `[num_kv_heads, head_dim]` from calibration; attention folds the key
scale into the query and the value scale into its output. A cache in FP8 or INT4 is one of bytes, uint8.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = (32, 16, 8)
"""Channels of an INT4 cell that share a scale and a minimum: the first of these that divides the head."""


@dataclass(frozen=True)
class CacheFormat:
    """One format.

    name: as recipes and programs have it. code: its number in the C ABI (`Dtype` of src/abi.h). dtype: of the cache's
    tensors. itemsize: bytes of one of their elements. top: what the largest magnitude that calibration saw becomes;
    None for formats that hold values as they are. per_head: one scale for all channels of a head. triton: the type of
    the cache's elements in Triton's spelling; None where no Triton kernel reads the format. least_sm: the compute
    capability from which on kernels do, 0 where all do (e4m3 has conversion instructions from 89 on).
    """

    name: str
    code: int
    dtype: str
    itemsize: int
    top: float | None = None
    per_head: bool = False
    triton: str | None = None
    least_sm: int = 0

    @property
    def scaled(self) -> bool:
        """Whether the format needs calibrated scales."""
        return self.top is not None

    @property
    def in_integers(self) -> bool:
        """Whether attention multiplies the cache's codes as integers; all others are read as floats."""
        return self.name == "INT8"

    def cell(self, head_dim: int) -> int:
        """Elements of a cell: the last dimension of a cache `[num_blocks, num_kv_heads, block_size, cell]`.

        ValueError where the format cannot hold heads of `head_dim` channels.
        """
        return head_dim // 2 + head_dim // group_of(head_dim) * 4 if self.name == "INT4" else head_dim

    def cell_bytes(self, head_dim: int) -> int:
        """Bytes of a cell."""
        return self.cell(head_dim) * self.itemsize


def group_of(head_dim: int) -> int:
    """Channels of an INT4 group; ValueError where no group size divides the head."""
    group = next((size for size in GROUPS if head_dim % size == 0), None)
    if group is None:
        raise ValueError(f"an INT4 cache holds heads of a multiple of {GROUPS[-1]} channels, not {head_dim}")
    return group


CACHE_FORMATS = {
    each.name: each
    for each in (
        CacheFormat("INT8", 3, "int8", 1, top=127.0, triton="i8"),
        CacheFormat("FP8", 5, "uint8", 1, top=448.0, per_head=True, triton="u8", least_sm=89),
        CacheFormat("INT4", 4, "uint8", 1, top=127.0, triton="u8"),
        CacheFormat("FP16", 1, "float16", 2, triton="fp16"),
        CacheFormat("BF16", 2, "bfloat16", 2, triton="bf16"),
        CacheFormat("FP32", 0, "float32", 4),
    )
}
"""Every format by name."""
