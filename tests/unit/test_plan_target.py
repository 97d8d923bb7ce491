"""`plan --target` predicts every bucket's time on a card, for the recipe and for the same model in FP16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.build.plan import plan
from quantkit.cli.app import run
from quantkit.compile.cards import card_for
from quantkit.recipe.load import load_recipe
from tests.build_inputs import write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("llama"), "llama", recipe={"runtime": {"max_num_seqs": 3}})


def planned(recipe: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(["plan", str(recipe), "--out", str(recipe.parent / "out"), *options]) == 0
    return capsys.readouterr().out


def test_json_holds_card_assumptions_and_every_op_of_every_bucket(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = planned(recipe, capsys, "--target", "cuda:sm_90", "--card", "h200", "--context", "100", "--json")
    found = json.loads(text)["roofline"]
    assert found["card"] == {
        "name": "H200", "target": "sm_90", "bandwidth": 4.8e12, "fp16": 9.89e14, "int8": 1.979e15, "fp8": 1.979e15,
    }  # fmt: skip
    assert (found["context"], found["launch_seconds"], found["note"]) == (100, 2e-6, "")
    buckets = [(each["phase"], each["size"]) for each in found["buckets"]]
    assert buckets == [("decode", 1), ("decode", 2), ("decode", 3)] + [("prefill", n) for n in (128, 256, 512)]
    for bucket in found["buckets"]:
        for step in (bucket["recipe"], bucket["fp16"]):
            assert set(step) == {"seconds", "bytes", "operations", "ops"}
            assert {op["op"] for op in step["ops"]} == {
                "embedding", "rms_norm", "qkv", "qk_norm_rope_kv_write", "paged_attention", "o", "add_rms_norm",
                "gate_up", "gated_act", "down", "lm_head",
            }  # fmt: skip
            assert all(set(op) == {"op", "launches", "bytes", "operations", "seconds", "bound"} for op in step["ops"])
            assert step["seconds"] == pytest.approx(sum(op["seconds"] for op in step["ops"]))
        assert bucket["recipe"]["bytes"] < bucket["fp16"]["bytes"]
        assert bucket["recipe"]["operations"] == bucket["fp16"]["operations"]
        assert bucket["recipe"]["seconds"] < bucket["fp16"]["seconds"]


def test_without_a_target_nothing_is_predicted(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(planned(recipe, capsys, "--json"))["roofline"] is None
    assert "tokens/s" not in planned(recipe, capsys)


def test_groups_without_a_scheme_share_what_the_budget_leaves_and_it_is_said(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, on = load_recipe(recipe, ["quantization.budget_bits=6.5"]), card_for("cuda:sm_80")
    found = plan(loaded, recipe.parent / "out", on).roofline
    assert found is not None
    pinned, still = 128 * 128, 256 * 128 + 512 * 128 + 128 * 256  # o in 16 bits; qkv, gate_up and down
    assert found.open_groups == 6
    assert found.open_bits is not None
    assert 16 * pinned + found.open_bits * still == pytest.approx(6.5 * (pinned + still))
    bytes_of = {op.op: op.bytes for op in found.buckets[0].recipe.ops}
    expected = 2 * (256 * 128 * found.open_bits / 8 + 128 * 2 + 256 * 2)
    assert bytes_of["qkv"] == pytest.approx(expected, abs=2)
    text = planned(recipe, capsys, "--target", "cuda:sm_80", "--set", "quantization.budget_bits=6.5")
    assert f"6 groups have no scheme yet: each counts {found.open_bits:.2f} bits a weight" in text


def test_groups_never_count_more_than_their_widest_scheme(recipe: Path) -> None:
    sets = ["quantization.budget_bits=16", 'quantization.overrides=[{match: "*.qkv", scheme: W8A16}]']
    found = plan(load_recipe(recipe, sets), recipe.parent / "out", card_for("cuda:sm_80")).roofline
    assert found is not None
    assert found.open_bits == 16


def test_settled_schemes_count_as_they_are(recipe: Path) -> None:
    sets = ['quantization.overrides=[{match: "*", scheme: W4A16_G64}]', "quantization.budget_bits=5"]
    found = plan(load_recipe(recipe, sets), recipe.parent / "out", card_for("cuda:sm_89"), 64).roofline
    assert found is not None
    assert (found.open_groups, found.open_bits) == (0, None)
    first, ops = found.buckets[0], {op.op: op for op in found.buckets[0].recipe.ops}
    assert first.phase == "decode"
    assert ops["down"].bytes == 2 * (128 * 256 // 2 + 128 * 4 * 2 + 256 * 2 + 128 * 2)
    plain = {op.op: op for op in first.fp16.ops}
    assert plain["down"].bytes == 2 * (128 * 256 * 2 + 256 * 2 + 128 * 2)
    assert plain["paged_attention"].bytes - ops["paged_attention"].bytes == 2 * (64 * 128 - 2 * 64 * 4)


def test_the_text_names_card_assumptions_and_gain(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(recipe, capsys, "--target", "cuda:sm_86")
    found = plan(load_recipe(recipe, ()), recipe.parent / "out", card_for("cuda:sm_86")).roofline
    assert found is not None
    assert "RTX 3090 (sm_86): 936 GB/s; T operations/s: 71 in FP16, 284 in INT8" in text
    assert "2 us assumed to launch it" in text
    for phase, title in (("decode", "decode at 128 positions, sequences"), ("prefill", "prefill, tokens of prompts")):
        table = text[text.index(title) :].split("\n\n")[0].splitlines()
        assert [line.split("  ")[1] for line in table[-4:]] == ["together", "the same in FP16", "gain", "tokens/s"]
        buckets = [bucket for bucket in found.buckets if bucket.phase == phase]
        gains = [f"{bucket.fp16.seconds / bucket.recipe.seconds:.2f}" for bucket in buckets]
        assert table[-2].replace("gain", "").replace("x", "").split() == gains
        assert len(gains) == 3


def test_a_cache_that_no_kernel_of_the_target_reads_is_told(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no GPU kernel for a KV cache in FP8" in planned(
        recipe, capsys, "--target", "cuda:sm_80", "--set", "kv_cache.format=FP8"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--target", "cuda:sm_91"], "--target: unknown target 'cuda:sm_91'. Known: cuda:sm_80"),
        (["--target", "cuda:sm_90", "--card", "L4"], "--card: 'L4' is not a card of cuda:sm_90. Known: H100"),
        (["--card", "H200"], "--card: says nothing without a target. Add one, as in --target cuda:sm_90"),
        (["--context", "5"], "--context: says nothing without a target"),
        (["--target", "cuda:sm_90", "--context", "257"], "--context: 257 positions exceed the 256 of a sequence"),
        (["--target", "cuda:sm_90", "--context", "0"], "Invalid value for '--context'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    recipe: Path, options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), "--out", str(recipe.parent / "out"), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"quantkit: {line}")
    assert err.count("\n") == 1
