"""The typed recipe: schema, reading with line numbers, `--set`, resolution, `init` templates.

`load_recipe` and `LoadedRecipe` are in `load.py`, the fields in `schema.py`; importing this package imports neither
pydantic nor torch.
"""
