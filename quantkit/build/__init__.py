"""From a recipe to an artifact: `plan` without reading weights, `build` as resumable stages in a store.

One file a stage under `stages/`; `run.py` runs them in order, `plan.py` says what they would do.
"""
