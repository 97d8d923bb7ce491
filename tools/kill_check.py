"""Kill builds of one recipe with SIGKILL at random moments, go on, and compare every payload digest with an
undisturbed build's.

    python tools/kill_check.py recipes/quickstart.yaml --kills 10 [--set KEY=VALUE ...] [--out TABLE.md]

Every kill starts from nothing: a fresh folder, one kill somewhere in the time that the undisturbed build took up to its
payload, then the same command again, which is interrupted once the payload is whole: judging it changes no byte. The
whole process group is killed, workers included.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quantkit.artifact.read import open_artifact

QUANTKIT = Path(sys.executable).with_name("quantkit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to every build")
    parser.add_argument("--work", type=Path, help="folder for the builds; default: a temporary one")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    options = [f"--set={item}" for item in args.set]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        whole = Path(folder) / "whole"
        command = [QUANTKIT, "build", args.recipe, *options, "--out"]
        began = time.monotonic()
        digest = payload_of([*command, whole], whole)
        spent = time.monotonic() - began
        lines = [
            f"undisturbed: {digest}, {spent:.0f} s up to the payload",
            "",
            "| killed after, s | in stage | digest |",
        ]
        lines.append("|---|---|---|")
        print(lines[0], flush=True)
        same = 0
        for number in range(args.kills):
            out = Path(folder) / f"killed-{number}"
            moment = moments.uniform(0.5, spent)
            stage = kill_after([*command, out], moment, out)
            found = payload_of([*command, out], out)
            same += found == digest
            lines.append(f"| {moment:.1f} | {stage} | {'the same' if found == digest else found} |")
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join([f"Made by `python {' '.join(sys.argv)}`.", "", *lines, ""]))
    print(f"{same} of {args.kills} the same")
    sys.exit(same != args.kills)


def payload_of(command: list[Path | str], out: Path) -> str:
    """Build until the payload is whole, then interrupt; its digest, after every file of it was verified."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    whole: list[Path] = []
    while not whole and process.poll() is None:
        time.sleep(0.2)
        whole = list(stages_of(out).glob("package-*/payload"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    whole = whole or list(stages_of(out).glob("package-*/payload"))
    if not whole:
        sys.exit(f"exit {process.returncode}: {said[-2000:]}")
    return open_artifact(whole[0]).payload_digest


def stages_of(out: Path) -> Path:
    """Where a build keeps its stages."""
    return out.parent / ".quantkit" / out.name


def kill_after(command: list[Path | str], seconds: float, out: Path) -> str:
    """Start a build, kill its process group after `seconds`, and say which stage was unfinished."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    unfinished = sorted(stages_of(out).glob(".tmp-*"))
    return ", ".join(path.name.removeprefix(".tmp-").rpartition("-")[0] for path in unfinished) or "between stages"


if __name__ == "__main__":
    main()
