"""Policies read strictly, and decide on intervals rather than on points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import RecipeError
from quantkit.gate.data import Window
from quantkit.gate.metrics import Scores
from quantkit.gate.policy import Policy, load_policy
from quantkit.gate.verdict import Coverage, Measured, Verdict, decide

CONVERSATIONS, TOKENS = 20, 100
CPU = Coverage("cpu", "avx2", "exact", "INT8", 2)


def exponential(mean: float, seed: int, spread: float = 0.0) -> Scores:
    """KL with `mean`, conversations differing by `spread`."""
    rng = np.random.default_rng(seed)
    level = mean * np.exp(rng.normal(0, spread, CONVERSATIONS) - spread**2 / 2)
    kl = np.concatenate([rng.exponential(one, TOKENS) for one in level])
    cluster = np.repeat(np.arange(CONVERSATIONS, dtype=np.int32), TOKENS)
    nll = np.full(len(kl), 1.0)
    return Scores(cluster, kl, kl < 5 * mean, nll, nll)


def judged(
    limits: list[dict[str, object]],
    candidate: Scores,
    rung: Scores | None = None,
    *,
    waiver: str | None = None,
    floor: float = 0.0,
    domains: dict[str, object] | None = None,
    in_json: np.ndarray | None = None,
) -> Verdict:
    policy = Policy.model_validate(
        {"version": 1, "name": "test", "classes": [{"name": "any", "limits": limits}], "domains": domains}
    )
    windows = [
        Window(f"w{i}", "sql" if i < 10 else "rag", "en" if i % 2 else "zh", tuple(range(TOKENS + 1)), 0, False)
        for i in range(CONVERSATIONS)
    ]
    rung = candidate if rung is None else rung
    quiet = exponential(1.0, 0)
    noise = Scores(quiet.cluster, np.full_like(quiet.kl, floor), quiet.same, quiet.nll_base, quiet.nll_cand)
    in_json = np.zeros(len(quiet.kl), bool) if in_json is None else in_json
    ladder = {"RTN-INT4": rung, "RTN-INT8": rung}
    measured = Measured(windows, candidate, ladder, noise, 10**8, 8, CPU, in_json)
    return decide(policy, measured, waiver)


def test_an_interval_inside_the_limit_passes_and_waits_for_people() -> None:
    verdict = judged([{"metric": "mean_kl", "upper": 0.02}], exponential(0.01, 1))
    assert (verdict.verdict, verdict.exit_code, verdict.tokens) == ("pending-review", 12, "pass")


def test_a_waived_review_makes_it_pass_and_keeps_the_reason() -> None:
    verdict = judged([{"metric": "mean_kl", "upper": 0.02}], exponential(0.01, 1), waiver="a demo, nobody serves it")
    assert (verdict.verdict, verdict.exit_code, verdict.waiver) == ("pass", 0, "a demo, nobody serves it")


def test_an_interval_beyond_the_limit_fails_even_when_waived() -> None:
    verdict = judged([{"metric": "mean_kl", "upper": 0.005}], exponential(0.01, 1), waiver="a demo, nobody serves it")
    assert (verdict.verdict, verdict.exit_code) == ("fail", 10)
    assert [rule.name for rule in verdict.deciding] == ["mean_kl"]


def test_a_point_inside_the_limit_with_a_wide_interval_is_inconclusive() -> None:
    noisy = exponential(0.01, 3, spread=1.2)
    limit = float(noisy.kl.mean()) * 1.1
    verdict = judged([{"metric": "mean_kl", "upper": limit}], noisy)
    rule = next(rule for rule in verdict.rules if rule.name == "mean_kl")
    assert rule.value < rule.limit < rule.high
    assert (verdict.verdict, verdict.exit_code) == ("inconclusive", 11)


def test_a_share_of_a_rung_is_judged_on_paired_ratios() -> None:
    rung = exponential(0.1, 3, spread=1.2)
    half = Scores(rung.cluster, rung.kl / 2, rung.same, rung.nll_base, rung.nll_cand)
    verdict = judged([{"metric": "mean_kl", "upper": 0.51, "share_of": "RTN-INT4"}], half, rung)
    rule = next(rule for rule in verdict.rules if rule.name == "mean_kl")
    assert rule.high - rule.low < 1e-9  # each conversation halves: the noise between them cancels
    assert rule.outcome == "pass"


@pytest.mark.parametrize(("metric", "bound"), [("same_top1", {"lower": 0.999}), ("lost_top1", {"upper": 0.001})])
def test_lost_top_choices_fail_from_either_side(metric: str, bound: dict[str, float]) -> None:
    assert judged([{"metric": metric, **bound}], exponential(0.01, 1)).verdict == "fail"


def test_a_domain_worse_than_its_rung_fails_and_is_named() -> None:
    rung = exponential(0.1, 4)
    chinese = rung.cluster % 2 == 0
    hurt = Scores(
        rung.cluster, np.where(chinese, rung.kl * 1.5, rung.kl * 0.2), rung.same, rung.nll_base, rung.nll_cand
    )
    limits: list[dict[str, object]] = [{"metric": "mean_kl", "upper": 0.9, "share_of": "RTN-INT4"}]
    verdict = judged(limits, hurt, rung, domains={"fail_above": 1.0, "name_above": 0.8})
    assert verdict.verdict == "fail"
    assert [rule.name for rule in verdict.deciding] == ["language zh"]
    assert [note.partition(":")[0] for note in verdict.notes] == ["category rag", "category sql"]


def test_a_domain_far_worse_than_all_other_text_fails_though_better_than_the_rung() -> None:
    rung = exponential(0.1, 4)
    chinese = rung.cluster % 2 == 0
    apart = Scores(
        rung.cluster, np.where(chinese, rung.kl * 0.6, rung.kl * 0.2), rung.same, rung.nll_base, rung.nll_cand
    )
    verdict = judged([{"metric": "mean_kl", "upper": 0.9, "share_of": "RTN-INT4"}], apart, rung, domains={})
    assert [rule.name for rule in verdict.deciding] == ["language zh"]
    assert "0.20 × on all other text" in verdict.deciding[0].text
    tiny = Scores(rung.cluster, apart.kl / 10, rung.same, rung.nll_base, rung.nll_cand)  # three times next to nothing
    verdict = judged([{"metric": "mean_kl", "upper": 0.9, "share_of": "RTN-INT4"}], tiny, rung, domains={})
    assert verdict.tokens == "pass"


@pytest.mark.parametrize(("hurt", "named"), [("language zh", "format json"), ("format json", "language zh")])
def test_a_domain_that_fails_only_through_another_is_a_note(hurt: str, named: str) -> None:
    """Chinese text and JSON overlap here: each holds half of the other."""
    rung = exponential(0.1, 4)
    chinese = rung.cluster % 2 == 0
    in_json = (rung.cluster % 4 == 0) | (rung.cluster % 4 == 1)
    damaged = chinese if hurt == "language zh" else in_json
    scores = Scores(
        rung.cluster, np.where(damaged, rung.kl * 5, rung.kl * 0.2), rung.same, rung.nll_base, rung.nll_cand
    )
    limits: list[dict[str, object]] = [{"metric": "mean_kl", "upper": 0.9, "share_of": "RTN-INT4"}]
    verdict = judged(limits, scores, rung, domains={}, in_json=in_json)
    failed = {rule.name for rule in verdict.rules if rule.outcome == "fail"}
    assert hurt in failed
    assert named not in failed
    assert any(note.startswith(named) and note.endswith(f"only through its text of {hurt}") for note in verdict.notes)


def test_what_is_hurt_far_more_than_the_rest_of_its_language_is_no_note() -> None:
    """All JSON stands in Chinese text here, and is why Chinese fails at all."""
    rung = exponential(0.1, 4)
    chinese = rung.cluster % 2 == 0
    in_json = chinese & (np.tile(np.arange(TOKENS), CONVERSATIONS) < 30)
    kl = np.where(in_json, rung.kl * 12, np.where(chinese, rung.kl * 1.3, rung.kl * 0.2))
    scores = Scores(rung.cluster, kl, rung.same, rung.nll_base, rung.nll_cand)
    limits: list[dict[str, object]] = [{"metric": "mean_kl", "upper": 20, "share_of": "RTN-INT4"}]
    verdict = judged(limits, scores, rung, domains={}, in_json=in_json)
    assert "format json" in {rule.name for rule in verdict.deciding}


def test_damage_that_is_not_proven_outside_another_domain_is_not_explained_by_it() -> None:
    rung = exponential(0.1, 4)
    in_json = np.isin(rung.cluster, [0, 2, 4, 6, 8, 10, 12])
    factor = np.where(rung.cluster == 1, 40.0, np.where(rung.cluster == 3, 4.0, np.where(in_json, 3.0, 0.2)))
    scores = Scores(rung.cluster, rung.kl * factor, rung.same, rung.nll_base, rung.nll_cand)
    limits: list[dict[str, object]] = [{"metric": "mean_kl", "upper": 20, "share_of": "RTN-INT4"}]
    verdict = judged(limits, scores, rung, domains={}, in_json=in_json)
    assert {"category sql", "format json"} <= {rule.name for rule in verdict.deciding}


def test_two_domains_that_fail_by_their_common_text_alone_are_both_named() -> None:
    rung = exponential(0.1, 4)
    in_json = (rung.cluster % 4 == 0) | (rung.cluster % 4 == 1)
    both = in_json & (rung.cluster % 2 == 0)
    scores = Scores(rung.cluster, np.where(both, rung.kl * 8, rung.kl * 0.2), rung.same, rung.nll_base, rung.nll_cand)
    limits: list[dict[str, object]] = [{"metric": "mean_kl", "upper": 0.9, "share_of": "RTN-INT4"}]
    failed = {
        rule.name for rule in judged(limits, scores, rung, domains={}, in_json=in_json).rules if rule.outcome == "fail"
    }
    assert {"language zh", "format json"} <= failed


def test_a_noise_floor_above_zero_fails_on_the_native_backend() -> None:
    verdict = judged([{"metric": "mean_kl", "upper": 0.02}], exponential(0.01, 1), floor=1e-9)
    assert [rule.name for rule in verdict.deciding] == ["noise_floor"]


def test_too_little_data_is_inconclusive() -> None:
    few = exponential(0.01, 1).where(np.arange(CONVERSATIONS * TOKENS) % 50 == 0)
    assert judged([{"metric": "mean_kl", "upper": 0.02}], few).verdict == "inconclusive"


def test_standard_judges_small_models_by_share_and_large_ones_by_figures() -> None:
    policy = load_policy("standard")
    small, eight, mixed = policy.class_for(135_000_000, 4), policy.class_for(10**10, 8), policy.class_for(10**10, 4)
    assert {limit.share_of for limit in small.limits} == {"RTN-INT4"}
    assert {limit.metric: limit.bound for limit in eight.limits}["mean_kl"] == 0.005
    assert {limit.metric: limit.bound for limit in mixed.limits}["mean_kl"] == 0.03


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("version: 1\nname: x\nclases: []\n", 3, "clases"),
        ("version: 1\nname: x\nclasses:\n- name: a\n  limits:\n  - {metric: mean_kl}\n", 6, "upper or lower"),
        ("version: 1\nname: x\nclasses:\n- name: a\n  limits:\n  - {metric: kl, upper: 1.0}\n", 6, "metric"),
    ],
)
def test_a_wrong_policy_is_told_with_its_line(tmp_path: Path, text: str, line: int, told: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=told) as caught:
        load_policy(str(path))
    assert caught.value.where == f"{path}:{line}"


def test_an_absent_policy_is_told() -> None:
    with pytest.raises(RecipeError, match="no such policy"):
        load_policy("nowhere/mine.yaml")
