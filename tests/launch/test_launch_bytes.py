"""Our launcher hands the driver the bytes that Triton's own launcher does: type by type, and for whole signatures."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit_kernels.cuda.arguments import SCRATCH, TRITON, Argument, Arguments
from tests.launch.launcher_bytes import SIZES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = sorted(HERE.glob("triton_*.jsonl"))
"""What `launcher_bytes.py` printed under releases that are not installed here."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Launches of the installed Triton's compiled launcher and of ours, through a stand-in for libcuda."""
    folder = tmp_path_factory.mktemp("libcuda")
    library, source = folder / "libcuda.so.1", HERE / "fake_libcuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    environment = {
        **os.environ, "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.launch.launcher_bytes"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()][1:]


def test_every_launch_is_the_one_of_the_installed_triton(live: list[dict[str, Any]]) -> None:
    assert len(live) > 80
    for case in live:
        if "refused" in case["triton"]:
            assert "i8" in case["types"], case
            continue
        assert case["ours"] == case["triton"], case["types"]
        assert case["ours"]["function"] == 0xF00D


def test_releases_that_are_not_installed_were_recorded_with_the_same_bytes(live: list[dict[str, Any]]) -> None:
    assert {path.stem for path in RECORDED} == {"triton_3.6.0", "triton_3.7.1"}
    for path in RECORDED:
        release, *cases = map(json.loads, path.read_text().splitlines())
        assert TRITON[0] <= tuple(map(int, release["release"].split(".")[:2])) <= TRITON[1]
        refused = 0
        for case, known in zip(cases, live, strict=True):
            assert (case["types"], case["values"]) == (known["types"], known["values"])
            if "refused" in case["triton"]:
                refused += 1
                assert case["types"] == ["i8"], case
                continue
            assert known["ours"] == case["triton"], (path.name, case["types"])
        assert refused <= 2


def test_every_argument_lies_in_memory_of_its_own_aligned_to_its_size() -> None:
    types = [*SIZES, "fp32", "i8", "*fp16"]
    held = Arguments([Argument(f"a{i}", type_) for i, type_ in enumerate(types)])
    addresses = list(held.addresses)
    assert all(address % 8 == 0 for address in addresses)
    assert [b - a for a, b in itertools.pairwise(addresses)] == [8] * (len(types) - 1)


def test_an_argument_set_again_leaves_no_bytes_of_the_last_one() -> None:
    held = Arguments([Argument("a", "i8"), Argument("p", "*i8")])
    held.set("a", -1)
    held.set("a", 1)
    held.set("p", None)
    assert ctypes.string_at(held.addresses[0], 16) == b"\1" + bytes(15)


@pytest.mark.parametrize(
    ("type_", "divisible", "value", "told"),
    [
        ("i32", 1, 2**31, "which 32 bits do not hold"),
        ("i32", 1, -(2**31) - 1, "which 32 bits do not hold"),
        ("u8", 1, -1, "which 8 bits do not hold"),
        ("*i8", 1, -16, "which 64 bits do not hold"),
        ("i32", 1, 1.5, "must be an integer"),
        ("fp32", 1, "1", "must be a number"),
        ("fp32", 1, True, "must be a number"),
        ("i32", 16, 40, "made for multiples of 16"),
        ("*fp16", 16, 0x7F00_0008, "made for multiples of 16"),
    ],
)
def test_a_value_that_the_code_would_misread_is_refused(type_: str, divisible: int, value: Any, told: str) -> None:
    held = Arguments([Argument("a", type_, divisible)])
    with pytest.raises(ValueError, match=told):
        held.set("a", value)
    assert held.unset == {"a"}


def test_scratch_pointers_are_null_and_need_no_value() -> None:
    held = Arguments([Argument("rows", "i32"), *(Argument(name, "*i8") for name in SCRATCH)])
    held.set("rows", 3)
    assert not held.unset
    with pytest.raises(ValueError, match="there is no argument n"):
        held.set("n", 1)


@pytest.mark.parametrize("type_", ["tensordesc<fp16>", "fp16", "bf16", "", "constexpr"])
def test_a_type_that_no_launch_passes_is_refused(type_: str) -> None:
    with pytest.raises(ValueError, match="cannot pass an argument of type"):
        Arguments([Argument("a", type_)])
