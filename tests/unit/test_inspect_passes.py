"""`quantkit inspect --passes`: the op count before and after each pass, down to the program an artifact stores."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from quantkit.artifact.read import open_artifact
from quantkit.cli.app import run
from quantkit.program.passes import STRUCTURAL
from tests.unit.test_artifact_payload import _source, _write


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passes")
    _write(folder / "artifact", _source(folder / "source", tied=False))
    return folder / "artifact"


def test_passes_lead_from_the_architecture_to_the_stored_program(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(artifact), "--passes", "--json"]) == 0
    passes = json.loads(capsys.readouterr().out)
    program = open_artifact(artifact).program
    assert [one["name"] for one in passes] == [*(step.__name__ for step in STRUCTURAL), "lower_precision, plan_buffers"]
    assert passes[-1]["after"] == dict(Counter(node.op for node in program.nodes))
    assert passes[-1]["before"] == passes[-1]["after"], "what config.json says, fused, is not what is stored"
    assert [one["after"] for one in passes[:-1]] == [one["before"] for one in passes[1:]]


def test_what_each_pass_saves_is_what_it_fuses(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(artifact), "--passes", "--json"]) == 0
    saved = {
        one["name"]: sum(one["before"].values()) - sum(one["after"].values())
        for one in json.loads(capsys.readouterr().out)
    }
    layers = open_artifact(artifact).program.num_layers
    assert saved["fuse_qkv"] == layers  # three products become one and a split
    assert saved["fuse_gate_up"] == 0  # two become one and a split
    assert saved["fuse_add_norm"] == 2 * layers  # every residual add
    assert saved["fuse_rope_kv_write"] == 3 * layers  # the split, rope of q and of k, and the write become one
    assert saved["fuse_gated_act"] == layers  # the split and the product of both halves become one
    assert saved["lower_precision, plan_buffers"] == 0


def test_a_config_of_another_model_is_not_believed(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(artifact, tmp_path / "other"))
    config = other / "config.json"
    size, body = config.stat().st_size, json.loads(config.read_text())
    changed = json.dumps(body | {"num_hidden_layers": body["num_hidden_layers"] + 1})
    config.write_text(changed.ljust(size))
    assert config.stat().st_size == size
    assert run(["inspect", str(other), "--passes"]) == 3
    assert "config.json: describes another model than the program that is stored" in capsys.readouterr().err


def test_passes_are_readable_and_ask_for_one_thing(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = open_artifact(artifact).program.num_layers
    assert run(["inspect", str(artifact), "--passes"]) == 0
    assert f"rms_norm {2 * layers + 1} -> 1, add {2 * layers} -> 0, add_rms_norm 0 -> {2 * layers}" in (
        capsys.readouterr().out
    )
    assert run(["inspect", str(artifact), "--passes", "--program"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err
