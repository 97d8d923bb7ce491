"""Our artifacts are compressed-tensors checkpoints: Transformers opens them and computes what we compute.

Bound 1e-3 on logits of size about 10: both sides run in float32 from the same codes and 16-bit scales; what differs
is the order of summation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quantkit.artifact.manifest import Manifest
from quantkit.artifact.read import open_artifact
from quantkit.artifact.write import write_payload
from quantkit.formats import QuantizedMatrix
from quantkit.models import open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.quantize.weights import RtnWeights
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs
from quantkit_kernels.arrays import BFLOAT16, cast
from quantkit_kernels.tensors import as_tensor
from tests.tiny import make_checkpoint

MIXED = ("W8A16", "W4A16_G32", "FP16", "W4A16_G64")
ALL = ("W8A16", "W4A16_G32", "W4A16_G32_ASYM", "FP16", "W4A16_G128_ASYM")
IDS = [5, 9, 17, 33, 65, 129, 257, 300, 1, 2, 3, 4]


def _build(folder: Path, family: str, tied: bool, pick, *, dtype="float32", head="W8A16"):
    """A tiny checkpoint quantized with `pick(index)` for the index-th group, as an artifact."""
    source = open_source(str(make_checkpoint(folder / "source", family, tied=tied, dtype=dtype)))
    program = fuse(build_program(source.spec))
    schemes = {group: pick(i) for i, group in enumerate(program.groups())} | {"lm_head": head}
    program = lower_precision(program, schemes, "FP32")
    weights = RtnWeights(source)
    write_payload(
        folder / "artifact",
        source=source,
        program=program,
        weights=((w, weights.load(w)) for w in program.weights.values()),
        manifest=Manifest("0.1.0", {}, {}, schemes, "FP32"),
    )
    return folder / "artifact"


def _ours(artifact, program) -> np.ndarray:
    executor = Executor(
        program, artifact, max_tokens=64, max_seqs=1, num_blocks=8, max_model_len=64, backend="reference"
    )
    return executor.step(StepInputs.of_sequences([IDS], [[1]], logits="all")).copy()


def _theirs(folder: Path, **options) -> tuple[np.ndarray, torch.nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy(), model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_transformers_computes_our_logits_from_a_mixed_artifact(tmp_path, family, tied):
    folder = _build(tmp_path, family, tied, lambda i: MIXED[i % 4])
    artifact = open_artifact(folder)
    program = artifact.program
    if tied:  # other engines run the head from the 16-bit table; only our runtime derives the INT8 one
        program = lower_precision(program, {"lm_head": "FP16"}, "FP32")
    logits, _ = _theirs(folder)
    assert np.abs(_ours(artifact, program) - logits).max() <= 1e-3
    assert np.abs(logits).max() > 1


class _Rounded:
    """The artifact's weights as Transformers' `dequantize` keeps them: rounded to the type scales are stored in."""

    def __init__(self, artifact) -> None:
        self._artifact = artifact

    def load(self, weight):
        stored = self._artifact.program.weights[weight.name]
        value = self._artifact.load(stored if weight.name != "lm_head" else weight)
        return cast(value.dequantize(), BFLOAT16) if isinstance(value, QuantizedMatrix) else value


@pytest.mark.parametrize("scheme", ["W8A16", "W4A16_G32", "W4A16_G32_ASYM"])
def test_a_uniform_artifact_can_be_dequantized_at_load(tmp_path, scheme):
    folder = _build(tmp_path, "llama", True, lambda i: scheme)
    artifact = open_artifact(folder)
    program = lower_precision(artifact.program, dict.fromkeys(artifact.program.groups(), "FP16"), "FP32")
    logits, _ = _theirs(folder, quantization_config=CompressedTensorsConfig(run_compressed=False))
    assert np.abs(_ours(_Rounded(artifact), program) - logits).max() <= 1e-3


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_compressed_tensors_decompresses_every_module_of_a_mixed_asymmetric_artifact(tmp_path, family):
    """Transformers 5.24 cannot open asymmetric groups beside others, so its library's own decompressor is the judge."""
    folder = _build(tmp_path, family, False, lambda i: ALL[i % len(ALL)])
    artifact = open_artifact(folder)
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    tensors = load_file(folder / "model.safetensors")
    checked = 0
    for weight in artifact.program.groups().values():
        ours = artifact.load(weight)
        if not isinstance(ours, QuantizedMatrix):
            assert all(part.tensor.removesuffix(".weight") in config.ignore for part in weight.parts)
            continue
        theirs = []
        for part in weight.parts:
            module = part.tensor.removesuffix(".weight")
            (scheme,) = [group for group in config.config_groups.values() if module in group.targets]
            names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
            state = {name: tensors[f"{module}.{name}"] for name in names if f"{module}.{name}" in tensors}
            state["weight_scale"] = state["weight_scale"].float()
            theirs.append(PackedQuantizationCompressor.decompress(state, scheme)["weight"])
        assert torch.equal(torch.cat(theirs), as_tensor(ours.dequantize()))
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints_open_too(tmp_path, dtype):
    folder = _build(tmp_path, "qwen2", True, lambda i: MIXED[i % 4], dtype=dtype)
    artifact = open_artifact(folder)
    program = lower_precision(artifact.program, {"lm_head": "FP16"}, "FP32")
    logits, _ = _theirs(folder)
    assert np.abs(_ours(artifact, program) - logits).max() <= 1e-3


def test_an_untied_head_is_stored_and_a_tied_one_is_not(tmp_path):
    tied, untied = (_build(tmp_path / str(t), "llama", t, lambda i: "W8A16") for t in (True, False))
    assert "lm_head.weight_packed" in load_file(untied / "model.safetensors")
    stored = load_file(tied / "model.safetensors")
    assert not [name for name in stored if name.startswith("lm_head")]
    assert stored["model.embed_tokens.weight"].dtype == torch.float32
    config = json.loads((tied / "config.json").read_text())
    assert "lm_head" in config["quantization_config"]["ignore"]
    head = open_artifact(tied)
    derived = head.load(head.program.weights["lm_head"])
    assert isinstance(derived, QuantizedMatrix)
    error = np.abs(derived.dequantize() - stored["model.embed_tokens.weight"].numpy())
    assert (error <= derived.scale * 0.51 + 1e-6).all()
