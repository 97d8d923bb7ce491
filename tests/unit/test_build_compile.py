"""The compile stage: buckets always, kernels for the recipe's targets; killed, it goes on from the last whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.artifact.kernels import read_buckets, read_kernels
from quantkit.artifact.read import open_artifact
from quantkit.artifact.verify import verify
from quantkit.build.context import Context, open_context
from quantkit.build.pipeline import STAGES
from quantkit.build.progress import Silent
from quantkit.build.run import build
from quantkit.build.stage import stage_keys
from quantkit.build.stages.compile import STAGE
from quantkit.errors import RecipeError
from quantkit.recipe.load import load_recipe
from tests.build_inputs import one_thread, write_recipe


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("compile"), "llama")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/quantkit/kernels"


def context_of(recipe: Path, *sets: str) -> Context:
    return open_context(load_recipe(recipe, sets))


def key_of(context: Context) -> str:
    return stage_keys(STAGES, context)["compile"][0]


def allocated(context: Context, folder: Path, scheme: str) -> dict[str, Path]:
    """The allocate stage's folder, every group in one scheme."""
    folder.mkdir()
    schemes = dict.fromkeys(context.decisions.allowed, scheme)
    (folder / "allocation.json").write_text(json.dumps({"schemes": schemes}), encoding="utf-8")
    return {"allocate": folder}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


class Killed(Exception):
    """Ends a stage where a signal might."""


class KilledAt(Silent):
    """Progress that ends the stage when so many kernels are whole."""

    def __init__(self, kernels: int) -> None:
        self.kernels = kernels

    def step(self, done: int, total: int, what: str) -> None:
        if done == self.kernels:
            raise Killed


def test_without_targets_there_are_buckets_and_nothing_is_compiled(recipe: Path, cache: Path, tmp_path: Path) -> None:
    context = context_of(recipe, "runtime.max_num_seqs=6", "runtime.max_num_batched_tokens=256")
    folder = tmp_path / "stage"
    folder.mkdir()
    facts = STAGE.run(context, allocated(context, tmp_path / "allocate", "W8A16"), folder, Silent())
    assert facts == {"decode": [1, 2, 4, 6], "prefill": [128, 256], "kernels": {}, "compiled": 0}
    assert json.loads((folder / "buckets.json").read_text())["planned_from"] == "limits"
    assert [path.name for path in folder.iterdir()] == ["buckets.json"]
    assert not cache.exists()


def test_the_stage_is_made_anew_for_other_targets_limits_or_schemes_only(recipe: Path) -> None:
    key = key_of(context_of(recipe))
    assert key_of(context_of(recipe, "gate.max_samples=4")) == key
    assert key_of(context_of(recipe, "quantization.method=rtn")) == key, "codes and scales are not its business"
    assert key_of(context_of(recipe, "compile.targets=[sm_80]")) != key
    assert key_of(context_of(recipe, "runtime.max_num_seqs=4")) != key
    assert key_of(context_of(recipe, "kv_cache.format=FP16")) != key
    assert key_of(context_of(recipe, "quantization.lm_head=FP16")) != key


def test_an_unknown_target_is_refused_with_its_line(recipe: Path) -> None:
    text = recipe.read_text() + "compile:\n  targets:\n    - sm_80\n    - sm90\n"
    wrong = recipe.with_name("wrong.yaml")
    wrong.write_text(text)
    with pytest.raises(
        RecipeError, match=r"wrong.yaml:\d+: compile.targets.1: unknown target 'sm90'; did you mean 'sm_90'"
    ):
        load_recipe(wrong)


@pytest.mark.slow
def test_a_killed_stage_goes_on_from_the_last_whole_kernel_to_the_same_bytes(
    recipe: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(recipe, "compile.targets=[sm_80]")
    needs = allocated(context, tmp_path / "allocate", "FP16")
    folder = tmp_path / "stage"
    folder.mkdir()
    with pytest.raises(Killed):
        STAGE.run(context, needs, folder, KilledAt(2))
    facts = STAGE.run(context, needs, folder, Silent())
    assert facts["compiled"] <= facts["kernels"]["sm_80"] - 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (tmp_path / "whole").mkdir()
    STAGE.run(context, needs, tmp_path / "whole", Silent())
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_build_seals_kernels_for_two_targets_and_the_next_one_compiles_none(
    recipe: Path, cache: Path, tmp_path: Path
) -> None:
    loaded = load_recipe(recipe, ["compile.targets=[sm_80, sm_90]"])
    first = build(loaded, tmp_path / "a" / "out", Silent())
    second = build(loaded, tmp_path / "b" / "out", Silent())
    assert second.payload_digest == first.payload_digest == verify(first.folder).payload_digest
    (stage,) = [each for each in second.run["stages"] if each["name"] == "compile"]
    assert stage["facts"]["compiled"] == 0
    opened = open_artifact(first.folder)
    assert [each.target for each in read_kernels(opened)] == ["sm_80", "sm_90"]
    assert read_buckets(opened) is not None
