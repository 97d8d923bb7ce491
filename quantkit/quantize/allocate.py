"""One scheme a group under a budget of bits: an exact 0/1 program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quantkit.errors import RecipeError
from quantkit.numeric import rounded_up
from quantkit.terminal import silenced

TOLERANCE = 1e-6
"""Bits a weight by which an allocation may exceed its budget (the solver's feasibility tolerance)."""


@dataclass(frozen=True)
class Option:
    """One scheme for one group: what it does to the model (any unit, additive) and what it costs.

    `bits` a weight, scales counted; `weights` is the group's number of weights.
    """

    scheme: str
    sensitivity: float
    bits: float
    weights: int


def least_bits(options: Mapping[str, Sequence[Option]]) -> float:
    """Bits a weight, over all groups, when each takes its cheapest option."""
    return _average({group: min(choices, key=lambda o: o.bits) for group, choices in options.items()})


def average_bits(options: Mapping[str, Sequence[Option]], chosen: Mapping[str, str]) -> float:
    """Bits a weight of an allocation `{group: scheme}`."""
    return _average({g: next(o for o in choices if o.scheme == chosen[g]) for g, choices in options.items()})


def total_sensitivity(options: Mapping[str, Sequence[Option]], chosen: Mapping[str, str]) -> float:
    """Sum over the groups of what an allocation `{group: scheme}` does."""
    return sum(next(o for o in choices if o.scheme == chosen[g]).sensitivity for g, choices in options.items())


def allocate(options: Mapping[str, Sequence[Option]], budget_bits: float) -> dict[str, str]:
    """The `{group: scheme}` of least total sensitivity whose average is at most `budget_bits` bits a weight.

    Exact (HiGHS branch and bound, no gap). An option that another matches or beats on both counts is dropped first,
    so of two equally good ones the cheaper wins, then the one listed first; the solver runs on one thread without a
    clock: the same input gives the same answer.

    RecipeError when even the cheapest options exceed the budget, with the least feasible value, and for a
    sensitivity that is not finite.
    """
    least = least_bits(options)
    if not budget_bits >= least - TOLERANCE:  # NaN too
        raise RecipeError(
            f"a budget of {budget_bits:.10g} bits a weight is infeasible for the schemes allowed",
            next=f"The least feasible value is {rounded_up(least, 4):.4f}: raise the budget or allow cheaper schemes",
        )
    for group, choices in options.items():
        for option in choices:
            if not np.isfinite(option.sensitivity):
                raise RecipeError(f"sensitivity {option.sensitivity} under {option.scheme}", where=group)
    flat = [(group, option) for group, choices in options.items() for option in _undominated(choices)]
    taken = _solve(flat, {group: index for index, group in enumerate(options)}, budget_bits)
    return {group: option.scheme for (group, option), take in zip(flat, taken, strict=True) if take}


def frontier(options: Mapping[str, Sequence[Option]]) -> list[tuple[float, float]]:
    """(bits a weight, least total sensitivity) of the budgets where one more group takes a better scheme, ascending.

    The corners of the convex hull of all allocations, which walking the groups' own hulls by falling gain a bit gives
    in order (Shoham and Gersho 1988); each is what `allocate` finds for that budget. Between two corners lie others.
    """
    total = sum(choices[0].weights for choices in options.values())
    steps: list[tuple[float, float, float]] = []
    bits = sensitivity = 0.0
    for choices in options.values():
        hull = _hull(_undominated(choices))
        bits, sensitivity = bits + hull[0].bits * hull[0].weights, sensitivity + hull[0].sensitivity
        for worse, better in pairwise(hull):
            cost, gain = (better.bits - worse.bits) * better.weights, worse.sensitivity - better.sensitivity
            steps.append((-gain / cost, cost, gain))
    corners = [(bits / total, sensitivity)]
    for _, cost, gain in sorted(steps):
        bits, sensitivity = bits + cost, sensitivity - gain
        corners.append((bits / total, max(sensitivity, 0.0)))
    return corners


def contested(options: Mapping[str, Sequence[Option]], chosen: Mapping[str, str], count: int) -> list[tuple[str, str]]:
    """At most `count` (group, scheme) whose price decided most narrowly: wrong prices there would change the choice.

    Every step that an allocation took or left has a gain a bit; those left are the smaller ones, those taken the
    larger. The closest to where the two meet come first, each with the cheaper scheme of its step.
    """
    taken: list[tuple[float, str, str]] = []
    left: list[tuple[float, str, str]] = []
    for group, choices in options.items():
        here = next(option for option in choices if option.scheme == chosen[group])
        for other in _undominated(choices):
            cheap, dear = sorted((here, other), key=lambda o: o.bits)
            gain, cost = cheap.sensitivity - dear.sensitivity, (dear.bits - cheap.bits) * here.weights
            if gain > 0 and cost > 0:
                (taken if other is cheap else left).append((gain / cost, group, cheap.scheme))
    if not taken and not left:
        return []
    ends = [*([min(taken)[0]] if taken else []), *([max(left)[0]] if left else [])]
    meeting = float(np.exp(np.log(ends).mean()))
    ordered = sorted((abs(np.log(gain / meeting)), group, scheme) for gain, group, scheme in [*taken, *left])
    return list(dict.fromkeys((group, scheme) for _, group, scheme in ordered))[:count]


def _hull(choices: Sequence[Option]) -> list[Option]:
    """Of undominated options the lower convex hull over bits, by rising bits."""
    hull: list[Option] = []
    for option in sorted(choices, key=lambda o: o.bits):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    return (second.sensitivity - first.sensitivity) / (second.bits - first.bits)


def _undominated(choices: Sequence[Option]) -> list[Option]:
    """The options worth considering, in their order: none is matched on both counts by a better or earlier one."""
    kept: list[Option] = []
    for option in sorted(choices, key=lambda o: (o.bits, o.sensitivity)):
        if not kept or option.sensitivity < kept[-1].sensitivity:
            kept.append(option)
    return [option for option in choices if option in kept]


def _solve(flat: Sequence[tuple[str, Option]], row: Mapping[str, int], budget_bits: float) -> list[bool]:
    """Which of the (group, option) pairs to take: one a group, least sensitivity, within the budget."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    total = sum({group: option.weights for group, option in flat}.values())
    cost = np.array([option.bits * option.weights / total for _, option in flat])
    sensitivity = np.array([option.sensitivity for _, option in flat])
    # HiGHS stops at an absolute gap of 1e-6; scaled like this that is one part in 10^11 of the greatest sensitivity.
    sensitivity *= 1e5 / max(float(np.abs(sensitivity).max()), np.finfo(np.float64).tiny)
    one_each = csr_array((np.ones(len(flat)), ([row[group] for group, _ in flat], range(len(flat)))))
    with silenced(1):  # HiGHS prints a line for its developers now and then, whatever its options; ours carries results
        result = milp(
            sensitivity,
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(cost, -np.inf, budget_bits)],
            options={"mip_rel_gap": 0},
        )
    if result.x is None:
        raise RecipeError(f"the search for {budget_bits:g} bits a weight failed: {result.message}")
    return [take > 0.5 for take in result.x]


def _average(chosen: Mapping[str, Option]) -> float:
    total = sum(option.weights for option in chosen.values())
    return sum(option.bits * option.weights for option in chosen.values()) / total
