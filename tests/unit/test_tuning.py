"""What gpu-check's tuner measured becomes the package's table, and emission follows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.compile.buckets import CLASSES
from quantkit.compile.places import places
from quantkit_kernels.triton import kernels, tuned_choices
from quantkit_kernels.triton.tuned_choices import TABLES
from quantkit_kernels.triton.tuning import CHOICES, table_key

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels/benchmarks"))

from gpu import keep_tuning, tuner
from gpu.ahead import DRY_TARGET
from gpu.decoder import llama
from gpu.report import Section

ROWS: list[dict[str, Any]] = [
    {"linear": "few W4 g128 n256 k128", "sm": 90, "ok": True, "choice": {"block_n": 64, "splits": 2}},
    {"linear": "few W8 n96 k128", "sm": 90, "ok": True, "choice": {}},
    {"linear": "many W8 n96 k128", "sm": 90, "ok": False, "choice": {"stages": 2}},
    {"linear": "died", "sm": 90, "ok": False},
]


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[dict[str, Any]]) -> tuple[int, Path]:
    check, out = tmp_path / "gpu-check.json", tmp_path / "tuned.py"
    check.write_text(json.dumps([{"name": "device", "rows": []}, {"name": "tuner", "rows": rows}]))
    monkeypatch.setattr(sys, "argv", ["keep_tuning.py", str(check), "--out", str(out)])
    return keep_tuning.main(), out


def test_right_results_that_beat_the_rules_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out = run(monkeypatch, tmp_path, ROWS)
    found: dict[str, Any] = {}
    exec(out.read_text(), found)
    assert code == 0
    assert found["TABLES"] == {90: {"few W4 g128 n256 k128": {"block_n": 64, "splits": 2}}}
    assert out.read_text().startswith(Path(tuned_choices.__file__).read_text().split("TABLES")[0])


def test_other_targets_stay_and_a_line_that_lost_goes() -> None:
    before = {80: {"a": {"stages": 3}}, 90: {"few W8 n96 k128": {"stages": 6}, "b": {"splits": 4}}}
    assert keep_tuning.merged(before, keep_tuning.measured(ROWS)) == {
        80: {"a": {"stages": 3}},
        90: {"b": {"splits": 4}, "few W4 g128 n256 k128": {"block_n": 64, "splits": 2}},
    }


def test_nothing_measured_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(monkeypatch, tmp_path, ROWS[2:])
    assert (code, out.exists()) == (2, False)
    assert "no tuner section with a right result" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '[{"name": "tuner"}]', json.dumps([{"name": "tuner", "rows": [{"ok": True, "choice": {}}]}]),
     json.dumps([{"name": "tuner", "rows": [{**ROWS[0], "linear": 'a"b'}]}]),
     json.dumps([{"name": "tuner", "rows": [{**ROWS[0], "sm": 91}]}])],
    ids=str,
)  # fmt: skip
def test_a_file_that_is_no_gpu_checks_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "check").write_text(content)
    monkeypatch.setattr(sys, "argv", ["keep_tuning.py", str(tmp_path / "check"), "--out", str(tmp_path / "out")])
    assert keep_tuning.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_table_that_cannot_be_written_leaves_the_one_that_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tuned.py").mkdir()
    code, out = run(monkeypatch, tmp_path, ROWS)
    assert (code, out.is_dir()) == (2, True)
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-check.json", "tuned.py"]


@pytest.mark.parametrize("choice", [{"warps": 4}, {"stages": 0}, {"stages": True}, {"splits": "2"}], ids=str)
def test_a_choice_that_is_none_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is no choice of"):
        keep_tuning.measured([{**ROWS[0], "choice": choice}])


def test_emission_takes_the_tables_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    program = llama(1, 128, 256, 4, 2, 96)
    (down,) = [p for p in places(program, "sm_90", CLASSES["decode"]) if p.node == "layers.0.down"]
    assert not set(CHOICES) & set(down.facts)
    monkeypatch.setitem(TABLES, 90, {table_key(down.facts): {"block_n": 128}})
    (chosen,) = [p for p in places(program, "sm_90", CLASSES["decode"]) if p.node == "layers.0.down"]
    spec = kernels()["linear_w4a16_few"]
    assert spec.signature(down.facts).constants["BLOCK_N"] == 32
    assert spec.signature(chosen.facts).constants["BLOCK_N"] == 128
    assert not any(set(CHOICES) & set(p.facts) for p in places(program, "sm_80", CLASSES["decode"]))


def test_every_linear_of_a_model_is_tuned_once_by_form() -> None:
    found = tuner.linears(llama(2, 128, 256, 4, 2, 96), DRY_TARGET)
    keys = [table_key(facts) for facts in found]
    assert len(set(keys)) == len(keys) == 10  # qkv, o, gate_up, down and the head; few rows and many
    assert {key.split()[0] for key in keys} == {"few", "many"}


def test_splits_to_try_are_such_as_the_kernel_takes() -> None:
    (down,) = [
        f for f in tuner.linears(llama(1, 2048, 8192, 32, 8, 96), "sm_90") if f["k"] == 8192 and f["rows"] == "few"
    ]
    assert [c["splits"] for c in tuner.split_candidates(down)] == [1, 2, 8, 16]
    assert not list(tuner.split_candidates({**down, "group_size": 32}))
    assert not list(tuner.split_candidates({**down, "rows": "many"}))


def test_a_wrong_result_fails_its_row_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, Any] = {"linear": "x", "sm": 90}

    class Never:
        target = DRY_TARGET

        def compile(self, wanted: Any) -> int:
            return 0

    monkeypatch.setattr(tuner, "launches", lambda *_: [])  # nothing runs: what is poisoned stays
    (facts, *_) = tuner.linears(llama(1, 128, 256, 4, 2, 96), DRY_TARGET)
    tuner._tune(row, Never(), facts, True, lambda work: 1.0)
    assert row["ok"] is False
    assert row["why"].startswith("wrong results")
    assert keep_tuning.measured([row]) == {}
    assert Section("tuner", rows=[row]).line().endswith("1 rows, 1 wrong")
