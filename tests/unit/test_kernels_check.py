"""`quantkit kernels check` passes what a build wrote and names, in one line, whatever a launch would stumble over."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quantkit.artifact.kernels import StoredKernels
from quantkit.artifact.manifest import Manifest
from quantkit.artifact.read import open_artifact
from quantkit.artifact.write import write_payload
from quantkit.cli.app import app, run
from quantkit.compile.buckets import CLASSES, plan_buckets
from quantkit.compile.emit import emit
from quantkit.models import open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.quantize.weights import RtnWeights
from tests.tiny import make_checkpoint
from tests.unit.test_artifact_kernels import edit, reseal

KERNELS = "quantkit/kernels/sm_90"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose kernels for decode were compiled for sm_90."""
    base = tmp_path_factory.mktemp("check")
    source = open_source(str(make_checkpoint(base / "source", "llama", dtype="float16")))
    fused = fuse(build_program(source.spec))
    program = lower_precision(fused, dict.fromkeys(fused.groups(), "W8A16"), "INT8")
    compiled = base / "compiled"
    emit(program, ["sm_90"], [CLASSES["decode"]], compiled / "kernels", cache=base / "cache", workers=2,
         step=lambda *_: None)  # fmt: skip
    (compiled / "buckets.json").write_text(json.dumps(plan_buckets(8, 256).to_json()))
    provider = RtnWeights(source, kv_scales={w.name: np.ones(w.shape, np.float32) for w in program.weights.values()})
    weights = ((weight, provider.load(weight)) for weight in program.weights.values())
    manifest = Manifest("0.1.0", {"family": "llama"}, {"version": 1}, {}, "INT8")
    write_payload(
        base / "artifact", source=source, program=program, weights=weights, manifest=manifest, compiled=compiled
    )
    return base / "artifact"


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "artifact"))


def kernel(folder: Path, kind: str = "gated_act") -> Path:
    return next((folder / KERNELS).glob(f"{kind}-*.json"))


def replace_file(folder: Path, suffix: str, data: bytes) -> None:
    """What an attacker does: other content, with the digest to match."""
    path = kernel(folder).with_suffix(f".{suffix}")
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    edit(kernel(folder), lambda body: body["sha256"].update({suffix: digest}))


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a check that fails."""
    reseal(folder)
    assert run(["kernels", "check", str(folder)]) == 3
    told = capsys.readouterr()
    assert not told.out
    (line,) = told.err.splitlines()
    return line


def test_what_a_build_wrote_is_sound(pristine: Path) -> None:
    told = CliRunner().invoke(app, ["kernels", "check", str(pristine)])
    assert told.exit_code == 0
    opened = open_artifact(pristine)
    count, places = len(list((pristine / KERNELS).glob("*.cubin"))), len(opened.program.nodes)
    (line,) = told.stdout.splitlines()
    assert line.startswith(f"sm_90: {count} kernels sound, serving ")
    (data,) = json.loads(CliRunner().invoke(app, ["kernels", "check", str(pristine), "--json"]).stdout)
    assert data["nodes"] + data["unserved"] == places
    assert data["refused"] == {}
    stored = StoredKernels.of(opened, "sm_90")
    assert stored is not None
    assert stored.listed.launches["decode"]["layers.0.qkv"] == stored.listed.launches["decode"]["layers.1.qkv"]
    assert StoredKernels.of(opened, "sm_80") is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda b: b["arguments"].insert(0, {"name": "k", "type": "i32", "divisible_by": 1}), "PTX takes parameters"),
        (lambda b: b["arguments"][0].update(type="i32"), "PTX takes parameters"),
        (lambda b: b["arguments"].pop(), "end with global_scratch"),
        (lambda b: b.update(symbol="main"), "holds no kernel main"),
        (lambda b: b.update(num_warps=8), "for 128 threads and its description for 256"),
        (lambda b: b.update(shared_bytes=300000), "takes 300000 bytes of shared memory, and sm_90 has 232448"),
        (lambda b: b.update(registers=256), "takes 256 registers a thread"),
        (lambda b: b.pop("folded"), "folded must be numbers"),
        (lambda b: b.update(versions={"ptxas": "1"}), "Triton that compiled it"),
    ],
)
def test_a_description_that_the_code_does_not_have_is_refused(
    artifact: Path, capsys: pytest.CaptureFixture[str], change: Any, told: str
) -> None:
    edit(kernel(artifact), change)
    line = checked(artifact, capsys)
    assert told in line
    assert kernel(artifact).stem in line


def test_registers_count_by_the_block(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def wide(body: dict[str, Any]) -> None:
        body.update(registers=255, num_warps=16)

    path = kernel(artifact)
    ptx = path.with_suffix(".ptx").read_text().replace(".reqntid 128", ".reqntid 512")
    edit(path, wide)
    replace_file(artifact, "ptx", ptx.encode())
    assert "takes 130560 registers a block, and sm_90 has 65536" in checked(artifact, capsys)


def test_code_for_another_target_is_refused(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cubin = bytearray(kernel(artifact).with_suffix(".cubin").read_bytes())
    cubin[48:52] = struct.pack("<I", 0x500550 if cubin[7] == 51 else 0x6005004)
    replace_file(artifact, "cubin", bytes(cubin))
    assert "the machine code is for sm_80" in checked(artifact, capsys)


def test_ptx_of_the_family_without_its_features_is_refused(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptx = kernel(artifact).with_suffix(".ptx").read_bytes()
    replace_file(artifact, "ptx", ptx.replace(b".target sm_90a", b".target sm_90"))
    assert "is not for sm_90a" in checked(artifact, capsys)


def test_a_place_that_the_index_forgets_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(artifact / KERNELS / "index.json", lambda body: body["launches"]["decode"].pop("layers.0.qkv"))
    assert "decode: node 'layers.0.qkv' is listed wrongly or not at all" in checked(artifact, capsys)


def test_a_bucket_class_that_does_not_exist_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(artifact / KERNELS / "index.json", lambda body: body["missing"].update({"../x": {}}))
    assert "'../x' is no bucket class" in checked(artifact, capsys)


def test_a_missing_file_is_named_by_opening(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel(artifact).with_suffix(".cubin").unlink()
    assert run(["kernels", "check", str(artifact)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "gated_act" in line
    assert "lists other kernels" in checked(artifact, capsys)


def test_no_truncated_or_garbled_file_does_more_than_one_line(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(5)
    folder = Path(shutil.copytree(pristine, tmp_path / "artifact"))
    described = kernel(folder).read_text()
    for suffix in ("cubin", "ptx", "json"):
        path = kernel(folder).with_suffix(f".{suffix}")
        whole = path.read_bytes()
        for cut in [0, 1, 63, 64, len(whole) // 2, *(chance.randrange(len(whole) * 9 // 10) for _ in range(3))]:
            if suffix == "json":
                path.write_bytes(whole[:cut])
            else:
                replace_file(folder, suffix, whole[:cut])
            line = checked(folder, capsys)
            assert "internal error" not in line, (suffix, cut, line)
            assert len(line) < 1100
        path.write_bytes(whole)
        kernel(folder).write_text(described)


def test_headers_that_point_anywhere_never_escape_as_another_error(pristine: Path) -> None:
    from quantkit_kernels.cuda.elf import check_elf

    chance = random.Random(7)
    whole = kernel(pristine).with_suffix(".cubin").read_bytes()
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.choice([chance.randrange(64), chance.randrange(len(data))])
            data[at] = chance.randrange(256)
        try:
            assert check_elf(bytes(data[: chance.choice([len(data), chance.randrange(len(data))])]))
        except ValueError:
            continue
