"""Fresh random inputs each run (the seed is printed on failure) and every instruction set this machine can run."""

from __future__ import annotations

import os

import pytest
import torch

from quantkit_kernels import cpu


def pytest_report_header() -> str:
    available, note = cpu.available()
    return (
        f"native kernels: {', '.join(cpu.supported_isas())} ({note})" if available else f"native kernels: none ({note})"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        available, note = cpu.available()
        if not available:
            raise pytest.UsageError(f"tests/ops needs the native library: {note}")
        metafunc.parametrize("isa", cpu.supported_isas())


@pytest.fixture(autouse=True)
def seed() -> int:
    value = int(os.environ.get("QUANTKIT_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"QUANTKIT_TEST_SEED={value}")
    torch.manual_seed(value)
    return value
