"""Answers: prompts are read strictly, counted exactly, and judged only where the baseline can be judged at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from quantkit.errors import RecipeError
from quantkit.gate.answer_rules import answer_rules
from quantkit.gate.answers import Pair, judged, write_answers
from quantkit.gate.counts import change, clopper_pearson, items_needed, mcnemar
from quantkit.gate.generate import Generated, coarse_kl, first_divergence
from quantkit.gate.modules import flip_rate, json_validity, run_modules, task_accuracy
from quantkit.gate.policy import AnswerLimit, Policy
from quantkit.gate.prompts import Prompt, choose, parse_prompt, read_prompts
from quantkit.gate.rule import Rule
from quantkit.gate.tasks import score, table
from quantkit.resources import resource

YES = [{"kind": "contains_any", "values": ["yes"]}]


def prompt(number: int, **changes: Any) -> Prompt:
    row = {
        "id": f"p{number}", "category": "math", "language": "en", "max_tokens": 8, "checks": YES,
        "messages": [{"role": "user", "content": f"question {number}"}],
    }  # fmt: skip
    return parse_prompt(row | changes, f"file:{number}")


def answered(text: str, tokens: int | None = None) -> Generated:
    return Generated(text, tuple(range(len(text) if tokens is None else tokens)), "stop")


def pair(number: int, base: str, ours: str, **changes: Any) -> Pair:
    one, left, right = prompt(number, **changes), answered(base), answered(ours)
    return Pair(one, left, right, first_divergence(left.token_ids, right.token_ids), 0.0, judged(one, left, right))


def pairs(both: int, lost: int, gained: int, neither: int) -> list[Pair]:
    kinds = [("yes", "yes")] * both + [("yes", "not")] * lost + [("not", "yes")] * gained + [("not", "not")] * neither
    return [pair(i, base, ours) for i, (base, ours) in enumerate(kinds)]


def rule(limit: dict[str, Any], given: list[Pair], **options: Any) -> Rule:
    policy = Policy.model_validate(
        {
            "version": 1,
            "name": "t",
            "classes": [{"name": "a", "limits": [{"metric": "mean_kl", "upper": 1.0}]}],
            **options,
        }
    )
    (found,) = answer_rules(given, [AnswerLimit.model_validate(limit)], policy)
    return found


def test_bounds_are_those_of_scipys_exact_binomial_test() -> None:
    for count, n in [(0, 10), (3, 40), (10, 10), (17, 69)]:
        interval = binomtest(count, n).proportion_ci(0.9, "exact")
        assert clopper_pearson(count, n, 0.95) == pytest.approx((interval.low, interval.high))
    assert mcnemar(10, 3) == pytest.approx(binomtest(3, 13).pvalue)
    assert mcnemar(0, 0) == 1.0


def test_a_proof_of_one_point_takes_299_items_and_of_half_a_point_598() -> None:
    assert (items_needed(0, 0, 0.01, 0.95), items_needed(0, 0, 0.005, 0.95)) == (299, 598)
    assert items_needed(0, 250, 0.01, 0.95) == 49
    assert change(0, 0, 299, 0.95).low >= -0.01 > change(0, 0, 298, 0.95).low


def test_a_drop_fails_only_when_it_is_surely_beyond_the_limit() -> None:
    sure = rule({"metric": "task", "drop": 0.05}, pairs(60, 30, 2, 8))
    assert sure.outcome == "fail"
    assert "90 → 62 of 100, 30 lost, 2 gained: -28.0 points" in sure.text
    maybe = rule({"metric": "task", "drop": 0.05}, pairs(80, 9, 2, 9))
    assert maybe.outcome == "unproven"
    assert maybe.low < -0.05 < maybe.high
    assert "it leans to harm" in maybe.text
    assert "more items without another one would exclude 5 points" in maybe.text
    assert rule({"metric": "task", "drop": 0.05}, pairs(100, 0, 0, 0)).outcome == "pass"
    assert rule({"metric": "task", "drop": 0.05}, pairs(80, 9, 2, 9), prove=True).outcome == "inconclusive"


def test_a_difference_within_chance_is_no_evidence_of_harm() -> None:
    assert "no evidence of harm" in rule({"metric": "task", "drop": 0.05}, pairs(80, 7, 5, 8)).text


def test_a_loss_that_chance_does_not_explain_is_not_called_no_evidence_of_harm() -> None:
    found = rule({"metric": "task", "drop": 0.05}, pairs(80, 10, 1, 5))
    assert found.outcome == "unproven"
    assert "no evidence of harm" not in found.text
    assert "worse than chance explains, but not surely beyond the limit" in found.text


def test_the_shares_of_losses_and_gains_alike_are_no_harm_however_many_flips() -> None:
    given = pairs(20, 40, 40, 0)
    assert rule({"metric": "task", "drop": 0.05}, given).outcome == "unproven"
    assert rule({"metric": "flips", "upper": 0.5}, given).outcome == "fail"
    assert rule({"metric": "flips", "upper": 0.95}, given).outcome == "pass"


def test_what_the_baseline_cannot_do_is_not_judged_and_not_passed() -> None:
    found = rule({"metric": "task", "drop": 0.05}, pairs(5, 20, 0, 75))
    assert found.outcome == "unmeasurable"
    assert "the baseline manages 25 of 100; not measurable on this model" in found.text
    assert "no such prompt" in rule({"metric": "json", "drop": 0.05}, pairs(5, 0, 0, 0)).text
    rows = {(row["category"], row["language"]): row for row in table(pairs(25, 5, 0, 70), 0.3, 0.95)}
    assert rows["*", "*"]["measurable"]
    assert rows["math", "en"]["losses"] == 5
    assert not {(r["category"]): r for r in table(pairs(25, 0, 0, 75), 0.3, 0.95)}["*"]["measurable"]


def test_lengths_are_judged_by_quantiles_over_prompts() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 200, 150)
    alike = [Pair(prompt(i), answered("a", n), answered("b", n + 1), 0, 0.0, ()) for i, n in enumerate(lengths)]
    double = [Pair(prompt(i), answered("a", n), answered("b", 2 * n), 0, 0.0, ()) for i, n in enumerate(lengths)]
    assert rule({"metric": "length_median", "within": 0.1}, alike).outcome == "pass"
    assert rule({"metric": "length_p95", "within": 0.1}, double).outcome == "fail"


def test_scores_ask_of_each_answer_what_its_prompt_asked() -> None:
    given = [
        pair(0, "I can't help with that.", "Sure, first you", checks=[{"kind": "refusal", "value": True}]),
        pair(1, "Use kill -9.", "I'm sorry, I cannot help.", checks=[{"kind": "refusal", "value": False}]),
        pair(2, "请先重启路由器。", "Please restart your router first.", language="zh"),
        pair(3, '{"a": 1}', "a is 1", checks=[{"kind": "json"}]),
        pair(4, "short", "brief"),
    ]
    losses = {name: (len(score(name, given)), score(name, given).losses) for name in ("refusal", "help", "json")}
    assert losses == {"refusal": (1, 1), "help": (1, 1), "json": (1, 1)}
    language = score("language", given)  # the others are too short to have one
    assert (language.ids, language.losses) == (("p2",), 1)


def test_coarse_kl_is_exact_when_all_tokens_are_kept_and_never_more_than_the_whole() -> None:
    import torch

    torch.manual_seed(0)
    base, ours = torch.randn(7, 50) * 2, torch.randn(7, 50) * 2
    p, q = base.log_softmax(-1), ours.log_softmax(-1)
    whole = (p.exp() * (p - q)).sum(-1)
    every = p.topk(50).indices
    assert torch.allclose(coarse_kl(every, p.gather(1, every), ours), whole, atol=1e-4)
    few = p.topk(5).indices
    assert bool((coarse_kl(few, p.gather(1, few), ours) <= whole + 1e-5).all())


def test_first_divergence_is_a_token_index() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": ""}, "key 'id' must be text"),
        ({"checks": [{"kind": "sum"}]}, "unknown check 'sum'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last turn must be the user's"),
        ({"max_tokens": 0}, "'max_tokens' must be a whole number"),
        ({"critical": 1}, "'critical' must be true or false"),
        ({"chekcs": []}, "unknown key 'chekcs'"),
    ],
)
def test_a_prompt_that_is_none_is_told_with_its_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "p.jsonl", [prompt(0).row(), prompt(1).row() | change])
    with pytest.raises(RecipeError, match=said) as caught:
        read_prompts([path])
    assert f"{path}:2" in str(caught.value)


def test_an_id_used_twice_and_a_broken_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="used before"):
        read_prompts([write(tmp_path / "p.jsonl", [prompt(0).row(), prompt(0).row()])])
    (tmp_path / "q.jsonl").write_text('{"id": \n')
    with pytest.raises(RecipeError, match="not valid JSON"):
        read_prompts([tmp_path / "q.jsonl"])


def test_a_sample_holds_the_critical_ones_and_spreads_over_cells() -> None:
    given = [prompt(i, category=("sql", "rag")[i % 2], language=("en", "zh")[i // 2 % 2]) for i in range(40)]
    given += [prompt(40 + i, category="safety", critical=True) for i in range(3)]
    chosen = choose(given, 11, seed=0)
    assert [item.id for item in chosen] == [item.id for item in given if item in chosen]
    assert sum(item.critical for item in chosen) == 3
    cells = [(item.category, item.language) for item in chosen if not item.critical]
    assert sorted(cells.count(cell) for cell in set(cells)) == [2, 2, 2, 2]
    assert {item.id for item in choose(list(reversed(given)), 11, seed=0)} == {item.id for item in chosen}


def test_the_answers_file_is_one_line_a_prompt_whatever_a_model_writes(tmp_path: Path) -> None:
    hostile = "a\u2028b\x85c\n</script>\u2029"
    write_answers(tmp_path / "answers.jsonl", "sha256:0", [pair(0, hostile, "yes"), pair(1, "yes", hostile)])
    head, *rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
    assert head == {"payload_digest": "sha256:0", "kind": "answers", "version": 1}
    assert rows[0]["baseline"]["text"] == rows[1]["candidate"]["text"] == hostile
    assert rows[0]["checks"] == [{"kind": "contains_any", "baseline": False, "candidate": True}]


def test_modules_compute_on_answers_and_prompts_as_text() -> None:
    lines = [json.dumps(prompt(i).row() | {"baseline": "yes"}) for i in range(2)]
    assert task_accuracy(["yes", "no"], lines) == 0.5
    assert flip_rate(["yes", "no"], lines) == 0.5
    asks = [json.dumps(prompt(0, checks=[{"kind": "json", "schema": {"type": "array"}}]).row())]
    assert (json_validity(["[1]"], asks), json_validity(["{}"], asks)) == (1.0, 0.0)


def test_shipped_modules_and_ones_own_load_by_path_and_run_on_both_sides(tmp_path: Path) -> None:
    own = tmp_path / "shouting"
    own.mkdir()
    text = resource("evals/metrics/repetition/repetition.py").read_text("utf-8")
    text = text.replace("from quantkit.gate.modules import repetition\n", "").replace(
        'return {"repetition": repetition(predictions)}', 'return {"loud": sum(p.isupper() for p in predictions)}'
    )
    (own / "shouting.py").write_text(text)
    given = [pair(0, "yes", "NO"), pair(1, "yes", "yes")]
    found = run_modules([resource("evals/metrics/task_accuracy"), own], given)
    assert found == {"task_accuracy": {"task_accuracy": [1.0, 0.5]}, "shouting": {"loud": [0.0, 1.0]}}
    (own / "shouting.py").write_text(text.replace("predictions)}", "nothing)}"))
    with pytest.raises(RecipeError, match="metric module fails") as caught:
        run_modules([own], given)
    assert str(own) in str(caught.value)
