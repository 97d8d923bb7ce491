"""What `make gpu-check` measures: cases of every registered kernel, ceilings, graphs, a decoder, and its tables.

Needs torch, triton, numpy, safetensors and transformers, and nothing that compiles.
"""
