"""Metrics as `evaluate` modules: those that ship in evals/metrics, and anyone's own, run on both models' answers.

A module is loaded from a folder on this machine (`X/X.py`), never from a hub. It gets `predictions`, the answers, and
`references`, one JSON text a prompt: the prompt's line of its file, with the source's answer as `baseline`. It gives
numbers by name. What the shipped ones compute stands here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError
from quantkit.gate.answers import Pair
from quantkit.gate.checks import JSON_KINDS
from quantkit.gate.json_answers import find_json
from quantkit.gate.prompts import Prompt, parse_prompt
from quantkit.gate.wording import repeated_share, words_in


def task_accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers that pass all checks of their prompts."""
    return _mean([_prompt(line).passes(answer) for answer, line in zip(predictions, references, strict=True)])


def flip_rate(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Share of prompts that answer and baseline don't both pass or both fail."""
    flipped = []
    for answer, line in zip(predictions, references, strict=True):
        prompt = _prompt(line)
        flipped.append(prompt.passes(answer) != prompt.passes(str(json.loads(line)["baseline"])))
    return _mean(flipped)


def json_validity(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers that hold JSON, valid by its schema, among the prompts that ask for it."""
    found = []
    for answer, line in zip(predictions, references, strict=True):
        asked = [check for check in _prompt(line).checks if check.kind in JSON_KINDS]
        if asked:
            found.append(find_json(answer) is not None and all(c.passes(answer) for c in asked if c.kind == "json"))
    return _mean(found)


def repetition(predictions: Sequence[str]) -> float:
    """Mean share of an answer's word 4-grams that stood there before."""
    return _mean([repeated_share(tuple(words_in(answer))) for answer in predictions])


def run_modules(paths: Sequence[Path], pairs: Sequence[Pair]) -> dict[str, dict[str, list[float]]]:
    """`{module: {number: [baseline, candidate]}}` of each module on both models' answers.

    RecipeError names a folder that holds no module, or a module that fails.
    """
    if not paths or not pairs:
        return {}
    references = [_reference(pair) for pair in pairs]
    sides = ([pair.baseline.text for pair in pairs], [pair.candidate.text for pair in pairs])
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="quantkit-metrics-") as scratch:
        for path in paths:
            base, ours = (_compute(path, Path(scratch), side, references) for side in sides)
            found[path.name] = {name: [base[name], ours[name]] for name in base}
    return found


def _compute(path: Path, scratch: Path, answers: Sequence[str], references: Sequence[str]) -> Mapping[str, float]:
    import evaluate

    before, modules = list(sys.path), evaluate.config.HF_MODULES_CACHE
    evaluate.config.HF_MODULES_CACHE = str(scratch)  # modules are copied there to be imported
    try:
        module = evaluate.load(str(path), cache_dir=str(scratch), keep_in_memory=True)
        result = module.compute(predictions=list(answers), references=list(references))
        return {str(name): float(value) for name, value in result.items()}
    except Exception as error:
        raise RecipeError(
            f"this metric module fails: {' '.join(str(error).split())[:200] or type(error).__name__}",
            where=str(path),
            next=f"It must be a folder that holds {path.name}.py with an evaluate.Metric",
        ) from error
    finally:
        sys.path[:], evaluate.config.HF_MODULES_CACHE = before, modules


def _reference(pair: Pair) -> str:
    return json.dumps({**pair.prompt.row(), "baseline": pair.baseline.text}, ensure_ascii=False)


def _prompt(line: str) -> Prompt:
    row: Any = json.loads(line)
    row.pop("baseline", None)
    return parse_prompt(row, "references")


def _mean(values: Sequence[bool | float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
