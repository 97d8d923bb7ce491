"""The exact search equals enumeration, keeps its budget, and says what is least when it cannot."""

from __future__ import annotations

import itertools
import random

import pytest

from quantkit.errors import RecipeError
from quantkit.quantize.allocate import TOLERANCE, Option, allocate, average_bits, contested, frontier, least_bits


def _random_options(seed: int, groups: int = 6) -> dict[str, list[Option]]:
    source = random.Random(seed)
    options = {}
    for index in range(groups):
        weights, price = source.choice([331_776, 552_960, 1_769_472]), 10 ** source.uniform(-5, 3)
        options[f"g{index}"] = [
            Option("FP16", 0.0, 16.0, weights),
            Option("W8A16", price / 256 * source.uniform(0.5, 2), 8.03, weights),
            Option("W4A16_G64", price, 4.25, weights),
        ]
    return options


def _cost(options, chosen):
    return sum(next(o for o in options[g] if o.scheme == s).sensitivity for g, s in chosen.items())


def _brute_force(options, budget):
    choices = ([o.scheme for o in each] for each in options.values())
    all_of_them = (dict(zip(options, picked, strict=True)) for picked in itertools.product(*choices))
    return min(_cost(options, c) for c in all_of_them if average_bits(options, c) <= budget)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("budget", [4.25, 4.7, 6.0, 9.5, 16.0])
def test_the_allocation_is_the_best_of_all_that_fit(seed, budget):
    options = _random_options(seed)
    chosen = allocate(options, budget)
    assert average_bits(options, chosen) <= budget + TOLERANCE
    assert _cost(options, chosen) == pytest.approx(_brute_force(options, budget), rel=1e-7, abs=1e-12)


def test_an_infeasible_budget_names_the_least_feasible_one():
    options = _random_options(0)
    with pytest.raises(RecipeError, match=r"4 bits .* infeasible .* 4\.2500"):
        allocate(options, 4.0)
    assert allocate(options, least_bits(options)) == dict.fromkeys(options, "W4A16_G64")


def test_of_equally_good_options_the_cheaper_is_taken_and_then_the_first():
    same = [Option("FP16", 1.0, 16.0, 10), Option("B", 1.0, 8.0, 10), Option("A", 1.0, 8.0, 10)]
    assert allocate({"g": same}, 16.0) == {"g": "B"}


def test_the_same_options_give_the_same_allocation():
    tied = {f"g{i}": [Option("FP16", 0.0, 16.0, 100), Option("W4", 1.0, 4.0, 100)] for i in range(9)}
    first = allocate(tied, 10.0)
    assert list(first) == list(tied)
    assert sorted(first.values()) == ["FP16"] * 4 + ["W4"] * 5
    assert all(allocate(tied, 10.0) == first for _ in range(5))


def test_sensitivities_many_orders_apart_are_still_told_apart():
    options = {
        "huge": [Option("FP16", 0.0, 16.0, 100), Option("W4", 1e6, 4.0, 100)],
        "small": [Option("FP16", 0.0, 16.0, 100), Option("W4", 2e-3, 4.0, 100)],
        "smaller": [Option("FP16", 0.0, 16.0, 100), Option("W4", 1e-3, 4.0, 100)],
    }
    assert allocate(options, 12.0) == {"huge": "FP16", "small": "FP16", "smaller": "W4"}


def test_a_sensitivity_that_is_no_number_is_refused_by_group():
    with pytest.raises(RecipeError, match=r"layers\.1\.o: sensitivity nan"):
        allocate({"layers.1.o": [Option("W4", float("nan"), 4.0, 10)]}, 16.0)


def test_the_solver_keeps_stdout_for_results(capfd):
    for seed in range(20):
        allocate(_random_options(seed, groups=40), 5.0)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("seed", range(4))
def test_corners_of_the_frontier_are_what_the_exact_search_finds_there(seed):
    options = _random_options(seed)
    corners = frontier(options)
    assert corners[0][0] == pytest.approx(least_bits(options))
    for bits, sensitivity in corners:
        assert _cost(options, allocate(options, bits + 1e-9)) == pytest.approx(sensitivity, rel=1e-6, abs=1e-9)


def test_the_narrowest_choices_are_those_whose_gain_lies_where_taken_and_left_meet():
    gains = {"a": 100.0, "b": 10.0, "c": 5.0, "d": 1.0, "e": 0.01}
    options = {g: [Option("W8", 0.0, 8.0, 10), Option("W4", gain, 4.0, 10)] for g, gain in gains.items()}
    chosen = {"a": "W8", "b": "W8", "c": "W4", "d": "W4", "e": "W4"}
    narrow = contested(options, chosen, 3)
    assert {group for group, _ in narrow[:2]} == {"b", "c"}
    assert narrow[2] == ("d", "W4")
    assert all(scheme == "W4" for _, scheme in narrow)
    assert contested({"g": [Option("W8", 0.0, 8.0, 10)]}, {"g": "W8"}, 3) == []
