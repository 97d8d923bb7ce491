"""Build one recipe at several budgets, judge each artifact, and print a table of bits, bytes and fidelity.

    python tools/budget_sweep.py recipes/quickstart.yaml OUT.md --budgets 8 7.5 7 6.5 6 5.75 5.5

All budgets build into one folder, so that stages they share run once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

QUANTKIT = Path(sys.executable).with_name("quantkit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path, help="Markdown file to write")
    parser.add_argument("--budgets", type=float, nargs="+", default=[8.0, 7.5, 7.0, 6.5, 6.0, 5.75, 5.5])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to every build")
    parser.add_argument("--artifact", type=Path, help="folder to build into, again and again; default: a temporary one")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for budget in args.budgets:
            rows.append(judge(args.recipe, args.artifact or Path(work) / "artifact", budget, args.set))
            print(rows[-1], flush=True)
    command = f"python tools/budget_sweep.py {args.recipe} {args.out} --budgets {' '.join(map(str, args.budgets))}"
    command += "".join(f" --set {item}" for item in args.set)
    head = (
        "| budget, bits | payload weights | mean KL | × RTN-INT4 | P99 KL | × RTN-INT4 | lost top-1 | × RTN-INT4 "
        "| ppl ratio | token gate |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(f"Made by `{command}`.\n\n" + "\n".join([head, *rows]) + "\n")


def judge(recipe: Path, out: Path, budget: float, settings: list[str]) -> str:
    """One table row: build at `budget`, read the evidence."""
    options = [f"--set=quantization.budget_bits={budget}", *(f"--set={item}" for item in settings)]
    done = subprocess.run([QUANTKIT, "build", recipe, "--out", out, *options], stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 10, 11, 12):
        sys.exit(done.returncode)
    gate = json.loads((out / "evidence/gate/gate.json").read_text())
    ours, rung = gate["variants"]["artifact"], gate["variants"]["RTN-INT4"]
    size = json.loads(subprocess.run([QUANTKIT, "inspect", out, "--json"], capture_output=True, check=True).stdout)
    share = size["weight_bytes"] / size["source_weight_bytes"]
    lost, rung_lost = 1 - ours["same_top1"], 1 - rung["same_top1"]
    passed = gate["verdict"]["verdict"] in ("pass", "pending-review")
    cells = [
        f"{budget:g}",
        f"{share:.1%}",
        f"{ours['mean_kl']:.4f} ± {ours['mean_kl_se']:.4f}",
        f"{ours['mean_kl'] / rung['mean_kl']:.2f}",
        f"{ours['p99_kl']:.3f}",
        f"{ours['p99_kl'] / rung['p99_kl']:.2f}",
        f"{lost:.1%}",
        f"{lost / rung_lost:.2f}",
        f"{ours['ppl_ratio']:.3f}",
        "passes" if passed else gate["verdict"]["verdict"],
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
