"""Fresh random inputs each run (the seed is printed on failure) and every instruction set this machine can run.

`test_triton_*.py` run in Triton's interpreter. It must be on before triton is imported, and off for those who compile,
so such a file is one test here: it runs in a process of its own. `TRITON_INTERPRET=1 pytest FILE` runs it in this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantkit_kernels import cpu


def pytest_report_header() -> str:
    available, note = cpu.available()
    return (
        f"native kernels: {', '.join(cpu.supported_isas())} ({note})" if available else f"native kernels: none ({note})"
    )


class InterpretedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield Interpreted.from_parent(self, name="interpreted")


class Interpreted(pytest.Item):
    def runtest(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(self.path)]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=environment, cwd=self.config.rootpath, capture_output=True, text=True)
        if ran.returncode != 0:
            pytest.fail(f"{' '.join(command)}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}", pytrace=False)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if module_path.name.startswith("test_triton_") and os.environ.get("TRITON_INTERPRET") != "1":
        return InterpretedFile.from_parent(parent, path=module_path)
    return None


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
