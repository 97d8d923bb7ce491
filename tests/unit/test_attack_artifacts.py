"""Artifacts whose program, evidence or manifest somebody edited: refused by name, never believed, never run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact.manifest import manifest_bytes
from quantkit.artifact.read import open_artifact
from quantkit.build.progress import Silent
from quantkit.build.run import build
from quantkit.cli.app import run
from quantkit.errors import CheckpointError, RecipeError
from quantkit.program import program_from_json, program_to_json
from quantkit.recipe.load import load_recipe
from quantkit.report import gather
from quantkit.runtime import load
from quantkit.runtime.admission import VERDICT, read_standing
from quantkit.runtime.load import EngineOptions, load_artifact
from tests.build_inputs import one_thread, write_recipe

DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("attacked")
    with one_thread():
        recipe = load_recipe(
            write_recipe(folder, "llama", recipe={"runtime": {"max_model_len": 48, "max_num_seqs": 3}})
        )
        build(recipe, folder / "out", Silent())
        yield folder / "out"


@pytest.fixture
def program(artifact: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((artifact / "quantkit" / "program.json").read_text())
    return found


def test_a_buffer_plan_that_overwrites_a_live_value_is_refused(program: dict[str, Any]) -> None:
    residual = next(value for value in program["values"] if value["buffer"] is not None)
    for value in program["values"]:
        if value["buffer"] is not None:
            value["buffer"] = residual["buffer"]
    with pytest.raises(CheckpointError, match=r"overwrites|share a buffer"):
        program_from_json(json.dumps(program))


def test_a_step_input_in_a_buffer_is_refused(program: dict[str, Any]) -> None:
    next(value for value in program["values"] if value["dtype"] == "int32")["buffer"] = 0
    with pytest.raises(CheckpointError, match="cannot live in a buffer"):
        program_from_json(json.dumps(program))


@pytest.mark.parametrize("change", [{"kind": "yarn"}, {"kind": "linear"}, {"rotary_dim": 3}, {"rotary_dim": 1 << 40}])
def test_a_rope_that_gives_no_table_is_refused(program: dict[str, Any], change: dict[str, Any]) -> None:
    program["ropes"]["global"] |= change
    with pytest.raises(CheckpointError, match="rope"):
        program_from_json(json.dumps(program))


@pytest.mark.parametrize("dim", [None, True, 1.5, [0], {}])
def test_a_shape_of_anything_but_numbers_and_symbols_is_refused(program: dict[str, Any], dim: Any) -> None:
    program["values"][-1]["shape"][0] = dim
    with pytest.raises(CheckpointError, match="shape is"):
        program_from_json(json.dumps(program))


def test_the_artifact_s_own_program_passes_every_check(artifact: Path) -> None:
    text = (artifact / "quantkit" / "program.json").read_text()
    assert program_to_json(program_from_json(text)) == text


def write_verdict(folder: Path, content: str) -> Path:
    path = folder / VERDICT
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "passed"},
        {"verdict": "pass", "rules": [{"outcome": "fail"}]},
        {"verdict": "pending-review", "rules": [{"outcome": "inconclusive"}]},
        {"rules": [5]},
        {"rules": None},
        {"coverage": []},
    ],
    ids=str,
)
def test_a_verdict_that_its_rules_do_not_bear_is_not_believed(tmp_path: Path, change: dict[str, Any]) -> None:
    whole = {"payload_digest": DIGEST, "verdict": "pass", "coverage": {}, "rules": [{"outcome": "pass"}]}
    write_verdict(tmp_path, json.dumps(whole | change))
    with pytest.raises(CheckpointError, match="not a gate verdict"):
        read_standing(tmp_path, DIGEST)


@pytest.mark.parametrize(
    "content", ["", "[]", "5", "[" * 100_000, "{}"], ids=["empty", "list", "number", "deep", "object"]
)
def test_inspect_refuses_a_verdict_file_that_is_none(
    artifact: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = artifact / VERDICT
    before = path.read_bytes()
    path.write_text(content)
    try:
        assert run(["inspect", str(artifact)]) == 3
        assert "not a gate verdict" in capsys.readouterr().err
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("stages", [5, "x", [1], {"a": 1}, [{}]], ids=str)
def test_a_report_refuses_a_run_record_of_another_form(artifact: Path, stages: Any) -> None:
    path = artifact / "evidence" / "run" / "run.json"
    before = path.read_bytes()
    path.write_text(json.dumps(json.loads(before) | {"stages": stages}))
    try:
        with pytest.raises(CheckpointError, match="not of the form"):
            gather(artifact)
    finally:
        path.write_bytes(before)


def test_evidence_that_links_elsewhere_is_refused(artifact: Path, tmp_path: Path) -> None:
    link = artifact / "evidence" / "elsewhere"
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(CheckpointError, match="evidence/elsewhere: is a symlink"):
            open_artifact(artifact)
    finally:
        link.unlink()


def test_an_artifact_serves_within_the_limits_of_its_recipe(artifact: Path) -> None:
    loaded = load_artifact(artifact, EngineOptions(threads=1, accept_ungated=True))
    assert (loaded.max_model_len, loaded.core.config.scheduler.max_num_seqs) == (48, 3)
    told = load_artifact(artifact, EngineOptions(threads=1, accept_ungated=True, max_model_len=32, max_num_seqs=1))
    assert (told.max_model_len, told.core.config.scheduler.max_num_seqs) == (32, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_cache_gib", float("nan")), ("kv_cache_gib", 1e9), ("threads", 100_000), ("max_num_batched_tokens", 10**8)],
)
def test_limits_of_a_command_line_are_bounded(name: str, value: Any) -> None:
    asked: dict[str, Any] = {name: value}
    with pytest.raises(RecipeError, match=f"{name} must be"):
        EngineOptions(**asked)


@pytest.mark.parametrize("value", ["x", -1, 0, 1 << 40, [1]], ids=str)
def test_limits_that_are_no_limits_are_refused(artifact: Path, tmp_path: Path, value: Any) -> None:
    path = artifact / "quantkit" / "manifest.json"
    before, manifest = path.read_bytes(), open_artifact(artifact).manifest
    path.write_bytes(manifest_bytes(replace(manifest, recipe={"runtime": {"max_num_seqs": value}})))
    try:
        with pytest.raises(CheckpointError, match=r"recipe\.runtime\.max_num_seqs is"):
            load_artifact(artifact, EngineOptions(threads=1, accept_ungated=True))
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("source", [{}, {"location": 5}])
def test_inspect_shows_an_artifact_that_does_not_say_where_it_came_from(
    artifact: Path, source: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = artifact / "quantkit" / "manifest.json"
    before, manifest = path.read_bytes(), open_artifact(artifact).manifest
    path.write_bytes(manifest_bytes(replace(manifest, source=source)))
    try:
        assert run(["inspect", str(artifact)]) == 0
        assert "(?, ?)" in capsys.readouterr().out
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("how", ["renamed", "rewritten"])
def test_a_file_that_changes_between_its_digest_and_its_reading_is_not_served(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(artifact, folder)
    sound, load_executor = (folder / name).read_bytes(), load.load_executor

    def change(*given: Any) -> Any:
        if how == "renamed":
            (tmp_path / "other").write_bytes(sound)
            (tmp_path / "other").rename(folder / name)
        else:
            with (folder / name).open("r+b") as file:
                file.write(sound[:1])
        return load_executor(*given)

    options = EngineOptions(threads=1, accept_ungated=True)
    load_artifact(folder, options)
    monkeypatch.setattr(load, "load_executor", change)
    with pytest.raises(CheckpointError, match=rf"{name}: was changed while it was read"):
        load_artifact(folder, options)
