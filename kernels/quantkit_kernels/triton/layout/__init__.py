"""How weights lie in GPU memory: packed once, when a matrix is loaded."""

from quantkit_kernels.triton.layout.code_rows import CodeRows, pad_rows
from quantkit_kernels.triton.layout.packing import GpuMatrix, pack_matrix, unpack_words

__all__ = ["CodeRows", "GpuMatrix", "pack_matrix", "pad_rows", "unpack_words"]
