"""Ahead-of-time compilation: which Triton kernels a program needs, their machine code for each target, and buckets.

Nothing here runs on a GPU, and importing it imports no Triton.
"""
