"""Kernels for GPUs that are not there: the right target, the same bytes each time, nothing compiled twice."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.compile.aot import specialisation
from quantkit.compile.buckets import CLASSES
from quantkit.compile.cache import read_kernel
from quantkit.compile.crew import Job, compile_all
from quantkit.compile.emit import Emitted, choose, emit
from quantkit.compile.places import places
from quantkit.errors import PreflightError
from quantkit.models import open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.program.ir import Program
from quantkit_kernels.cuda.elf import defines
from quantkit_kernels.cuda.kernel import LaunchPlan
from quantkit_kernels.cuda.source import source_digest
from quantkit_kernels.triton import kernels
from tests.tiny import make_checkpoint

TARGETS = ("sm_80", "sm_90")
DECODE = (CLASSES["decode"],)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    source = open_source(str(make_checkpoint(tmp_path_factory.mktemp("source"), "qwen3", dtype="bfloat16")))
    fused = fuse(build_program(source.spec))
    schemes = dict.fromkeys(fused.groups(), "W4A16_G32_ASYM") | {"layers.0.o": "FP16", "lm_head": "W8A16"}
    return lower_precision(fused, schemes, "INT8")


@pytest.fixture(scope="module")
def few(program: Program) -> Program:
    """Only what three kernels serve, and one node that none does."""
    kept = [node for node in program.nodes if node.name in ("layers.0.qkv", "layers.1.qkv", "layers.0.o", "logits")]
    return program.with_(nodes=tuple(kept))


def emitted(program: Program, folder: Path, cache: Path, targets: tuple[str, ...] = TARGETS) -> Emitted:
    return emit(program, targets, DECODE, folder, cache=cache, workers=2, step=lambda *_: None)


@pytest.fixture(scope="module")
def first(few: Program, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Emitted]:
    """(kernels, cache, what was done) of an emission for two targets from nothing."""
    base = tmp_path_factory.mktemp("first")
    return base / "kernels", base / "cache", emitted(few, base / "kernels", base / "cache")


@pytest.mark.parametrize(
    ("form", "target", "said"),
    [
        ("FP8", "sm_86", "a cache in FP8 has kernels from sm_89 on; one in INT8 has them everywhere"),
        ("FP8", "sm_89", None),
        ("INT4", "sm_80", None),
        ("FP32", "sm_90", "no kernel for a cache in FP32: INT8, FP8, INT4, FP16, BF16 have"),
    ],
)
@pytest.mark.parametrize("bucket_class", ["decode", "prefill"])
def test_a_cache_that_no_kernel_reads_leaves_its_nodes_without_kernels_for_a_reason(
    program: Program, form: str, target: str, said: str | None, bucket_class: str
) -> None:
    lowered, specs = lower_precision(program, {}, form), tuple(kernels().values())
    missing = {
        place.facts["op"]: chosen
        for place in places(lowered, target, CLASSES[bucket_class])
        if isinstance(chosen := choose(place, specs), str) and "cache" in chosen
    }
    assert missing == ({} if said is None else dict.fromkeys(("qk_norm_rope_kv_write", "paged_attention"), said))


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")}


def load(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return body


def test_two_targets_get_code_of_their_own_whose_ptx_names_them(first: tuple[Path, Path, Emitted]) -> None:
    folder, _, made = first
    assert made == Emitted({"sm_80": 3, "sm_90": 3}, compiled=6)
    for target, named in (("sm_80", "sm_80"), ("sm_90", "sm_90a")):
        for ptx in (folder / target).glob("*.ptx"):
            assert re.search(rf"^\.target {named}$", ptx.read_text(), re.MULTILINE), f"{ptx} is for another target"
    cubins = [path.read_bytes() for path in folder.rglob("*.cubin")]
    assert len(set(cubins)) == len(cubins) == 6


def test_nodes_that_share_a_specialisation_share_a_kernel_and_the_rest_have_a_reason(
    first: tuple[Path, Path, Emitted],
) -> None:
    index = load(first[0] / "sm_80/index.json")
    launched = index["launches"]["decode"]
    assert launched["layers.0.qkv"] == launched["layers.1.qkv"]
    linears = {"linear_w4a16_few", "linear_w8a16_few"}
    assert {name.rpartition("-")[0] for name in index["kernels"]} == {"embedding", *linears}
    assert [name.rpartition("-")[0] for name in launched["logits"]] == ["embedding", "linear_w8a16_few"]
    assert index["missing"] == {"decode": {"layers.0.o": "no kernel for 16-bit weights and fp16 activations"}}


def test_the_metadata_states_every_argument_that_the_code_takes(first: tuple[Path, Path, Emitted]) -> None:
    described = sorted((first[0] / "sm_90").glob("linear_w4*.json"))
    body = load(described[0])
    names = [argument["name"] for argument in body["arguments"]]
    assert names == ["x", "words", "scale", "zero", "out", "rows", "n", "k", "global_scratch", "profile_scratch"]
    entry = re.search(r"\.entry (\w+)\((.*?)\)", described[0].with_suffix(".ptx").read_text(), re.DOTALL)
    assert entry is not None
    assert entry[1] == body["symbol"]
    sizes = [64 if argument["type"].startswith("*") else 32 for argument in body["arguments"]]
    assert [int(size) for size in re.findall(r"\.param \.u(\d+)", entry[2])] == sizes
    aligned = {argument["name"] for argument in body["arguments"] if argument["divisible_by"] == 16}
    assert {"x", "words", "out"} <= aligned
    assert "rows" not in aligned, "a kernel specialised for 16 rows would be wrong for 5"
    assert body["spill_bytes"] == 0 < body["registers"]
    plan = LaunchPlan.from_metadata(body)
    assert plan.known_convention
    assert plan.refusal is None
    assert plan.source == source_digest("quantkit_kernels.triton.linear_w4a16")
    assert defines(described[0].with_suffix(".cubin").read_bytes(), plan.symbol)


def test_a_number_that_was_compiled_in_is_stated_and_not_passed(tmp_path: Path) -> None:
    facts = {"op": "linear", "rows": "few", "dtype": "fp16", "bits": 8, "group_size": 0, "symmetric": True}
    job = Job("0" * 64, "quantkit_kernels.triton.linear_w8a16", "linear_w8a16_few",
              {**facts, "sm": 80, "bias": False, "scale": "fp16", "n": 1, "k": 128})  # fmt: skip
    compile_all({"sm_80": [job]}, tmp_path, 1, lambda *_: None)
    plan = LaunchPlan.from_metadata(load(tmp_path / job.key / "kernel.json"))
    assert plan.folded == {"n": 1}
    assert "n" not in [argument.name for argument in plan.arguments]


def test_emission_gives_the_same_bytes_again_wherever_the_checkout_lies(
    few: Program, first: tuple[Path, Path, Emitted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "elsewhere"
    root = Path(__file__).resolve().parents[2]
    for package in ("quantkit", "kernels/quantkit_kernels"):
        ignored = shutil.ignore_patterns("__pycache__", "*.cpp", "*.so")
        shutil.copytree(root / package, moved / Path(package).name, ignore=ignored)
    monkeypatch.setattr(sys, "path", [str(moved), *sys.path])  # workers import from there
    again = emitted(few, tmp_path / "kernels", tmp_path / "cache", ("sm_90",))
    assert again.compiled == 3
    ours = {name: digest for name, digest in digests(first[0]).items() if name.startswith("sm_90")}
    assert digests(tmp_path / "kernels") == ours
    assert not any(str(root).encode() in path.read_bytes() for path in first[0].rglob("*.*"))


def test_a_second_emission_compiles_nothing_and_a_damaged_kernel_anew(
    few: Program, first: tuple[Path, Path, Emitted], tmp_path: Path
) -> None:
    folder, cache, _ = first
    assert emitted(few, tmp_path / "kernels", cache).compiled == 0
    assert digests(tmp_path / "kernels") == digests(folder)
    copy = Path(shutil.copytree(cache, tmp_path / "cache"))
    damaged = min(copy.rglob("kernel.cubin"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    target = load(damaged.with_name("kernel.json"))["target"]
    assert read_kernel(copy, damaged.parent.name) is None
    assert emitted(few, tmp_path / "mended", copy, (target,)).compiled == 1
    assert digests(tmp_path / "mended" / target) == digests(folder / target)


def test_a_kernel_that_does_not_compile_is_one_line_that_names_its_target(tmp_path: Path) -> None:
    facts = {"op": "linear", "rows": "few", "dtype": "fp16", "bits": 8, "group_size": 0, "symmetric": True}
    wrong = {**facts, "bias": False, "scale": "fp16", "n": 64, "k": "sixty-four"}
    job = Job("0" * 64, "quantkit_kernels.triton.linear_w8a16", "linear_w8a16_few", wrong)
    with pytest.raises(PreflightError, match=r"^sm_80: compiling failed: ValueError"):
        compile_all({"sm_80": [job]}, tmp_path, 1, lambda *_: None)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_head_gathers_its_rows_multiplies_them_and_caps_what_its_model_caps(
    program: Program, softcap: float | None
) -> None:
    nodes = [replace(n, attrs={**n.attrs, "softcap": softcap}) if n.op == "logits" else n for n in program.nodes]
    head = [p for p in places(program.with_(nodes=tuple(nodes)), "sm_90", CLASSES["decode"]) if p.node == "logits"]
    assert [place.facts["op"] for place in head] == ["embedding", "linear", *(["softcap"] if softcap else [])]
    assert head[0].facts["width"] == head[1].facts["k"] == program.hidden_size
    assert not softcap or (head[-1].facts["width"], head[-1].facts["softcap"]) == (program.vocab_size, softcap)
    assert not any(isinstance(choose(place, tuple(kernels().values())), str) for place in head)


def test_every_node_of_every_class_is_served_or_has_a_reason(program: Program) -> None:
    specs = tuple(kernels().values())
    served: dict[str, set[str]] = {name: set() for name in CLASSES}
    for bucket_class in CLASSES.values():
        for place in places(program, "sm_80", bucket_class):
            chosen = choose(place, specs)
            if isinstance(chosen, str):
                assert chosen, place.node
            else:
                served[bucket_class.name] |= {spec.name for spec in chosen}
                assert all(specialisation(spec, place.facts) for spec in chosen)
    assert {"linear_w4a16_few", "linear_w8a16_few", "add_rms_norm", "qk_norm_rope_kv_write"} <= served["decode"]
    assert "embedding" in served["decode"] & served["decode-wide"] & served["prefill"]
    assert {"paged_attention", "paged_attention_reduce"} <= served["decode-wide"]
    assert "linear_w4a16_few" not in served["decode-wide"] | served["prefill"]
    assert "paged_attention" not in served["prefill"], "it serves one token a sequence"
    assert "paged_prefill" in served["prefill"] - served["decode"]
