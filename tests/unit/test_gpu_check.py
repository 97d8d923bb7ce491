"""gpu-check outlives whatever a section does, says in a line that there is no GPU, and its dry run is real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/gpu_check.py"
ABSENT = ("typer", "pydantic", "yaml", "rich", "jinja2", "scipy", "datasets", "gguf", "jsonschema", "accelerate",
          "evaluate", "fastapi", "compressed_tensors")  # fmt: skip
"""Packages that a GPU machine need not have."""


def run(
    script: Path, *options: str, path: Path | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def tables(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads((folder / "gpu-check.json").read_text())}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_in_a_line_and_exits_3(tmp_path: Path) -> None:
    ran = run(SCRIPT, "--out", str(tmp_path / "out"))
    assert ran.returncode == 3
    assert ran.stderr == "gpu-check: nothing was checked: torch finds no CUDA device\n"
    assert not ran.stdout
    assert not (tmp_path / "out").exists()


def test_an_unknown_section_is_a_usage_error(tmp_path: Path) -> None:
    ran = run(SCRIPT, "--only", "kernels,kernel")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "no section 'kernel'" in line


SECTIONS = """
import os, sys, time

def fine(section, dry):
    section.rows = [{"what": "a|b", "ok": True, "rate": 1.23456}, {"what": "c", "extra": 3}]

def wrong(section, dry):
    section.rows = [{"what": "kernel", "ok": False}]

def raises(section, dry):
    section.rows.append({"what": "first", "ok": True})
    raise ValueError("bad\\nthing")

def dies(section, dry):
    section.rows.append({"what": "found before", "ok": True})
    time.sleep(1.5)
    print("device-side assert", file=sys.stderr, flush=True)
    os.abort()

def hangs(section, dry):
    section.rows.append({"what": "found before", "ok": True})
    time.sleep(600)

SECTIONS = {"device": fine, "kernels": wrong, "launcher": raises, "ceilings": dies, "graphs": fine, "decoder": hangs}
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real script, beside sections that go wrong in every way."""
    base = tmp_path_factory.mktemp("planted")
    package = base / "kernels/benchmarks/gpu"
    package.mkdir(parents=True)
    (base / "tools").mkdir()
    shutil.copy(SCRIPT, base / "tools")
    shutil.copy(ROOT / "kernels/benchmarks/gpu/report.py", package)
    (package / "__init__.py").touch()
    (package / "sections.py").write_text(SECTIONS)
    return base / "tools/gpu_check.py"


def test_a_section_that_raises_dies_or_is_wrong_leaves_the_rest_and_what_it_had_found(
    planted: Path, tmp_path: Path
) -> None:
    ran = run(planted, "--dry-run", "--only", "device,kernels,launcher,ceilings,graphs", "--out", str(tmp_path))
    assert ran.returncode == 1, ran.stderr
    found = tables(tmp_path)
    states = {name: section["state"] for name, section in found.items()}
    assert states == {"device": "ok", "kernels": "failed", "launcher": "failed", "ceilings": "died", "graphs": "ok"}
    assert found["launcher"]["notes"] == ["ValueError: bad\nthing"]
    assert found["launcher"]["rows"] == found["launcher"]["rows"][:1] != []
    assert "ended with -6: device-side assert" in found["ceilings"]["notes"][0]
    assert found["ceilings"]["rows"] == [{"what": "found before", "ok": True}]
    lines = ran.stdout.splitlines()
    assert len(lines) == 6
    assert lines[-1].endswith("wrong: kernels, launcher, ceilings")
    text = (tmp_path / "gpu-check.md").read_text()
    assert "| what | ok | rate | extra |" in text
    assert "| a\\|b | yes | 1.235 |  |" in text
    assert "| kernel | NO |" in text
    assert "\nValueError: bad thing\n" in text


def test_a_section_that_hangs_is_ended_and_what_follows_is_told_to_be_left_out(planted: Path, tmp_path: Path) -> None:
    ran = run(planted, "--dry-run", "--only", "decoder,device", "--seconds", "8", "--out", str(tmp_path))
    assert ran.returncode == 1
    found = tables(tmp_path)
    assert found["decoder"]["state"] == "died"
    assert found["decoder"]["notes"][0].startswith("took longer than its ")
    assert found["decoder"]["rows"] == [{"what": "found before", "ok": True}]
    assert found["device"]["notes"] == ["not started: no time was left"]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH that hides what a GPU machine need not have."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/sitecustomize.py").write_text(
        "import sys\nclass Hidden:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {ABSENT!r}:\n            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    return tmp_path / "bare"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_holds_every_registered_kernel_a_decoder_and_its_graphs_to_their_references(
    bare: Path, tmp_path: Path
) -> None:
    from quantkit_kernels.triton import kernels

    out = tmp_path / "out"
    ran = run(
        SCRIPT, "--dry-run", "--only", "device,kernels,launcher,graphs", "--out", str(out), path=bare, timeout=590
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = tables(out)
    cases = [row["case"] for row in found["kernels"]["rows"]]
    assert {case.split()[0] for case in cases} == set(kernels())
    interpreted = [row for row in found["kernels"]["rows"] if " BF16 " not in row["case"]]
    assert all(row["ok"] and row["same bits"] for row in interpreted)
    replays = [row for row in found["graphs"]["rows"] if row["what"].startswith("replay")]
    assert len(replays) == 3
    assert all(row["ok"] for row in found["graphs"]["rows"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_launched_on_a_device_fits_what_was_compiled_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every case's and the decoder's arguments, checked against the code's types and divisors; no compiler on PATH."""
    monkeypatch.syspath_prepend(ROOT / "kernels/benchmarks")
    monkeypatch.setenv("PATH", str(tmp_path))
    from gpu.ahead import Ahead
    from gpu.cases import launches
    from gpu.decoder import Decoder, RandomWeights, llama
    from gpu.sections import _build, _cases

    from quantkit_kernels.cuda.driver import Driver
    from tests.launch.fake_driver import FakeLibrary

    library = FakeLibrary(capability=(9, 0), shared=232448)
    ahead = Ahead(False, Driver(library), tmp_path / "kernels")
    found = list(_cases(True))
    count = ahead.compile([(spec, facts) for _, specs, facts in found for spec in specs])
    assert count > 15
    for name, specs, facts in found:
        prepared = launches(_build(specs, facts, True), specs, facts, ahead)
        assert len(prepared) == len(specs) > 0, name
    program = llama(1, 128, 256, 4, 2, 96)
    decoder = Decoder(program, RandomWeights(program, "cpu"), max_tokens=40, max_seqs=20, max_model_len=64,
                      ahead=ahead, device="cpu")  # fmt: skip
    loaded = len(library.named("cuModuleLoadData"))
    for tokens, sequences, decodes in ((1, 1, True), (5, 5, True), (20, 20, True), (40, 1, False)):
        assert len(decoder.bind(tokens, sequences, decodes)) > 8
    assert len(library.named("cuModuleLoadData")) > loaded
