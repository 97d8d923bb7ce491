"""Kernels of quantkit, usable on their own: one op a file, each with a torch reference and native forms.

Imports torch and numpy, `triton/` triton too, never quantkit.
"""
