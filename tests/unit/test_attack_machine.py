"""Machines that are not as hoped for: no native library, a wrong variable, a place that cannot be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.build.place import check_place
from quantkit.cli.app import run
from quantkit.errors import RecipeError
from quantkit.runtime.isa import instruction_set


def test_an_instruction_set_that_is_none_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CPU_ISA", "sse9")
    with pytest.raises(RecipeError, match="QUANTKIT_CPU_ISA=sse9 is unknown; this machine runs"):
        instruction_set()


def test_without_a_native_library_the_reference_computes_and_builds_know_it(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", "from quantkit.runtime.isa import instruction_set; print(instruction_set())"],
        env={**os.environ, "QUANTKIT_CPU_LIBRARY": str(tmp_path / "none.so")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "reference\n"


@pytest.mark.parametrize("name", ["a" * 300, "~nosuchuser"], ids=["too long", "unknown home"])
def test_an_artifact_cannot_go_where_no_folder_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="--out"):
        check_place(tmp_path / name if name[0] == "a" else Path(name))


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EFBIG])
def test_a_place_that_takes_no_files_is_the_machine_s_fault_and_not_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def refused(_: object) -> None:
        raise OSError(code, os.strerror(code), "/mnt/report.html")

    monkeypatch.setattr("quantkit.recipe.templates.resource", refused)
    assert run(["init", str(tmp_path / "r.yaml")]) == 3
    assert capsys.readouterr().err.startswith(f"quantkit: /mnt/report.html: {os.strerror(code)}. Make room")
