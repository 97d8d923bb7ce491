"""The calibrate stage tells what it chose, keeps the samples for later stages, and is keyed by what chose them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.build.context import open_context
from quantkit.build.progress import Silent
from quantkit.build.stages.calibrate import STAGE
from quantkit.build.stages.import_source import TOKENIZER
from quantkit.calibration.samples import COVERAGE, read_samples
from quantkit.recipe.load import load_recipe
from tests.build_inputs import one_thread, write_recipe

_PROFILE = "version: 1\ncategories: {invoice: 0.5, delivery: 0.5}\nlanguages: {en: 0.5, zh: 0.5}\n"


class Heard(Silent):
    """Progress that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_recipe(tmp_path_factory.mktemp("calibrate"), "llama", recipe={"calibration": {"max_samples": 6}})
    (path.parent / "profile.yaml").write_text(_PROFILE)
    return path


def test_the_stage_prints_coverage_and_two_samples_and_keeps_both(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "import" / TOKENIZER).mkdir(parents=True)
    heard = Heard()
    with one_thread():
        context = open_context(load_recipe(recipe, ["calibration.profile=profile.yaml"]))
        context.source.write_tokenizer(tmp_path / "import" / TOKENIZER)
        facts = STAGE.run(context, {"import": tmp_path / "import"}, tmp_path, heard)
    kept = read_samples(tmp_path)
    assert facts["fingerprint"] == kept.fingerprint
    assert (facts["samples"], facts["tokens"]) == (len(kept.samples), kept.tokens)
    assert facts["coverage"] == json.loads((tmp_path / COVERAGE).read_text())
    assert {(sample.category, sample.language) for sample in kept.samples} == {("invoice", "en"), ("delivery", "zh")}
    shown = "\n".join(heard.lines)
    assert "too few conversations: invoice zh has 0 of" in shown
    assert shown.count("sample calibration-") == 2
    assert "calibration: the invoice 0 is settled, thank you." in shown


def test_the_stage_is_keyed_by_all_that_chooses_samples(recipe: Path) -> None:
    changes = ["max_samples=5", "max_tokens=128", "seed=1", "profile=profile.yaml", "pii.scrub=false"]
    with one_thread():
        keys = [STAGE.inputs(open_context(load_recipe(recipe, [f"calibration.{change}"]))) for change in changes]
        keys.append(STAGE.inputs(open_context(load_recipe(recipe))))
        (recipe.parent / "profile.yaml").write_text(_PROFILE.replace("0.5", "0.50"))
        keys.append(STAGE.inputs(open_context(load_recipe(recipe, ["calibration.profile=profile.yaml"]))))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
