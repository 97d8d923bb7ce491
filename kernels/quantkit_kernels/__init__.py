"""Kernels of quantkit, usable on their own: one op a file, each with a torch reference and native forms.

`cpu/` needs numpy alone, `ops/` torch, `triton/` triton too; none imports quantkit.
"""
