"""A build may be killed, interrupted, or run out of disk at any moment; the next run goes on to the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.artifact.verify import verify
from quantkit.build.progress import Silent
from quantkit.build.run import build, run_folder
from quantkit.errors import PreflightError
from quantkit.recipe.load import load_recipe
from tests.build_inputs import one_thread, write_recipe

DIES = """
import os, signal, sys
from pathlib import Path
from quantkit.build.progress import Silent
from quantkit.build.run import build
from quantkit.recipe.load import load_recipe
import torch

class Dies(Silent):
    stage = ""

    def begin(self, title, number, total):
        self.stage = title

    def step(self, done, total, what):
        if self.stage == sys.argv[3] and done >= 1:
            os.kill(os.getpid(), signal.SIGKILL)

build(load_recipe(Path(sys.argv[1])), Path(sys.argv[2]), Dies())
"""
"""A build that is killed in the middle of one stage, whatever the speed of the machine."""
COMMAND = (sys.executable, "-c", "from quantkit.cli import main; main()", "build")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def start(recipe: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, str(recipe), "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def fill(disk: Path, leave: int) -> None:
    """Take all but `leave` bytes of a file system."""
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - leave)


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    """Until the build has written something matching `pattern` into its run folder."""
    for _ in range(6000):
        if list(folder.glob(pattern)):
            return
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.01)
    raise AssertionError(f"no {pattern} within a minute")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"), "mistral")


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> str:
    return build(load_recipe(recipe), recipe.parent / "undisturbed", Silent()).payload_digest


def test_a_build_killed_again_and_again_goes_on_to_the_same_digest(
    recipe: Path, undisturbed: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for stage in ("Measure activations", "Measure sensitivity", "Quantize", "Judge"):
        killed = subprocess.run([sys.executable, "-c", DIES, recipe, out, stage], capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not out.exists()
    before = {path.name for path in run_folder(out).iterdir() if not path.name.startswith(".")} - {"lock"}
    built = build(load_recipe(recipe), out, Silent())
    assert built.payload_digest == undisturbed
    verify(out)
    reused = {f"{stage['name']}-{stage['key'][:16]}" for stage in built.run["stages"] if stage["cached"]}
    assert reused == before
    assert len(reused) >= 6
    assert not list(run_folder(out).glob(".tmp-*"))


def test_an_interrupt_exits_130_and_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    process = start(recipe, tmp_path / "out")
    wait_for(process, run_folder(tmp_path / "out"), ".tmp-import-*")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "quantkit: interrupted; run the same command to go on"
    assert "Traceback" not in err


def test_a_second_build_into_the_same_folder_is_refused_and_the_first_is_unharmed(
    recipe: Path, undisturbed: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = start(recipe, out)
    wait_for(first, run_folder(out), ".tmp-import-*")
    os.kill(first.pid, signal.SIGSTOP)
    try:
        with pytest.raises(PreflightError, match=rf"another build \(process {first.pid}\)"):
            build(load_recipe(recipe), out, Silent(), wait_s=0.2)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.communicate(timeout=120)
    record = json.loads((out / "evidence" / "run" / "run.json").read_text())
    assert record["payload_digest"] == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_disk_that_is_full_mid_build_is_told_and_the_next_run_goes_on(
    recipe: Path, undisturbed: str, small_disk: Path
) -> None:
    out = small_disk / "out"

    class FillsTheDisk(Silent):
        def begin(self, title: str, number: int, total: int) -> None:
            if title == "Quantize":
                fill(small_disk, leave=4096)

    with pytest.raises(PreflightError, match="disk full: Quantize needs about") as caught:
        build(load_recipe(recipe), out, FillsTheDisk())
    assert caught.value.exit_code == 3
    (small_disk / "ballast").unlink()
    built = build(load_recipe(recipe), out, Silent())
    assert {stage["name"] for stage in built.run["stages"] if stage["cached"]} == {
        "import", "calibrate", "sensitivity", "allocate",
    }  # fmt: skip
    assert built.payload_digest == undisturbed


def test_a_disk_too_small_from_the_start_is_refused_before_any_work(recipe: Path, small_disk: Path) -> None:
    fill(small_disk, leave=10_000_000)
    with pytest.raises(PreflightError, match=r"the build will write about \d+ MB, \d+ MB are free"):
        build(load_recipe(recipe), small_disk / "out", Silent())
    assert list(run_folder(small_disk / "out").glob(".tmp-*")) == []
