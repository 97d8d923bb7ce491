"""Check and measure everything on a GPU: `make gpu-check`, or from a source checkout `python tools/gpu_check.py`.

Needs torch, triton, numpy, safetensors and transformers; compiles nothing in C. Each section runs in a process of its
own with a time limit, so that whatever one does to the device leaves the others; all of it ends within 10 minutes.
Writes gpu-check.md and gpu-check.json. Exit codes: 0 all right, 1 something is wrong, 3 no GPU.

    python tools/gpu_check.py [--out FOLDER] [--only kernels,graphs] [--seconds 600]
    python tools/gpu_check.py --dry-run       on the CPU, through Triton's interpreter, at small sizes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "kernels/benchmarks")]
sys.path[:0] = [path for path in PATHS if path not in sys.path]

from gpu.report import Section, write  # noqa: E402

LIMITS = {
    "device": 60, "kernels": 150, "launcher": 120, "ceilings": 40, "graphs": 90, "slice": 90, "decoder": 150,
    "speed": 240, "tuner": 120,
}  # fmt: skip
"""Sections and the seconds each may take, in the order of what is worth most should time run out."""
NO_GPU = 3


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the tables")
    options.add_argument("--only", default=",".join(LIMITS), help="sections, by comma")
    options.add_argument("--seconds", type=float, default=590, help="for everything")
    options.add_argument(
        "--slice", type=Path, help="made by tools/gpu_slice.py; gpu-slice.safetensors where it is there"
    )
    options.add_argument("--dry-run", action="store_true", help="without a GPU, interpreted, small")
    options.add_argument("--section", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.section is not None:
        return run_here(given.section, given.dry_run, given.out)
    if given.slice is not None and not given.slice.is_file():
        print(f"gpu-check: --slice {given.slice}: no such file; tools/gpu_slice.py ARTIFACT makes one", file=sys.stderr)
        return 2
    os.environ["GPU_CHECK_SLICE"] = str((given.slice or ROOT / "gpu-slice.safetensors").absolute())
    names = given.only.split(",")
    unknown = [name for name in names if name not in LIMITS]
    if unknown:
        print(f"gpu-check: no section {unknown[0]!r}: {', '.join(LIMITS)}", file=sys.stderr)
        return 2
    reason = None if given.dry_run else missing_gpu()
    if reason is not None:
        print(f"gpu-check: nothing was checked: {reason}", file=sys.stderr)
        return NO_GPU
    sections = run_all(names, given.dry_run, given.out, given.seconds)
    wrong = [section.name for section in sections if section.state != "ok"]
    print(f"{given.out}/gpu-check.md: {'all right' if not wrong else 'wrong: ' + ', '.join(wrong)}")
    return int(bool(wrong))


def missing_gpu() -> str | None:
    """Why there is no GPU to check, in a line; asked in a process of its own."""
    code = "import torch,sys; sys.exit(0 if torch.cuda.is_available() else 9)"
    try:
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "torch did not say within 120 s whether there is a GPU"
    if asked.returncode == 0:
        return None
    last = (asked.stderr.strip().splitlines() or ["no message"])[-1][:200]
    return "torch finds no CUDA device" if asked.returncode == 9 else f"torch cannot be used: {last}"


def run_all(names: list[str], dry: bool, out: Path, seconds: float) -> list[Section]:
    """Every section in turn; the tables are written after each, so that none is lost."""
    ends, sections = time.monotonic() + seconds, []
    with tempfile.TemporaryDirectory() as kernels:
        os.environ["GPU_CHECK_KERNELS"] = kernels
        for name in names:
            left = ends - time.monotonic()
            if left < 5:
                sections.append(Section(name, "died", notes=["not started: no time was left"]))
            else:
                sections.append(isolated(name, dry, left))
            print(sections[-1].line(), flush=True)
            write(sections, out)
    return sections


def isolated(name: str, dry: bool, left: float) -> Section:
    """The section in a process of its own; one that dies or takes too long says so and keeps what it had found."""
    with tempfile.TemporaryDirectory() as folder:
        limit = min(left, LIMITS[name])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "TRITON_INTERPRET": str(int(dry)), "TRITON_DEFAULT_FP_FUSION": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, "--section", name, "--out", folder, *["--dry-run"] * dry]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        note = ""
        try:
            _, errors = process.communicate(timeout=limit)
            if process.returncode:
                note = f"ended with {process.returncode}: {(errors.strip().splitlines() or ['no message'])[-1][:300]}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            note = f"took longer than its {limit:.0f} s"
        section = _read(Path(folder) / "section.json", name)
    section.seconds = time.monotonic() - began
    if note:
        section.state = "died"
        section.notes.insert(0, note)
    return section


def run_here(name: str, dry: bool, folder: Path) -> int:
    """One section, written down as it goes on: what a dying process had found is not lost."""
    from threading import Event, Thread

    section, done = Section(name), Event()

    def keep() -> None:
        while not done.wait(0.5):
            _save(section, folder)

    keeper = Thread(target=keep, daemon=True)
    keeper.start()
    try:
        from gpu.sections import SECTIONS

        SECTIONS[name](section, dry)
        if not all(row.get("ok", True) for row in section.rows):
            section.state = "failed"
    except Exception as error:  # noqa: BLE001 - a section's failure is a line of the report
        traceback.print_exc()
        section.state = "failed"
        section.notes.insert(0, f"{type(error).__name__}: {error}"[:300])
    done.set()
    keeper.join()
    _save(section, folder)
    return 0


def _save(section: Section, folder: Path) -> None:
    part = folder / ".section.json"
    part.write_text(json.dumps(asdict(section)), encoding="utf-8")
    part.replace(folder / "section.json")


def _read(path: Path, name: str) -> Section:
    try:
        return Section(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Section(name)


if __name__ == "__main__":
    raise SystemExit(main())
