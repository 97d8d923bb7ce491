"""Kernels in an artifact are listed, and refused for every way they can be other than what the build sealed."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quantkit.artifact.files import digest_file
from quantkit.artifact.kernels import read_buckets, read_kernels
from quantkit.artifact.manifest import Manifest, manifest_bytes
from quantkit.artifact.read import open_artifact
from quantkit.artifact.verify import verify
from quantkit.artifact.write import write_payload
from quantkit.cli.app import app
from quantkit.compile.buckets import plan_buckets
from quantkit.errors import CheckpointError
from quantkit.models import open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.quantize.weights import RtnWeights
from tests.tiny import make_checkpoint

NAME = "linear_w4a16_few-0123456789abcdef"
KERNELS = "quantkit/kernels/sm_90"


def write_kernel(folder: Path, name: str = NAME, target: str = "sm_90") -> None:
    """A kernel's three files, with machine code that is an ELF header for CUDA."""
    folder.mkdir(parents=True, exist_ok=True)
    cubin = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 190) + bytes(44)
    ptx = f".version 8.7\n.target {target}a\n.address_size 64\n".encode()
    body = {
        "kernel": name.rpartition("-")[0], "target": target, "num_warps": 4, "registers": 60, "spill_bytes": 0,
        "shared_bytes": 18432, "versions": {"triton": "3.9.0", "ptxas": "13.4"},
        "sha256": {kind: hashlib.sha256(data).hexdigest() for kind, data in (("cubin", cubin), ("ptx", ptx))},
    }  # fmt: skip
    (folder / f"{name}.cubin").write_bytes(cubin)
    (folder / f"{name}.ptx").write_bytes(ptx)
    (folder / f"{name}.json").write_text(json.dumps(body))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("kernels")
    source = open_source(str(make_checkpoint(base / "source", "llama", dtype="float16")))
    fused = fuse(build_program(source.spec))
    program = lower_precision(fused, dict.fromkeys(fused.groups(), "W8A16"), "FP16")
    compiled = base / "compiled"
    write_kernel(compiled / "kernels/sm_90")
    index = {
        "version": 1, "target": "sm_90", "kernels": [NAME], "launches": {"decode": {"layers.0.qkv": [NAME]}},
        "missing": {"decode": {"embed": "no Triton kernel"}},
    }  # fmt: skip
    (compiled / "kernels/sm_90/index.json").write_text(json.dumps(index))
    (compiled / "buckets.json").write_text(json.dumps(plan_buckets(8, 256).to_json()))
    (compiled / "stage.json").write_text("{}")
    provider = RtnWeights(source, kv_scales={w.name: np.ones(w.shape, np.float32) for w in program.weights.values()})
    weights = ((weight, provider.load(weight)) for weight in program.weights.values())
    manifest = Manifest("0.1.0", {"family": "llama"}, {"version": 1}, {}, "FP16")
    write_payload(
        base / "artifact", source=source, program=program, weights=weights, manifest=manifest, compiled=compiled
    )
    return base / "artifact"


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "artifact"))


def reseal(folder: Path) -> None:
    """What an attacker does: list the payload as it now is, digests and all."""
    body = json.loads((folder / "quantkit/manifest.json").read_bytes())
    body.pop("payload_digest")
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
    sealed = Manifest(**(body | {"files": {}})).with_files({name: digest_file(folder / name) for name in names})
    (folder / "quantkit/manifest.json").write_bytes(manifest_bytes(sealed))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def test_buckets_and_kernels_are_sealed_in_the_payload_and_verified(pristine: Path) -> None:
    opened = open_artifact(pristine)
    files = {f"{KERNELS}/{NAME}.{kind}" for kind in ("cubin", "ptx", "json")} | {f"{KERNELS}/index.json"}
    assert {name for name in opened.manifest.files if name.startswith("quantkit/kernels")} == files
    assert not (pristine / "quantkit/stage.json").exists()
    assert verify(pristine).payload_digest == opened.payload_digest
    buckets = read_buckets(opened)
    assert buckets is not None
    assert buckets["decode"] == [1, 2, 4, 8]
    (target,) = read_kernels(opened)
    (kernel,) = target.kernels
    assert (kernel.kernel, kernel.classes, kernel.registers, kernel.size) == ("linear_w4a16_few", ("decode",), 60, 64)


def test_a_flipped_bit_of_machine_code_is_named(artifact: Path) -> None:
    path = artifact / f"{KERNELS}/{NAME}.cubin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=rf"{NAME}.cubin: was changed"):
        open_artifact(artifact)
    reseal(artifact)
    with pytest.raises(CheckpointError, match=rf"{NAME}.cubin: is not the file that its description names"):
        verify(artifact)


