"""Tile sizes by measurement: what a linear kernel may be given, and the committed tables of what was fastest.

A choice is facts beside the others (`spec`): `block_n`, rows of the weight that a program takes; `stages`, loads under
way at once; `splits`, parts of K in a kernel for few rows. `tiles` and `split_k` choose what a table does not name.
A choice decides how a sum is cut, so it belongs to the matrix and the target, never to what a step happens to hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantkit_kernels.triton.spec import Fact, Facts
from quantkit_kernels.triton.tuned_choices import TABLES

CHOICES = ("block_n", "stages", "splits")


def table_key(facts: Facts) -> str:
    """A linear's line of a table: `few W4 g128 n2048 k8192`; asymmetric weights and quantized activations say so."""
    form = f"W{facts['bits']}" + (f" g{facts['group_size']}" if facts["group_size"] else "")
    form += ("" if facts["symmetric"] else " asymmetric") + (f" {facts['quant']}" if facts.get("quant") else "")
    return f"{facts['rows']} {form} n{facts['n']} k{facts['k']}"


def tuned(facts: Facts, tables: Mapping[int, Mapping[str, Mapping[str, int]]] = TABLES) -> dict[str, Fact]:
    """The facts with what their target's table says of them and no other choices; other ops' stay as they are."""
    if facts["op"] != "linear":
        return dict(facts)
    plain = {name: value for name, value in facts.items() if name not in CHOICES}
    return {**plain, **tables.get(int(facts["sm"]), {}).get(table_key(facts), {})}
