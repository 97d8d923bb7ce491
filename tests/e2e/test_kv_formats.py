"""Caches in FP8 and INT4 through whole models: built, judged, served; the same bits however requests are batched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit import Engine, SamplingParams
from quantkit.artifact.layout import KV_SCALES
from quantkit.artifact.read import open_artifact
from quantkit.artifact.verify import verify
from quantkit.build.progress import Silent
from quantkit.build.run import build
from quantkit.gate import GateResult, run_gate
from quantkit.recipe.load import load_recipe
from quantkit.runtime.step import StepInputs
from tests import planted
from tests.build_inputs import one_thread, write_recipe
from tests.e2e.engine_case import make_executor, prompts
from tests.e2e.gate_case import Case, make_case
from tests.e2e.invariance import differing, digests

FORMATS = ("FP8", "INT4")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_logits_rows_are_the_same_however_they_are_served(tmp_path: Path, family: str, form: str) -> None:
    executor = make_executor(tmp_path, family=family, length=512, num_blocks=601, max_tokens=256, kv_format=form)
    found = digests(executor, prompts(16, low=20, high=100), steps=64)
    assert differing(found) == []
    assert len(set(found["alone"].values())) == 16


def last_logits(folder: Path, backend: str, form: str) -> NDArray[np.float32]:
    executor = make_executor(
        folder, num_blocks=9, max_tokens=64, length=64, backend=backend, compute="exact", kv_format=form
    )
    ids = np.random.default_rng(3).integers(0, executor.program.vocab_size, 40).tolist()
    return executor.step(StepInputs.of_sequences([ids], [[1, 2, 3]])).copy()


@pytest.mark.parametrize("form", FORMATS)
def test_native_and_reference_agree_on_a_whole_model(tmp_path: Path, form: str) -> None:
    native, reference = (last_logits(tmp_path, backend, form) for backend in ("cpu", "reference"))
    spread = float(native.std())
    np.testing.assert_allclose(native, reference, atol=0.05 * spread, rtol=0)  # a code may round the other way
    assert float(np.abs(native - last_logits(tmp_path, "cpu", "FP32")).max()) > 0.05 * spread


@pytest.mark.parametrize("form", FORMATS)
def test_a_recipe_is_built_judged_verified_and_served(tmp_path: Path, form: str) -> None:
    recipe = write_recipe(tmp_path, "llama", recipe={"kv_cache": {"format": form}})
    with one_thread():
        built = build(load_recipe(recipe), tmp_path / "out", Silent())
    assert verify(built.folder).payload_digest == built.payload_digest
    artifact = open_artifact(built.folder)
    assert {kv.format for kv in artifact.program.kv} == {artifact.manifest.kv_format} == {form}
    scale = artifact.read_tensor("layers.0.k_scale")
    assert bool((scale == scale[:, :1]).all()) == (form == "FP8"), "one scale a head in FP8 alone"
    verdict = json.loads((built.folder / "evidence/gate/verdict.json").read_text())
    assert verdict["coverage"]["kv_format"] == form
    [answer] = serve(built.folder)
    assert len(answer) == 24
    assert serve(built.folder) == [answer]


def serve(folder: Path) -> list[list[int]]:
    with Engine(folder, threads=1, accept_ungated=True, max_model_len=128) as engine:
        assert engine.loaded.memory.kv_tokens > 0
        made = engine.generate(["The quick brown fox"], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    return [list(one.token_ids) for one in made]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("kv"))


def judged(case: Case, folder: Path) -> GateResult:
    return run_gate(
        folder, case.source, [case.held_out], calibration=[case.calibration], policy=str(case.policy), prompts=[]
    )


def faults(result: GateResult) -> dict[str, str]:
    return {rule.name: rule.text for rule in result.verdict.rules if rule.outcome == "fail" and rule.section == "audit"}


@pytest.mark.parametrize("form", FORMATS)
def test_sound_scales_trip_no_audit_and_wrong_ones_are_named(case: Case, tmp_path: Path, form: str) -> None:
    sound = case.artifact(f"sound-{form}", kv_format=form)
    assert (sound / KV_SCALES).is_file()
    assert faults(judged(case, sound)) == {}
    for factor, said in ((2.5, "is too large"), (0.4, "is too small")):
        folder = planted.copy_of(sound, tmp_path / f"times-{factor}")
        found = faults(judged(case, planted.kv_scale_times(folder, "layers.1.k_scale", factor)))
        assert found.keys() == {"cache layers.1.k_scale"}
        assert said in found["cache layers.1.k_scale"]