@pytest.mark.parametrize(
    "name",
    [
        "quantkit/kernels/sm_90/run.sh",
        "quantkit/kernels/sm_90/deeper/index.json",
        "quantkit/kernels/index.json",
        "quantkit/kernels/sm_90/Linear-0123456789abcdef.cubin",
        "quantkit/kernels/sm_90/linear-0123456789abcdef.so",
        "quantkit/kernels/sm_9x/index.json",
        "quantkit/kernels/..hidden/index.json",
        "quantkit/other.json",
    ],
)
def test_a_file_of_another_name_is_refused_even_when_listed(artifact: Path, name: str) -> None:
    (artifact / name).parent.mkdir(parents=True, exist_ok=True)
    (artifact / name).write_bytes(b"{}")
    reseal(artifact)
    with pytest.raises(CheckpointError, match=rf"{name}: is no file that an artifact holds there"):
        open_artifact(artifact, check="sizes")


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("index", lambda b: b.update(version=2), "no index of version 1 for sm_90"),
        ("index", lambda b: b.update(target="sm_80"), "no index of version 1 for sm_90"),
        ("index", lambda b: b.update(kernels=[NAME, "../../../config"]), "lists other kernels"),
        ("index", lambda b: b.update(kernels=[[NAME]]), "no index of version 1"),
        ("index", lambda b: b.update(kernels=[]), "lists other kernels"),
        ("index", lambda b: b.update(launches=[]), "not of the form"),
        ("index", lambda b: b["launches"].update(decode={"layers.9.qkv": [NAME]}), "'layers.9.qkv' launches"),
        ("index", lambda b: b["launches"].update(decode={"layers.0.qkv": ["/bin/sh"]}), "launches what is not there"),
        ("index", lambda b: b["launches"].update(decode={"layers.0.qkv": [{}]}), "launches what is not there"),
        (NAME, lambda b: b.update(target="sm_80"), "another kernel or target"),
        (NAME, lambda b: b.update(kernel="gated_act"), "another kernel or target"),
        (NAME, lambda b: b.update(registers="many"), "registers"),
        (NAME, lambda b: b.update(spill_bytes=-1), "spill_bytes"),
        (NAME, lambda b: b.update(sha256={}), "is not the file that its description names"),
        (NAME, lambda b: b.pop("versions"), "not of the form"),
    ],
)  # fmt: skip
def test_a_forged_description_is_refused(artifact: Path, name: str, change: Any, told: str) -> None:
    edit(artifact / f"{KERNELS}/{name}.json", change)
    reseal(artifact)
    with pytest.raises(CheckpointError, match=told):
        verify(artifact)


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("cubin", b"#!/bin/sh\n" + bytes(20), "is no CUDA machine code"),
        ("cubin", b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 62), "is no CUDA machine code"),
        ("ptx", b".version 8.7\n.target sm_80\n", "is not for sm_90"),
        ("ptx", b"", "is not for sm_90"),
    ],
)
def test_code_for_another_machine_is_refused_though_its_digest_fits(
    artifact: Path, kind: str, content: bytes, told: str
) -> None:
    (artifact / f"{KERNELS}/{NAME}.{kind}").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    edit(artifact / f"{KERNELS}/{NAME}.json", lambda body: body["sha256"].update({kind: digest}))
    reseal(artifact)
    with pytest.raises(CheckpointError, match=told):
        verify(artifact)


@pytest.mark.parametrize(
    ("buckets", "told"),
    [
        ({"version": 2}, "version 2 is not 1"),
        ({"version": 1, "decode": [], "prefill": [1]}, "decode buckets must be positive"),
        ({"version": 1, "decode": [4, 2], "prefill": [1]}, "decode buckets must ascend"),
        ({"version": 1, "decode": [1], "prefill": [True]}, "prefill buckets must be positive"),
        ([], "not of the form"),
    ],
)
def test_a_forged_bucket_plan_is_refused(artifact: Path, buckets: Any, told: str) -> None:
    (artifact / "quantkit/buckets.json").write_text(json.dumps(buckets))
    reseal(artifact)
    with pytest.raises(CheckpointError, match=told):
        verify(artifact)


def test_kernels_list_prints_kernel_target_and_bucket_class(pristine: Path) -> None:
    told = CliRunner().invoke(app, ["kernels", "list", str(pristine)])
    assert told.exit_code == 0
    lines = told.stdout.splitlines()
    assert lines[0].split() == ["target", "kernel", "buckets", "registers", "spills", "shared", "warps", "cubin"]
    assert lines[1].split() == ["sm_90", NAME, "decode", "60", "0", "18,432", "4", "64"]
    assert "sm_90: embed × 1 (decode): no Triton kernel" in lines
    assert lines[-1] == "buckets: decode 1, 2, 4, 8 · prefill 128, 256 (from the limits)"
    data = json.loads(CliRunner().invoke(app, ["kernels", "list", str(pristine), "--json"]).stdout)
    (kernel,) = data["targets"]["sm_90"]["kernels"]
    assert kernel["shared_bytes"] == 18432
    assert data["buckets"]["prefill"] == [128, 256]
