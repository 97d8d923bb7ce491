"""One file an op: the formula, its shapes, and `reference(...)` in plain torch (differentiable in its float inputs).

Activations are float32; T tokens are the tokens of all sequences of a step, flattened; R are the rows whose logits
are wanted. `sample` is numpy: it runs where torch is not imported.
"""
