"""The command line answers fast, in one line when something is wrong, with the exit code the kind of failure has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit import __version__
from quantkit.cli.app import run
from quantkit.recipe.load import load_recipe
from tests.build_inputs import write_recipe


def test_starting_imports_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'pydantic', 'numpy')"
    code = f"import sys, quantkit.cli; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"quantkit {__version__}\n"


@pytest.mark.parametrize("arguments", [["frobnicate"], ["build"], ["plan", "--nonsense", "x"], ["plan", "absent.yaml"]])
def test_a_usage_mistake_is_one_line_on_stderr_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("quantkit: ")
    assert err.count("\n") == 1


def test_an_internal_error_is_one_line_and_a_traceback_only_with_debug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quantkit.recipe.templates.resource", lambda _: 1 / 0)
    arguments = ["init", str(tmp_path / "r.yaml")]
    assert run(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("quantkit: internal error: ZeroDivisionError")
    assert "rerun with --debug" in err
    assert "Traceback" not in err
    assert run([*arguments, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_exits_130_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.recipe.templates.resource", interrupted)
    assert run(["init", str(tmp_path / "r.yaml")]) == 130
    assert "interrupted; run the same command to go on" in capsys.readouterr().err


def test_init_writes_a_recipe_that_plan_would_read_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert run(["init", "sub/mine.yaml", "--template", "minimal", "--source", "model"]) == 0
    loaded = load_recipe(tmp_path / "sub" / "mine.yaml")
    assert (loaded.base / loaded.recipe.model.source).resolve() == tmp_path / "model"
    assert run(["init", "sub/mine.yaml"]) == 2
    assert "already" in capsys.readouterr().err
    assert run(["init", "other.yaml", "--template", "poem"]) == 2
    assert "chat, rag, code, minimal" in capsys.readouterr().err


def test_init_takes_a_group_size_that_divides_the_models_channels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path, "llama")
    config = tmp_path / "source" / "config.json"
    shape = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    config.write_text(json.dumps({**json.loads(config.read_text()), **shape}))
    assert run(["init", str(tmp_path / "new.yaml"), "--template", "chat", "--source", str(tmp_path / "source")]) == 0
    assert load_recipe(tmp_path / "new.yaml").recipe.quantization.schemes == ["W8A16", "W4A16_G64"]
    assert "4-bit groups of 64, since 128 does not divide here" in capsys.readouterr().out


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "quantkit recipe"


def test_plan_prints_stages_and_schemes_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path, "qwen3")
    arguments = ["plan", str(path), "--out", str(tmp_path / "out"), "--set", "quantization.budget_bits=9"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    for word in ("Import the source", "to run", "budget 9 bits", "W8A16 | W4A16_G64 | FP16", "least feasible"):
        assert word in text
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget_bits"] == 9.0


def test_init_says_when_the_source_was_not_asked_about_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", str(tmp_path / "r.yaml"), "--source", "package:no_such_package/model.gguf"]) == 0
    assert "4-bit groups of 128, not yet checked against the source" in capsys.readouterr().out
