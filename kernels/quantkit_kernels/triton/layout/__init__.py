"""How weights lie in GPU memory: packed once, when a matrix is loaded."""

from quantkit_kernels.triton.layout.code_rows import CodeRows, pad_rows
from quantkit_kernels.triton.layout.experts import GpuExperts, pad_experts, stack_experts
from quantkit_kernels.triton.layout.packing import GpuMatrix, pack_matrix, unpack_words

__all__ = [
    "CodeRows",
    "GpuExperts",
    "GpuMatrix",
    "pack_matrix",
    "pad_experts",
    "pad_rows",
    "stack_experts",
    "unpack_words",
]
