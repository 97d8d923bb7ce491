"""Algorithms that turn weights into codes, and the search that chooses how many bits each group gets.

`rtn` rounds, `sensitivity` prices the damage, `allocate` spends the budget, `kv` sets the cache's scales,
`weights` serves a checkpoint quantized on the fly.
"""
