"""Fresh random inputs each run (the seed is printed on failure) and every instruction set this machine can run.

`test_triton_*.py` run in Triton's interpreter. It must be on before triton is imported, and off for those who compile,
so such a file is one test here, and they run in a process of their own. `TRITON_INTERPRET=1 pytest FILE` runs one here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from quantkit_kernels import cpu
from quantkit_kernels.cpu.library import ISA_BITS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which instruction sets the tests ran on, and which only `make cross` or another machine tries."""
    available, note = cpu.available()
    here = cpu.supported_isas() if available else []
    absent = [isa for isa in ISA_BITS if isa not in here]
    terminalreporter.write_line(
        f"native kernels ({note}): {', '.join(here) or 'none'}; not run here: {', '.join(absent)}"
    )


SLOW = {"test_triton_moe_linear", "test_triton_moe_route", "test_triton_paged_prefill", "test_triton_sample"}
"""Files that take minutes in the interpreter."""
MOST_SECONDS = 3000


class InterpretedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        item = Interpreted.from_parent(self, name="interpreted")
        item.add_marker(pytest.mark.timeout(MOST_SECONDS))
        if self.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
        yield item


class Interpreted(pytest.Item):
    def runtest(self) -> None:
        if RUN not in self.session.stash:
            files = [str(item.path) for item in self.session.items if isinstance(item, Interpreted)]
            self.session.stash[RUN] = interpret(files, self.config.rootpath)
        run = self.session.stash[RUN]
        if run.code not in (0, 1) or self.path.stem in run.failed or self.path.stem not in run.passed:
            pytest.fail(f"exit code {run.code}\n{run.output}", pytrace=False)


@dataclass(frozen=True)
class Run:
    """One process for all interpreted files, as starting costs more than most of them; passed, failed: file stems."""

    code: int
    output: str
    passed: set[str]
    failed: set[str]


RUN = pytest.StashKey[Run]()


def interpret(files: list[str], root: Path) -> Run:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    outcomes: dict[bool, set[str]] = {True: set(), False: set()}
    for case in cases:
        passed = case.find("failure") is None and case.find("error") is None and case.find("skipped") is None
        outcomes[passed].add(case.get("classname", "").rpartition(".")[2])
    return Run(ran.returncode, ran.stdout + ran.stderr, outcomes[True], outcomes[False])


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
