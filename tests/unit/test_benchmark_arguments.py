"""Benchmarks refuse in one line, before measuring, what would measure nothing."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("linear", "--isa avx9", "invalid choice: 'avx9'"),
        ("linear", "--isa", "expected at least one argument"),
        ("linear", "--rows 1 0", "'0' is not a whole number of at least 1"),
        ("linear", "--threads -2", "'-2' is not a whole number of at least 1"),
        ("linear", "--shapes qkv 64x", "'64x' is no shape like 960x576"),
        ("attention", "--heads 9 0 64", "'0' is not a whole number of at least 1"),
        ("attention", "--isa avx9", "invalid choice: 'avx9'"),
        ("sampling", "--rows 0", "'0' is not a whole number of at least 1"),
        ("depth", "somewhere --lengths 0", "'0' is not a whole number of at least 1"),
        ("depth", "somewhere --rounds 0", "'0' is not a whole number of at least 1"),
        ("results", "--isa avx9", "invalid choice: 'avx9'"),
        ("results", "--peers nowhere", "--peers nowhere: "),
    ],
)
def test_arguments_that_measure_nothing_are_refused(
    script: str, arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    assert words in capsys.readouterr().err


def test_attention_is_measured_over_every_kind_of_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import attention
    from ceilings import Ceilings

    from quantkit_kernels import cpu

    monkeypatch.setattr(attention, "CASES", [("decode", 2, 20), ("prefill", 1, 20)])
    found = attention.measure(Ceilings(cpu.supported_isas()[0], 1, rounds=1), attention.FORMATS, 6, 3, 64)
    assert len(found) == 2 * len(attention.FORMATS)
    assert all(figure.seconds > 0 for figure in found)
