"""Calibration: which conversations to learn ranges from, and what the model does on them.

`dataset` chooses and fingerprints samples (`rows` reads files, `coverage` counts, `samples` keeps them for later
stages), `statistics` measures activations and the cache layer by layer.
"""
