"""What the tuner of gpu-check found fastest, by compute capability: written by kernels/benchmarks/gpu/keep_tuning.py.

Empty for a target that was not measured: the rules of `tiles` and `split_k` choose there. No GPU has run it so far.
"""

TABLES: dict[int, dict[str, dict[str, int]]] = {}
