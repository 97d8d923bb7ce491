"""Statistics are those of the model as it runs: checked against Transformers' own activations and cache."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.calibration.dataset import CalibrationSet, Sample
from quantkit.calibration.statistics import Statistics, collect
from quantkit.errors import NumericsError
from quantkit.models import open_source
from quantkit.program import build_program, fuse
from tests.tiny import make_checkpoint

FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3")


def _samples(lengths=(5, 33, 1, 17)) -> CalibrationSet:
    generator = torch.Generator().manual_seed(0)
    made = [
        Sample(tuple(torch.randint(5, 350, (n,), generator=generator).tolist()), "en", "x", f"s{i}")
        for i, n in enumerate(lengths)
    ]
    return CalibrationSet(tuple(made), "sha256:0", {})


def _collect(folder: Path, samples=None, **options) -> Statistics:
    source = open_source(str(folder))
    return collect(source, fuse(build_program(source.spec)), samples or _samples(), **options)


def _theirs(folder: Path, samples: CalibrationSet):
    """Mean square inputs of each projection and maxima of the cache, from Transformers, a sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    squares: dict[str, list[torch.Tensor]] = {}
    names = {"q_proj": "qkv", "qkv_proj": "qkv", "o_proj": "o", "gate_proj": "gate_up", "gate_up_proj": "gate_up"}
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        group = {**names, "down_proj": "down"}.get(leaf)
        if group or path == "lm_head":
            key = f"layers.{path.split('.')[2]}.{group}" if group else "lm_head"
            module.register_forward_pre_hook(
                lambda _, inputs, key=key: squares.setdefault(key, []).append(inputs[0][0].square())
            )
    kv: dict[str, torch.Tensor] = {}
    for sample in samples.samples:
        with torch.no_grad():
            cache = model(torch.tensor([sample.ids]), use_cache=True).past_key_values
        for i, layer in enumerate(cache.layers):
            for side, value in (("k", layer.keys), ("v", layer.values)):
                greatest = value[0].abs().amax(1)
                kv[f"layers.{i}.{side}"] = torch.maximum(kv.get(f"layers.{i}.{side}", greatest), greatest)
    return {key: torch.cat(parts).mean(0) for key, parts in squares.items()}, kv


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_transformers(tmp_path, family):
    # One window over every sample: Transformers keeps only the window's keys, ours all of them.
    options = {"sliding_window": 64} if family == "gemma3_text" else {}
    folder = make_checkpoint(tmp_path, family, **options)
    ours = _collect(folder)
    input_sq, kv = _theirs(folder, _samples())
    assert ours.input_sq.keys() == input_sq.keys()
    assert ours.kv_range().keys() == kv.keys()
    for name, value in input_sq.items():
        torch.testing.assert_close(ours.input_sq[name], value, rtol=1e-3, atol=1e-5)
    for name, value in kv.items():
        torch.testing.assert_close(ours.kv_range()[name], value, rtol=1e-3, atol=1e-4)


def test_statistics_do_not_depend_on_how_samples_share_a_step(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "llama")
    together = _collect(folder)
    monkeypatch.setattr("quantkit.calibration.steps.STEP_TOKENS", 1)
    alone = _collect(folder)
    for name in together.input_sq:
        torch.testing.assert_close(together.input_sq[name], alone.input_sq[name], rtol=1e-5, atol=1e-6)
    for name in together.kv_tail:
        torch.testing.assert_close(together.kv_tail[name], alone.kv_tail[name], rtol=1e-5, atol=1e-6)


def test_spilled_boundaries_give_the_same_numbers(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "work").mkdir()
    spilled, held = _collect(folder, work=tmp_path / "work"), _collect(folder)
    assert all(torch.equal(spilled.input_sq[name], held.input_sq[name]) for name in held.input_sq)
    assert all(torch.equal(spilled.kv_tail[name], held.kv_tail[name]) for name in held.kv_tail)
    assert not list((tmp_path / "work").glob("*.f32"))


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("stop_before", [1, 2, 3])
def test_a_stopped_calibration_goes_on_from_the_last_whole_layer(tmp_path, stop_before):
    folder = make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "work").mkdir()
    seen: list[int] = []

    def stop(done: int, total: int, what: str) -> None:
        if done == stop_before:
            raise _Stopped

    with pytest.raises(_Stopped):
        _collect(folder, work=tmp_path / "work", progress=stop)
    resumed = _collect(folder, work=tmp_path / "work", progress=lambda done, total, what: seen.append(done))
    whole = _collect(folder)
    assert seen[0] == stop_before
    assert all(torch.equal(resumed.input_sq[name], whole.input_sq[name]) for name in whole.input_sq)
    assert all(torch.equal(resumed.kv_tail[name], whole.kv_tail[name]) for name in whole.kv_tail)


def test_statistics_survive_a_file(tmp_path):
    made = _collect(make_checkpoint(tmp_path / "model", "qwen2"))
    made.save(tmp_path / "statistics.safetensors")
    again = Statistics.load(tmp_path / "statistics.safetensors")
    assert again.input_sq.keys() == made.input_sq.keys()
    assert all(torch.equal(again.kv_tail[name], made.kv_tail[name]) for name in made.kv_tail)


def test_progress_names_every_slice(tmp_path):
    seen: list[tuple[int, int, str]] = []
    folder = make_checkpoint(tmp_path, "llama")
    _collect(folder, progress=lambda *step: seen.append(step))
    assert [what for _, _, what in seen] == ["embedding", "layer 0", "layer 1", "head", "done"]
    assert [done for done, _, _ in seen] == list(range(5))


def test_an_overflowing_layer_is_named_with_the_sample(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    samples = _samples()
    poisoned = samples.samples[1].ids[7]
    tensors["model.embed_tokens.weight"][poisoned] = 1e38
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"(layer|embedding|head).*sample s\d"):
        _collect(folder, samples)


def test_a_nan_in_one_sample_names_that_sample(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    samples = CalibrationSet(
        tuple(Sample(ids, "en", "x", name) for name, ids in (("good", (5, 6)), ("bad", (8, 9, 7)))), "sha256:0", {}
    )
    with pytest.raises(NumericsError, match="embedding, sample bad: an activation of token 2 is NaN"):
        _collect(folder, samples)


def test_a_percentile_is_that_of_all_written_positions(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "llama")
    exact = _collect(folder).kv_range()
    monkeypatch.setattr("quantkit.calibration.statistics.TAIL", 0.5)
    made = _collect(folder)
    tokens = _samples().tokens
    for name, tail in made.kv_tail.items():
        assert len(tail) == math.ceil(0.5 * tokens)
        assert torch.equal(made.kv_range()[name], exact[name])
        assert torch.equal(made.kv_range(75)[name], tail[int(0.25 / 0.5 * len(tail))])
        assert bool((tail[:-1] >= tail[1:]).all())
