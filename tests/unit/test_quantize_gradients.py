"""Gradients taken layer by layer, through files, are those of autograd through the whole of Transformers' model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.calibration.samples import CalibrationSet, Sample
from quantkit.errors import NumericsError
from quantkit.formats.schemes import SCHEMES
from quantkit.models import SourceWeights, open_source
from quantkit.program import build_program, fuse
from quantkit.quantize import gradients
from quantkit.quantize.alone import Alone, kl_alone
from quantkit.quantize.gradients import STEP_TOKENS, GradientWalk, Tap, choose, draw
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sensitivity import kl_by_sample, kl_by_token, loss_changes, weight_error
from tests.tiny import FAMILIES, make_checkpoint

GROUPS = ("qkv", "o", "gate_up", "down")


def _samples(lengths=(5, 33, 1, 17)) -> CalibrationSet:
    generator = torch.Generator().manual_seed(0)
    made = [
        Sample(tuple(torch.randint(5, 350, (n,), generator=generator).tolist()), "en", "x", f"s{i}")
        for i, n in enumerate(lengths)
    ]
    return CalibrationSet(tuple(made), "", {})


def _walk(folder: Path, work: Path, samples: CalibrationSet | None = None, seed: int = 3) -> GradientWalk:
    work.mkdir(exist_ok=True)
    source = open_source(str(folder))
    return GradientWalk(source, fuse(build_program(source.spec)), samples or _samples(), work, seed=seed)


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
    monkeypatch.setattr(gradients, "LOGITS", 8 * 384)  # the head in eight rows at a time, four samples in one step
    monkeypatch.setattr(gradients, "draw", lambda probabilities, generator: next(given))
    folder = make_checkpoint(tmp_path / "model", family)
    ours = _all_taps(_walk(folder, tmp_path / "work"))
    theirs = _theirs(folder, _samples(), labels)
    assert ours.keys() == theirs.keys()
    for group, tap in ours.items():
        scale = theirs[group].abs().max()
        torch.testing.assert_close(tap.gradients / scale, theirs[group] / scale, rtol=1e-3, atol=1e-4)


def _kl_of_changed(folder: Path, samples: CalibrationSet, layer: int, error: torch.Tensor) -> float:
    """Mean KL over all tokens when `error` is added to a layer's down projection, from Transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    down = model.model.layers[layer].mlp.down_proj.weight
    with torch.no_grad():
        before = [model(torch.tensor([s.ids])).logits[0].log_softmax(-1) for s in samples.samples]
        down += error
        after = [model(torch.tensor([s.ids])).logits[0].log_softmax(-1) for s in samples.samples]
    divergences = [(p.exp() * (p - q)).sum(-1) for p, q in zip(before, after, strict=True)]
    return float(torch.cat(divergences).mean())


@pytest.mark.parametrize(("layer", "predict"), [(1, "token"), (0, "sample")])
def test_the_predicted_kl_is_the_measured_one_for_a_small_error(tmp_path, layer, predict):
    # The last layer's errors stay with their token; an earlier layer's add up over a sample.
    folder, samples = make_checkpoint(tmp_path / "model", "llama"), _samples((24,) * 8)
    error = torch.randn(128, 256, generator=torch.Generator().manual_seed(5)) * 1e-3
    predicted = []
    for seed in range(24):
        walk = _walk(folder, tmp_path / f"work-{seed}", samples, seed)
        for at in range(walk.begin() - 1, layer - 1, -1):
            taps = walk.taps(at, [f"layers.{at}.down"])
            walk.finish(at)
        changes = loss_changes(taps[f"layers.{layer}.down"], error)
        predicted.append(kl_by_token(changes) if predict == "token" else kl_by_sample(changes, [24] * 8))
    assert sum(predicted) / len(predicted) == pytest.approx(_kl_of_changed(folder, samples, layer, error), rel=0.2)


def test_labels_are_drawn_as_often_as_they_are_probable():
    probabilities = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).expand(20_000, 4)
    labels = draw(probabilities, torch.Generator().manual_seed(0))
    shares = torch.bincount(labels, minlength=4) / len(labels)
    torch.testing.assert_close(shares, probabilities[0], rtol=0, atol=0.02)
    assert shares[1] == 0


def test_a_part_of_the_samples_is_chosen_by_seed_in_order_and_cut():
    samples = _samples((600, 100, 30, 200, 50, 900)).samples
    chosen = choose(samples, 400, seed=1)
    assert chosen.samples == choose(samples, 400, seed=1).samples
    assert {choose(samples, 400, seed=s).samples for s in range(8)} != {chosen.samples}
    names = [sample.name for sample in chosen.samples]
    assert names == sorted(names)
    assert 400 <= chosen.tokens < 400 + STEP_TOKENS
    assert all(len(sample.ids) <= STEP_TOKENS for sample in choose(samples, 10_000, seed=1).samples)
    assert len(choose(samples, 10_000, seed=1).samples) == 6
    assert len(choose(samples, 1, seed=1).samples) == 1


@pytest.mark.parametrize(
    ("value", "where"), [(float("nan"), "embedding, sample s1"), (3e38, "gradients of the head, sample s1")]
)
def test_what_is_not_finite_is_named_with_layer_and_sample(tmp_path, value, where):
    from safetensors.torch import load_file, save_file

    folder, samples = make_checkpoint(tmp_path / "model", "llama"), _samples()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][samples.samples[1].ids[7]] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=where):
        _walk(folder, tmp_path / "work").begin()


def test_the_divergence_of_groups_quantized_alone_is_that_of_whole_models(tmp_path):
    folder, samples = make_checkpoint(tmp_path / "model", "llama"), _samples()
    source = open_source(str(folder))
    program, load = fuse(build_program(source.spec)), SourceWeights(source).tensor
    variants = [
        Alone("layers.1.down", "W4A16_G64"),
        Alone("layers.0.down", "W4A16_G32"),
        Alone("layers.0.down", "W8A16"),
    ]
    errors = []

    def rounding(weight, scheme):
        quantized = rtn(load(weight), SCHEMES[scheme], scale_dtype=np.dtype(np.float16))
        errors.append(weight_error(load(weight), quantized))
        return quantized

    class Killed(Exception):
        pass

    def kill_at_layer_1(done, what):
        if what == "layer 1":
            raise Killed

    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(Killed):
        kl_alone(source, program, samples, variants, rounding, work, kill_at_layer_1)
    assert len(errors) == 2
    ours = kl_alone(source, program, samples, variants, rounding, work)
    assert len(errors) == 3  # layer 0 was not run again
    of_variant = [errors[2], errors[0], errors[1]]
    theirs = [_kl_of_changed(folder, samples, v.layer, e) for v, e in zip(variants, of_variant, strict=True)]
    assert ours == pytest.approx(theirs, rel=0.02)
