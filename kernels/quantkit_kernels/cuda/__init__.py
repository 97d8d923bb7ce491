"""Launching compiled Triton kernels through the CUDA driver, without Triton and without a compiler.

`driver` is the few calls of libcuda that this takes, `arguments` what a launch passes, byte by byte, `kernel` a loaded
kernel, `source` which kernel code an artifact's machine code was made from. Importing it loads no libcuda.
"""
