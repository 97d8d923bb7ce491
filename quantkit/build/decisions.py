"""Which schemes each decision unit may take, from recipe and program alone: every static problem is found here.

Decision units are the decoder layers' matrices (`layers.N.qkv`, `.o`, `.gate_up`, `.down`). `lm_head` is set by its own
key and does not count towards the budget.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantkit.build.allocation import read_allocation
from quantkit.errors import RecipeError
from quantkit.formats.schemes import SCHEMES, Scheme
from quantkit.numeric import rounded_up
from quantkit.program.ir import Program, Weight
from quantkit.recipe.load import LoadedRecipe
from quantkit.recipe.schema import Override

UNQUANTIZED = "FP16"
HEAD = "lm_head"
_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Decisions:
    """What is open and what it may cost.

    allowed: the schemes each group may take, one where it is pinned; in program order. head: lm_head's scheme.
    budget_bits: stored bits a weight over the groups, whatever the recipe's budget is given in. source_bits: what an
    unquantized weight counts: 16, but under a budget of bytes the source's own width.
    """

    allowed: dict[str, tuple[str, ...]]
    head: str
    budget_bits: float
    source_bits: int = 16

    @property
    def pinned(self) -> dict[str, str]:
        """The groups that have no choice."""
        return {group: schemes[0] for group, schemes in self.allowed.items() if len(schemes) == 1}

    def least_bits(self, program: Program) -> float:
        """Bits a weight over the decision units when each takes its cheapest scheme."""
        return _least_bits(self.allowed, program.groups(), self.source_bits)


def decide(loaded: LoadedRecipe, program: Program) -> Decisions:
    """The schemes allowed for each group of the fused program.

    RecipeError (with the recipe's line): an override that matches no group, a group size that does not divide a
    group's input channels (layers and sizes that do are named), a budget below the least feasible value; with the
    allocation file's line: what `read_allocation` refuses.
    """
    section = loaded.recipe.quantization
    units = {group: weight for group, weight in program.groups().items() if group != HEAD}
    allowed = dict.fromkeys(units, (*section.schemes, UNQUANTIZED))
    if section.allocation is not None:
        found = read_allocation(loaded.file(section.allocation, "quantization", "allocation"), units)
        allowed = {group: (scheme,) for group, scheme in found.items()}
    missed = []
    for i, override in enumerate(section.overrides):
        matched = [group for group in units if fnmatchcase(group, override.match)]
        if not matched:
            where = loaded.where("quantization", "overrides", i, "match")
            hint = _group_hint(override.match, list(units))
            missed.append(RecipeError(f"override {override.match!r} matches no group", where=where, next=hint))
        for group in matched:
            allowed[group] = (override.scheme,)
    if missed:
        raise RecipeError.of(missed)
    allowed = {group: tuple(dict.fromkeys(schemes)) for group, schemes in allowed.items()}
    _check_group_sizes(loaded, units, allowed)
    return Decisions(allowed, section.lm_head, *_budget(loaded, program, units, allowed))


def group_bits(weight: Weight, scheme: Scheme, source_bits: int = 16) -> float:
    """Stored bits of a group's matrix under a scheme, scales counted; unquantized, `source_bits` a weight."""
    return (scheme.bits_per_weight(weight.shape[1]) if scheme.quantized else source_bits) * _weights(weight)


def _budget(
    loaded: LoadedRecipe, program: Program, units: dict[str, Weight], allowed: dict[str, tuple[str, ...]]
) -> tuple[float, int]:
    """(bits a weight to spend, bits of an unquantized weight); an allocation without a budget costs what it costs."""
    section, total = loaded.recipe.quantization, sum(map(_weights, units.values()))
    in_bytes = section.budget_bytes is not None
    source_bits = (32 if program.source_dtype == "float32" else 16) if in_bytes else 16
    least = _least_bits(allowed, units, source_bits)
    if section.budget_bytes is not None:
        budget, said = section.budget_bytes * 8 / total, f"{section.budget_bytes:,} bytes"
    elif section.budget_bits is not None:
        budget, said = section.budget_bits, f"{section.budget_bits:.10g} bits a weight"
    else:
        return least, source_bits
    if budget < least - 1e-9:
        raise RecipeError(
            f"a budget of {said} cannot be met; the least feasible value is {rounded_up(least, 3):.3f} bits "
            f"a weight, "
            f"{math.ceil(least * total / 8):,} bytes",
            where=loaded.where("quantization", "budget_bytes" if in_bytes else "budget_bits"),
            next="Raise the budget, allow a cheaper scheme, or pin fewer groups" + _pins(section.overrides),
        )
    return budget, source_bits


def _pins(overrides: Sequence[Override]) -> str:
    if not overrides:
        return ""
    pins = ", ".join(f"{one.match} to {one.scheme}" for one in overrides)
    return f" (pinned: {pins}; `overrides: []` pins none)"


def _least_bits(allowed: dict[str, tuple[str, ...]], units: Mapping[str, Weight], source_bits: int) -> float:
    bits = sum(min(group_bits(units[g], SCHEMES[s], source_bits) for s in schemes) for g, schemes in allowed.items())
    return bits / sum(_weights(units[g]) for g in allowed)


def _weights(weight: Weight) -> int:
    return weight.shape[0] * weight.shape[1]


def _group_hint(pattern: str, units: list[str]) -> str:
    if fnmatchcase(HEAD, pattern):
        return "The head is set by quantization.lm_head"
    last = len({group.split(".")[1] for group in units}) - 1
    kinds = ",".join(dict.fromkeys(group.rpartition(".")[2] for group in units))
    return f"Groups are named layers.N.{{{kinds}}}, N from 0 to {last}"


def _check_group_sizes(loaded: LoadedRecipe, units: dict[str, Weight], allowed: dict[str, tuple[str, ...]]) -> None:
    misfits: dict[tuple[str, int], list[str]] = defaultdict(list)
    for group, schemes in allowed.items():
        for name in schemes:
            size, columns = SCHEMES[name].group_size, units[group].shape[1]
            if size and columns % size:
                misfits[name, columns].append(group)
    if not misfits:
        return
    (name, columns), groups = next(iter(misfits.items()))
    shown = ", ".join(groups[:_NAMES_SHOWN]) + (f" and {len(groups) - _NAMES_SHOWN} more" if len(groups) > 4 else "")
    wrong = SCHEMES[name]
    fitting = [
        s.name
        for s in SCHEMES.values()
        if s.bits == wrong.bits and s.symmetric == wrong.symmetric and s.group_size and columns % s.group_size == 0
    ]
    instead = f"Sizes that do: {', '.join(fitting)}" if fitting else "No group size does: use W8A16 or pin them to FP16"
    others = sorted({f"{n} on {c} channels" for n, c in misfits} - {f"{name} on {columns} channels"})
    raise RecipeError(
        f"the group size of {name} does not divide {columns} input channels of {shown}"
        + (f" (also {', '.join(others)})" if others else ""),
        where=_scheme_place(loaded, name),
        next=instead,
    )


def _scheme_place(loaded: LoadedRecipe, name: str) -> str:
    section = loaded.recipe.quantization
    if section.allocation is None and name in section.schemes:
        return loaded.where("quantization", "schemes", section.schemes.index(name))
    for index, override in enumerate(section.overrides):
        if override.scheme == name:
            return loaded.where("quantization", "overrides", index, "scheme")
    return loaded.where("quantization", "allocation")
