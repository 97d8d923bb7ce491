"""The slice that gpu-check carries along: small, of the artifact's own weights, and held to the CPU's exact mode."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.artifact.read import open_artifact
from quantkit.program import build_program, fuse, lower_precision
from quantkit_kernels.triton.layout import unpack_words
from tests.unit.test_artifact_payload import _manifest, _source, _write

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT / "tools"), str(ROOT / "kernels/benchmarks")) if path not in sys.path]

import gpu_slice  # noqa: E402
from gpu import sliced  # noqa: E402

SCHEMES = ("W8A16", "W4A16_G32_ASYM", "W4A16_G64")


def artifact(folder: Path, *schemes: str, kv_format: str = "INT8") -> Path:
    source = _source(folder / "source", tied=True)
    fused = fuse(build_program(source.spec))
    chosen = {group: schemes[i % len(schemes)] for i, group in enumerate(fused.groups())} | {"lm_head": "W8A16"}
    program = lower_precision(fused, chosen, kv_format)
    _write(folder / "artifact", source, program, _manifest(schemes=chosen, kv_format=kv_format))
    return folder / "artifact"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sliced.Slice, Path]:
    """(artifact, its slice, the slice's file)."""
    folder = tmp_path_factory.mktemp("sliced")
    here = artifact(folder, *SCHEMES)
    carried = gpu_slice.cut(open_artifact(here), 1, 300, 2, 1)
    carried.save(folder / "slice.safetensors")
    return here, carried, folder / "slice.safetensors"


def test_a_slice_is_the_artifacts_own_weights_cut(made: tuple[Path, sliced.Slice, Path]) -> None:
    whole, carried = open_artifact(made[0]), made[1]
    assert (carried.program.num_layers, whole.program.num_layers) == (1, 2)
    assert carried.program.vocab_size <= 300
    for name, matrix in carried.matrices.items():
        wanted = whole.load(whole.program.weights[name])
        rows = matrix.words.shape[0]
        assert torch.equal(
            unpack_words(matrix.words, matrix.bits, matrix.columns), torch.from_numpy(wanted.codes[:rows])
        )
        assert (matrix.zero is None) == (wanted.zero is None)
    assert {m.bits for m in carried.matrices.values()} == {4, 8}
    assert carried.expected.shape == (2, 2, carried.program.vocab_size)
    assert carried.expected.isfinite().all()


def test_a_slice_is_read_as_it_was_written(made: tuple[Path, sliced.Slice, Path]) -> None:
    _, carried, path = made
    read = sliced.load(path)
    assert read.program == carried.program
    assert read.sequences == carried.sequences
    assert torch.equal(read.expected, carried.expected)
    assert all(torch.equal(read.matrices[name].words, each.words) for name, each in carried.matrices.items())
    assert read.arrays.keys() == carried.arrays.keys()
    steps = list(read.steps())
    assert [len(inputs.seq_lens) for inputs, _ in steps] == [2, 2]
    assert [inputs.seq_lens[0] for inputs, _ in steps] == [20, 21]


def test_a_dry_run_holds_the_kernels_to_the_slice_and_finds_a_changed_weight(
    made: tuple[Path, sliced.Slice, Path], tmp_path: Path
) -> None:
    _, carried, path = made
    name = next(name for name in carried.matrices if name.endswith("down"))
    matrices = {**carried.matrices, name: replace(carried.matrices[name], words=~carried.matrices[name].words)}
    replace(carried, matrices=matrices).save(tmp_path / "wrong.safetensors")
    found = {}
    for each in (path, tmp_path / "wrong.safetensors"):
        out = tmp_path / each.stem
        command = [
            sys.executable,
            str(ROOT / "tools/gpu_check.py"),
            "--dry-run",
            "--only",
            "slice",
            "--slice",
            str(each),
        ]
        subprocess.run([*command, "--out", str(out)], timeout=200, env={**os.environ, "PYTHONPATH": ""})
        (section,) = json.loads((out / "gpu-check.json").read_text())
        found[each.stem] = section
    assert found["slice"]["state"] == "ok", found["slice"]
    assert [row["ok"] for row in found["slice"]["rows"]] == [True] * 2
    assert max(row["mean KL"] for row in found["slice"]["rows"]) < 1e-3
    assert found["wrong"]["state"] == "failed"


def test_without_a_slice_the_section_says_how_to_make_one(tmp_path: Path) -> None:
    from gpu.report import Section

    section = Section("slice")
    sliced.check(section, True, tmp_path / "absent")
    assert not section.rows
    assert "tools/gpu_slice.py ARTIFACT makes it" in section.notes[0]


def test_a_file_that_is_no_slice_is_named(tmp_path: Path) -> None:
    from gpu.report import Section

    (tmp_path / "text").write_text("no slice")
    with pytest.raises(ValueError, match=r"text is no slice .*gpu_slice.py ARTIFACT makes one"):
        sliced.check(Section("slice"), True, tmp_path / "text")
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--dry-run", "--only", "slice", "--slice"]
    ran = subprocess.run([*command, str(tmp_path / "absent")], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)


def test_divergence_is_that_of_the_distributions() -> None:
    p, q = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])
    wanted = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert sliced.divergence(p, q).item() == pytest.approx(wanted)
    assert sliced.divergence(p, p + 5).item() == pytest.approx(0, abs=1e-12)
    assert sliced.divergence(p, q * float("nan")).item() == math.inf


@pytest.mark.parametrize(
    ("schemes", "kv_format", "said"),
    [(("FP16",), "INT8", "which no Triton kernel multiplies"), (SCHEMES, "FP16", "holds an INT8 one")],
)
def test_what_the_decoder_has_no_kernel_for_is_refused_in_a_line(
    tmp_path: Path, schemes: tuple[str, ...], kv_format: str, said: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    here = artifact(tmp_path, *schemes, kv_format=kv_format)
    monkeypatch.setattr(sys, "argv", ["gpu_slice.py", str(here), "--out", str(tmp_path / "out")])
    assert gpu_slice.main() == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_slice_that_is_too_large_is_refused_and_not_written(
    made: tuple[Path, sliced.Slice, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced, "MOST_BYTES", 1 << 10)
    with pytest.raises(ValueError, match="fewer layers or tokens"):
        made[1].save(tmp_path / "large")
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    "options", [["--out", "absent/slice"], ["--out", "/dev/null"], ["--layers", "0"], ["--tokens", "0"]], ids=str
)
def test_a_slice_that_cannot_be_made_is_one_line(
    made: tuple[Path, sliced.Slice, Path], options: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_slice.py", str(made[0]), "--out", "out", *options])
    try:
        code = gpu_slice.main()
    except SystemExit as ended:  # argparse's
        code = int(str(ended.code))
    assert code == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
