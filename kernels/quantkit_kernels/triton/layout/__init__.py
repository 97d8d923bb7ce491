"""How weights lie in GPU memory: packed once, when a matrix is loaded."""

from quantkit_kernels.triton.layout.packing import GpuMatrix, pack_matrix, unpack_words

__all__ = ["GpuMatrix", "pack_matrix", "unpack_words"]
