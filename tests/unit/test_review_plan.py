"""Plans are data with exact odds; numbers about reviewers are the published ones."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import ReviewPlan
from quantkit.review.agreement import exact_interval, nominal_alpha
from quantkit.review.plan import Plan, Stage


def test_the_default_plan_accepts_as_often_as_it_says() -> None:
    plan = Plan()
    assert plan.items == 140
    assert plan.acceptance(0.01) == pytest.approx(0.94, abs=0.005)
    assert plan.acceptance(0.05) == pytest.approx(0.10, abs=0.005)
    assert plan.acceptance(0.0) == 1.0
    assert plan.acceptance(1.0) == 0.0


def test_a_plan_of_thousands_has_odds_too() -> None:
    plan = Plan((Stage(2000, 550, 651), Stage(8000, 3000, 3001)))
    assert plan.acceptance(0.25) == pytest.approx(1.0, abs=1e-6)
    assert plan.acceptance(0.35) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("stages", [[Stage(1, 0, 3)] * 7 + [Stage(1, 2, 3)], [Stage(9000, 0, 3), Stage(1001, 2, 3)]])
def test_a_plan_for_nobody_to_carry_out_is_refused(stages: list[Stage]) -> None:
    with pytest.raises(RecipeError, match="for nobody to look at"):
        Plan(tuple(stages))


def test_a_single_stage_is_a_binomial() -> None:
    wanted = sum(math.comb(50, k) * 0.03**k * 0.97 ** (50 - k) for k in range(3))
    assert Plan((Stage(50, 2, 3),)).acceptance(0.03) == pytest.approx(wanted, abs=1e-12)


def test_three_stages_accept_as_often_as_when_played_out() -> None:
    plan, rate, chooser, accepted = Plan((Stage(20, 0, 3), Stage(20, 1, 4), Stage(20, 4, 5))), 0.06, random.Random(1), 0
    for _ in range(20_000):
        found = 0
        for stage in plan.stages:
            found += sum(chooser.random() < rate for _ in range(stage.items))
            if found <= stage.accept or found >= stage.reject:
                accepted += found <= stage.accept
                break
    assert plan.acceptance(rate) == pytest.approx(accepted / 20_000, abs=0.012)


def test_the_operating_curve_falls() -> None:
    odds = [chance for _, chance in Plan().operating_curve()]
    assert odds == sorted(odds, reverse=True)
    assert odds[0] == 1.0
    assert odds[-1] < 1e-3


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [{"items": 0, "accept": 0, "reject": 1}],
        [{"items": 10, "accept": 2, "reject": 2}],
        [{"items": 10, "accept": 0, "reject": 3}],
        [{"items": 10, "accept": 1, "reject": 3}, {"items": 10, "accept": 0, "reject": 1}],
        [{"items": 10, "accept": 0}],
        [{"items": "10", "accept": 0, "reject": 1}],
        [7],
    ],
)
def test_a_plan_that_decides_nothing_is_refused(stages: list[Any]) -> None:
    with pytest.raises(RecipeError, match=r"gate\.review\.plan"):
        Plan.of({"stages": stages})


def test_the_recipe_has_the_same_default_and_refuses_a_bad_plan_by_line(tmp_path: Path) -> None:
    assert Plan.of(ReviewPlan().model_dump()) == Plan()
    path = tmp_path / "recipe.yaml"
    text = "version: 1\nmodel: {source: somewhere}\ngate:\n  review:\n    plan: {worst: 3, stages: [%s]}\n"
    path.write_text(text % "{items: 12, accept: 0, reject: 1}")
    assert Plan.of(load_recipe(path).recipe.gate.review.plan.model_dump()) == Plan((Stage(12, 0, 1),), worst=3)
    path.write_text(text % "{items: 12, accept: 0, reject: 5}")
    with pytest.raises(RecipeError, match=r"recipe\.yaml:5: .*reject must be accept"):
        load_recipe(path)


def test_a_plan_reads_as_a_sentence() -> None:
    assert str(Plan()) == (
        "60 items, accept at 0, reject at 3, else 80 more, accept at ≤ 3 in all; any critical regression rejects"
    )


def test_exact_intervals_are_clopper_and_pearsons() -> None:
    assert exact_interval(0, 60) == pytest.approx((0.0, 1 - 0.025 ** (1 / 60)), abs=1e-9)
    assert exact_interval(10, 100) == pytest.approx((0.0490, 0.1762), abs=1e-4)
    assert exact_interval(60, 60) == pytest.approx((0.025 ** (1 / 60), 1.0), abs=1e-9)
    assert exact_interval(0, 0) == (0.0, 1.0)


def test_alpha_is_krippendorffs_own_example() -> None:
    a = [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None]
    b = [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3]
    c = [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None]
    d = [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None]
    units = [[v for v in unit if v is not None] for unit in zip(a, b, c, d, strict=True)]
    assert nominal_alpha(units) == pytest.approx(0.743, abs=5e-4)


def test_alpha_of_two_observers_is_krippendorffs_binary_example() -> None:
    a, b = [0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    assert nominal_alpha(zip(a, b, strict=True)) == pytest.approx(0.095, abs=5e-4)


def test_alpha_has_no_value_where_nothing_could_disagree() -> None:
    assert nominal_alpha([["tie"], ["better"]]) is None
    assert nominal_alpha([["tie", "tie"], ["tie", "tie"]]) is None
    assert nominal_alpha([["tie", "tie"], ["worse", "worse"]]) == 1.0
