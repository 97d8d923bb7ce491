from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit_kernels import cpu
from quantkit_kernels.cpu.library import ISA_BITS
from quantkit_kernels.cpu.threads import usable_threads
from quantkit_kernels.registry import CPU_OPS, can_implement
from tests.ops.native import TensorCalls


@pytest.mark.parametrize("op", CPU_OPS)
def test_every_op_of_a_program_has_a_native_kernel(op: str) -> None:
    assert can_implement(op, "cpu", bits=4, cache="INT8", num_heads=9, num_kv_heads=3) == (True, cpu.isa())


@pytest.mark.parametrize(
    ("op", "device", "facts", "reason"),
    [
        ("convolution", "cpu", {}, "op 'convolution'"),
        ("linear", "cpu", {"bits": 3}, "bits 3"),
        ("gated_act", "cpu", {"activation": "relu"}, "activation 'relu'"),
        ("paged_attention", "cpu", {"cache": "FP7"}, "KV cache format 'FP7'"),
        ("paged_attention", "cpu", {"num_heads": 9, "num_kv_heads": 2}, "9 query heads"),
        ("linear", "cuda", {}, "device 'cuda'"),
    ],
)
def test_what_has_no_kernel_is_refused_with_the_reason(op: str, device: str, facts: dict, reason: str) -> None:
    able, why = can_implement(op, device, **facts)
    assert not able
    assert reason in why


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CPU_ISA", "portable")
    assert cpu.isa() == "portable"
    assert cpu.CallList(threads=1).isa == "portable"
    monkeypatch.setenv("QUANTKIT_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match="mmx is unknown; this machine runs"):
        cpu.isa()


def test_without_a_library_the_reason_says_how_to_build_it() -> None:
    code = "from quantkit_kernels import cpu, registry; print(cpu.available(), registry.can_implement('add', 'cpu'))"
    environment = {**os.environ, "QUANTKIT_CPU_LIBRARY": "/nonexistent.so", "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert shown.stdout.count("(False, ") == 2
    assert "is not built" in shown.stdout


def test_threads_follow_the_cgroup_quota(tmp_path: Path) -> None:
    everything = usable_threads(tmp_path)
    assert everything == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_threads(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_threads(tmp_path) == everything


def test_a_list_can_grow_after_it_has_run() -> None:
    x = torch.ones(2, 8)
    calls = TensorCalls(threads=2)
    calls.add(x, x, x)
    calls.run(2, 0, 0)
    calls.add(x, x, x)
    calls.run(1, 0, 0)
    assert x.tolist() == [[8.0] * 8, [2.0] * 8]


def test_two_python_threads_may_run_lists_of_one_team() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def count(_: int) -> float:
        x, one = torch.zeros(64, 256), torch.ones(64, 256)
        calls = TensorCalls(threads=2)
        calls.add(x, one, x)
        for _step in range(200):
            calls.run(64, 0, 0)
        return x.min().item() if x.min() == x.max() else -1.0

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(count, range(2))) == [200.0, 200.0]


def test_a_forked_child_gets_threads_of_its_own() -> None:
    x = torch.ones(64, 1024)
    calls = TensorCalls(threads=2)
    calls.add(x, x, x)
    calls.run(64, 0, 0)
    child = os.fork()
    if child == 0:
        calls.run(64, 0, 0)
        os._exit(0 if (x.numpy() == 4.0).all() else 1)  # no torch here: its OpenMP does not survive a fork
    assert os.waitpid(child, 0)[1] == 0


def test_python_and_the_library_name_instruction_sets_by_the_same_bits() -> None:
    header = Path(cpu.__file__).with_name("src") / "isa.h"
    found = re.findall(r"kIsa(\w+) = (\d+)", header.read_text())
    names = {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): int(bit) for name, bit in found}
    assert names == ISA_BITS
