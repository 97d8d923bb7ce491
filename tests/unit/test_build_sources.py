"""A stage's key covers the code it runs and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.build import sources


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in place of `quantkit`: a imports b inside a function, b imports c relatively, d stands alone."""
    root = tmp_path / "quantkit"
    (root / "part").mkdir(parents=True)
    (root / "__init__.py").write_text("from quantkit import d\n")
    (root / "a.py").write_text("def f():\n    from quantkit.part import b\n    return b\n")
    (root / "part" / "__init__.py").write_text("")
    (root / "part" / "b.py").write_text("from .c import value\n")
    (root / "part" / "c.py").write_text("value = 1\n")
    (root / "d.py").write_text("import torch\n")
    monkeypatch.setattr(sources, "_root_folder", lambda name: root)
    return root


def digest(module: str) -> str:
    sources.source_digest.cache_clear()
    sources._imports.cache_clear()
    return sources.source_digest(module)


@pytest.mark.parametrize("changed", ["a.py", "part/__init__.py", "part/b.py", "part/c.py"])
def test_a_change_in_what_a_stage_imports_changes_its_digest(package: Path, changed: str) -> None:
    before = digest("quantkit.a")
    (package / changed).write_text((package / changed).read_text() + "# changed\n")
    assert digest("quantkit.a") != before


def test_a_change_elsewhere_leaves_the_digest(package: Path) -> None:
    before = digest("quantkit.a")
    (package / "d.py").write_text("import numpy\n")
    assert digest("quantkit.a") == before


def test_stages_do_not_depend_on_server_or_command_line() -> None:
    seen: set[str] = set()
    pending = ["quantkit.build.stages.quantize"]
    while pending:
        name = pending.pop()
        path = sources._file_of(name)
        if path is not None and name not in seen and name != "quantkit":
            seen.add(name)
            pending += sources._imports(name, path)
    assert "quantkit.quantize.rtn" in seen
    assert not [name for name in seen if name.startswith(("quantkit.server", "quantkit.cli", "quantkit.gate"))]


def test_every_file_of_the_native_library_counts() -> None:
    folder = sources.seen_folder("quantkit_kernels.cpu") / "src"
    assert {path.suffix for path in folder.iterdir() if path.is_file()} <= set(sources._NATIVE_SOURCES)
