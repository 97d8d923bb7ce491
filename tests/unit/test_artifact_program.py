"""A hostile program or checkpoint inside a well-sealed artifact is refused before anything is computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.artifact.read import open_artifact
from quantkit.artifact.verify import verify
from quantkit.errors import CheckpointError
from tests.unit.test_artifact_payload import _reseal, _source, _write


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    _write(folder / "artifact", _source(folder / "source", tied=False))
    return folder / "artifact"


@pytest.fixture
def artifact(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "artifact"))


def _edit(artifact: Path, change) -> None:
    path = artifact / "quantkit/program.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    _reseal(artifact)


def _node(body, op):
    return next(node for node in body["nodes"] if node["op"] == op)


def _weight(body, name):
    return next(weight for weight in body["weights"] if weight["name"] == name)


HOSTILE = {
    "unknown op": lambda b: _node(b, "linear").update(op="__import__"),
    "an op's attribute of another type": lambda b: _node(b, "rms_norm")["attrs"].update(eps="tiny"),
    "an attribute too many": lambda b: _node(b, "linear")["attrs"].update(path="/etc/passwd"),
    "wrong weight shape": lambda b: _weight(b, "layers.0.o").update(shape=[128, 64]),
    "huge weight": lambda b: _weight(b, "layers.0.o").update(shape=[1 << 40, 128]),
    "negative size": lambda b: _weight(b, "layers.0.o").update(shape=[-128, 128]),
    "part beyond its tensor": lambda b: _weight(b, "layers.0.o")["parts"][0].update(start=128, stop=256),
    "part of a tensor that is not there": lambda b: _weight(b, "layers.0.o")["parts"][0].update(
        tensor="model.x.weight"
    ),
    "head half table, half elsewhere": lambda b: _weight(b, "lm_head").update(
        parts=[
            {"tensor": "model.embed_tokens.weight", "start": 0, "stop": 192},
            {"tensor": "model.x.weight", "start": 0, "stop": 192},
        ]
    ),
    "tied head beyond its table": lambda b: _weight(b, "lm_head").update(
        parts=[{"tensor": "model.embed_tokens.weight", "start": 192, "stop": 576}]
    ),
    "scheme nobody knows": lambda b: _weight(b, "layers.0.o").update(scheme="W1A1"),
    "scheme other than the stored one": lambda b: _weight(b, "layers.0.o").update(scheme="W4A16_G128"),
    "quantized norm": lambda b: _weight(b, "final_norm").update(scheme="W8A16"),
    "negative window": lambda b: b["kv"][0].update(window=-4),
    "window of zero": lambda b: b["kv"][0].update(window=0),
    "unknown KV format": lambda b: b["kv"][0].update(format="INT1"),
    "one layer too few": lambda b: b["kv"].pop(),
    "one layer too many": lambda b: b["kv"].append(b["kv"][0]),
    "no layers": lambda b: b.update(kv=[]),
    "huge vocabulary": lambda b: b.update(vocab_size=1 << 60),
    "a boolean for a number": lambda b: b.update(hidden_size=True),
    "rope of zero": lambda b: next(iter(b["ropes"].values())).update(theta=0),
    "rope wider than a head": lambda b: next(iter(b["ropes"].values())).update(rotary_dim=1 << 20),
    "a layer that does not exist": lambda b: _node(b, "paged_attention").update(layer=99),
    "a value used before it is made": lambda b: b["nodes"].reverse(),
    "a buffer out of range": lambda b: b["values"][-1].update(buffer=10**9),
    "another format": lambda b: b.update(format=2),
    "a field gone": lambda b: b.pop("nodes"),
    "a list for a table": lambda b: b.update(ropes=[]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_refused(artifact, name):
    _edit(artifact, HOSTILE[name])
    with pytest.raises(CheckpointError):
        open_artifact(artifact)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"eps": 1e-06', '"eps": NaN', 1),
        lambda text: text.replace('"eps": 1e-06', '"eps": 1e999', 1),
        lambda text: text.replace('"hidden_size"', '"hidden_size": 1, "hidden_size"', 1),
        lambda text: "[" * 100_000,
    ],
)
def test_a_program_that_is_no_json_of_ours_is_refused(artifact, spoil):
    path = artifact / "quantkit/program.json"
    before = path.read_text()
    path.write_text(spoil(before))
    assert path.read_text() != before
    _reseal(artifact)
    with pytest.raises(CheckpointError, match=r"program\.json"):
        open_artifact(artifact)


def test_a_program_that_is_no_text_is_refused(artifact):
    (artifact / "quantkit/program.json").write_bytes(b"\xff\xfe{}")
    _reseal(artifact)
    with pytest.raises(CheckpointError, match=r"program\.json: is not UTF-8"):
        open_artifact(artifact)


def _retensor(artifact: Path, change, name="model.safetensors") -> None:
    tensors = load_file(artifact / name)
    change(tensors)
    save_file(tensors, artifact / name)
    _reseal(artifact)


SCALE = "model.layers.0.self_attn.q_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), "weight_scale: the program reads a tensor that is missing"),
        (lambda t: t.update(evil=torch.ones(2)), "evil: the program does not read this tensor"),
        (lambda t: t.update({SCALE: t[SCALE][:-1].clone()}), "weight_scale: is F16"),
        (lambda t: t.update({SCALE: t[SCALE].double()}), "weight_scale: is F64"),
        (lambda t: t.update({"model.norm.weight": torch.ones(128, dtype=torch.int32)}), "not a float"),
    ],
)
def test_tensors_that_are_not_the_programs_are_refused(artifact, change, message):
    _retensor(artifact, change)
    with pytest.raises(CheckpointError, match=message):
        open_artifact(artifact)


def test_a_damaged_safetensors_header_is_refused(artifact):
    path = artifact / "model.safetensors"
    path.write_bytes((1 << 50).to_bytes(8, "little") + path.read_bytes()[8:])
    _reseal(artifact)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_artifact(artifact)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("where", [SCALE, "layers.0.k_scale"])
def test_verify_refuses_scales_that_cannot_be_computed_with(artifact, bad, where):
    name = "model.safetensors" if where == SCALE else "quantkit/kv_scales.safetensors"

    def spoil(tensors):
        tensors[where].view(-1)[0] = bad

    _retensor(artifact, spoil, name)
    with pytest.raises(CheckpointError, match=r"layers\.0\.(qkv|k_scale)"):
        verify(artifact)


def test_verify_refuses_a_stored_shape_that_lies_to_other_engines(artifact):
    name = "model.layers.0.self_attn.q_proj.weight_shape"
    _retensor(artifact, lambda t: t.update({name: torch.tensor([128, 64])}))
    with pytest.raises(CheckpointError, match=r"weight_shape: states \[128, 64\]"):
        verify(artifact)
