"""Every family goes from a tiny checkpoint to a verified, judged artifact; equal recipes give equal bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantkit.artifact.read import open_artifact
from quantkit.artifact.verify import verify
from quantkit.build.progress import Silent
from quantkit.build.run import Built, build
from quantkit.errors import NumericsError, RecipeError
from quantkit.recipe.load import load_recipe
from tests.build_inputs import one_thread, write_recipe
from tests.tiny import FAMILIES

VERDICTS = {"pass": 0, "fail": 10, "inconclusive": 11, "pending-review": 12}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make(recipe: Path, *sets: str, out: str = "out") -> Built:
    return build(load_recipe(recipe, sets), recipe.parent / out, Silent())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = write_recipe(tmp_path_factory.mktemp("qwen"), "qwen2")
    make(recipe)
    return recipe


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen2"])
def test_every_family_is_built_judged_and_verified(tmp_path: Path, family: str) -> None:
    built = make(write_recipe(tmp_path, family, dtype="bfloat16"))
    report = verify(built.folder)
    assert report.payload_digest == built.payload_digest
    assert built.exit_code == VERDICTS[built.verdict]
    assert built.weight_bytes < built.source_bytes
    artifact = open_artifact(built.folder)
    assert artifact.manifest.schemes["layers.0.o"] == "FP16"
    assert {"W8A16", "W4A16_G64"} & set(artifact.manifest.schemes.values())
    assert artifact.manifest.checks["import_parity"]["max_abs_diff_below"] <= 1e-4
    for name in ("gate/verdict.json", "gate/gate.json", "run/run.json"):
        evidence = json.loads((built.folder / "evidence" / name).read_text())
        assert evidence["payload_digest"] == built.payload_digest


def test_a_second_build_of_the_same_recipe_elsewhere_gives_the_same_digest(qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("out", ".quantkit"))
    again = make(tmp_path / "copy" / qwen.name)
    assert again.payload_digest == open_artifact(qwen.parent / "out").payload_digest
    assert not any(stage["cached"] for stage in again.run["stages"])


def test_a_second_run_reuses_every_stage_and_still_tells_the_verdict(qwen: Path) -> None:
    first = open_artifact(qwen.parent / "out").payload_digest
    again = make(qwen)
    assert all(stage["cached"] for stage in again.run["stages"])
    assert again.payload_digest == first


def test_what_only_judges_is_judged_anew_without_touching_the_payload(qwen: Path) -> None:
    first = open_artifact(qwen.parent / "out").payload_digest
    again = make(qwen, "gate.review.waive=nobody has to look at random weights")
    assert {stage["name"] for stage in again.run["stages"] if not stage["cached"]} == {"gate"}
    assert again.payload_digest == first


def test_another_budget_keeps_the_measurements_and_replaces_the_artifact(qwen: Path, tmp_path: Path) -> None:
    recipe = Path(shutil.copytree(qwen.parent, tmp_path / "copy")) / qwen.name
    first = open_artifact(recipe.parent / "out").payload_digest
    again = make(recipe, "quantization.budget_bits=12")
    assert {stage["name"] for stage in again.run["stages"] if stage["cached"]} == {"import", "calibrate", "sensitivity"}
    assert again.payload_digest != first
    assert open_artifact(recipe.parent / "out").payload_digest == again.payload_digest
    bits = json.loads((recipe.parent / "out/evidence/run/run.json").read_text())["stages"][3]["facts"]["average_bits"]
    assert bits <= 12


def test_a_payload_damaged_in_place_is_made_again(qwen: Path, tmp_path: Path) -> None:
    recipe = Path(shutil.copytree(qwen.parent, tmp_path / "copy")) / qwen.name
    first = make(recipe)
    weights = recipe.parent / "out" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    with weights.open("r+b") as file:  # in place: a hard link to the store's own copy
        file.write(content)
    again = make(recipe)
    assert again.payload_digest == first.payload_digest
    verify(again.folder)


def test_what_people_wrote_about_a_payload_stays_with_it(qwen: Path, tmp_path: Path) -> None:
    recipe = Path(shutil.copytree(qwen.parent, tmp_path / "copy")) / qwen.name
    note = recipe.parent / "out" / "evidence" / "review" / "note.txt"
    note.write_text("looked at on Monday")
    make(recipe)
    assert note.read_text() == "looked at on Monday"
    make(recipe, "quantization.budget_bits=12")
    assert not note.exists()


def test_nothing_but_an_artifact_is_overwritten(qwen: Path) -> None:
    other = qwen.parent / "holiday-photos"
    other.mkdir()
    (other / "beach.jpg").write_bytes(b"x")
    with pytest.raises(RecipeError, match="holds something that is not an artifact") as caught:
        make(qwen, out="holiday-photos")
    assert caught.value.exit_code == 2
    assert (other / "beach.jpg").read_bytes() == b"x"


def test_an_untied_head_is_stored_in_8_bits_and_a_group_format_may_be_asymmetric(tmp_path: Path) -> None:
    built = make(
        write_recipe(tmp_path, "llama"),
        "quantization.schemes=[W4A16_G32_ASYM]",
        "quantization.budget_bits=5.5",
        'quantization.overrides=[{match: "*.down", scheme: W8A16}]',
        "kv_cache.format=FP16",
        "quantization.scale_search=mse",
    )
    artifact = open_artifact(built.folder)
    assert artifact.program.kv[0].format == "FP16"
    assert "lm_head.weight_packed" in artifact.tensors
    assert artifact.manifest.schemes["layers.0.qkv"] == "W4A16_G32_ASYM"


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "llama")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"^model.layers.1.mlp.up_proj.weight: 1 of \d+ weights are NaN or Inf"):
        make(recipe)
