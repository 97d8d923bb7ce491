"""Gradients taken layer by layer, through files, are those of autograd through the whole of Transformers' model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.calibration.samples import CalibrationSet, Sample
from quantkit.models import open_source
from quantkit.program import build_program, fuse
from quantkit.quantize import gradients
from quantkit.quantize.gradients import GradientWalk, Tap
from tests.tiny import FAMILIES, make_checkpoint

GROUPS = ("qkv", "o", "gate_up", "down")


def _samples(lengths=(5, 33, 1, 17)) -> CalibrationSet:
    generator = torch.Generator().manual_seed(0)
    made = [
        Sample(tuple(torch.randint(5, 350, (n,), generator=generator).tolist()), "en", "x", f"s{i}")
        for i, n in enumerate(lengths)
    ]
    return CalibrationSet(tuple(made), "", {})


def _walk(folder: Path, work: Path, samples: CalibrationSet | None = None) -> GradientWalk:
    work.mkdir(exist_ok=True)
    source = open_source(str(folder))
    return GradientWalk(source, fuse(build_program(source.spec)), samples or _samples(), work, seed=3)


def _all_taps(walk: GradientWalk) -> dict[str, Tap]:
    found = {}
    for layer in range(walk.begin() - 1, -1, -1):
        found |= walk.taps(layer, [f"layers.{layer}.{kind}" for kind in GROUPS])
        walk.finish(layer)
    return found


def _theirs(folder: Path, samples: CalibrationSet, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """∂L/∂y of each projection from Transformers, q, k and v (gate and up) side by side."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    parts = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv", "o_proj": "o", "down_proj": "down",
             "gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up"}  # fmt: skip
    outputs: dict[str, list[torch.Tensor]] = {}
    for path, module in model.named_modules():
        group = parts.get(path.rpartition(".")[2])
        if group:
            key = f"layers.{path.split('.')[2]}.{group}"

            def keep(_, inputs, output, key=key):
                output.retain_grad()
                outputs.setdefault(key, []).append(output)

            module.register_forward_hook(keep)
    rows: dict[str, list[torch.Tensor]] = {}
    start = 0
    for sample in samples.samples:
        outputs.clear()
        logits = model(torch.tensor([sample.ids])).logits[0]
        wanted = labels[start : start + len(sample.ids)]
        torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").backward()
        for key, values in outputs.items():
            rows.setdefault(key, []).append(torch.cat([value.grad[0] for value in values], dim=1))
        start += len(sample.ids)
    return {key: torch.cat(values) for key, values in rows.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_autograd_through_transformers(tmp_path, family, monkeypatch):
    labels = torch.randint(0, 384, (56,), generator=torch.Generator().manual_seed(1))
    given = iter(labels.split(8))
    monkeypatch.setattr(gradients, "_LOGITS", 8 * 384)  # the head in eight rows at a time, four samples in one step
    monkeypatch.setattr(gradients, "draw", lambda probabilities, generator: next(given))
    folder = make_checkpoint(tmp_path / "model", family)
    ours = _all_taps(_walk(folder, tmp_path / "work"))
    theirs = _theirs(folder, _samples(), labels)
    assert ours.keys() == theirs.keys()
    for group, tap in ours.items():
        scale = theirs[group].abs().max()
        torch.testing.assert_close(tap.gradients / scale, theirs[group] / scale, rtol=1e-3, atol=1e-4)
