"""Writes what this machine does with every kernel: `python kernels/benchmarks/results.py --out FOLDER`.

FOLDER/RESULTS.md: the ceilings, one line an op, form and case with its share of them, and the output of
`shared/peers/bench.py` where `--peers` names a file that holds it. FOLDER/roofline-ISA.svg: the same as a picture.
"""

from __future__ import annotations

import argparse
import platform
from datetime import date
from pathlib import Path

import attention
import linear
from arguments import count
from ceilings import Ceilings
from figures import markdown
from roofline import roofline

from quantkit_kernels import cpu

ROWS = (1, 8, 16, 64, 512)
LAYER = ("qkv", "o", "gate_up", "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    here = cpu.supported_isas()
    parser.add_argument("--isa", nargs="+", choices=here, help="default: the best one, and AVX2 where there is another")
    parser.add_argument("--threads", type=count, default=cpu.usable_threads())
    parser.add_argument("--peers", type=Path, help="what shared/peers/bench.py printed on this machine")
    options = parser.parse_args()
    peers = ""
    if options.peers:
        try:
            peers = options.peers.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--peers {options.peers}: {error}")
    isas = options.isa or list(dict.fromkeys([here[0], *(isa for isa in here if isa == "avx2")]))
    machine = f"{processor()}, {options.threads} threads, {date.today()}"
    parts = [f"# What the kernels reach on this machine\n\n{machine}. Made by `make bench`: one run, not a promise."]
    options.out.mkdir(parents=True, exist_ok=True)
    for isa in isas:
        ceilings = Ceilings(isa, options.threads)
        print(ceilings.line(), flush=True)
        figures = linear.measure(ceilings, ("int4 g64", "int4 g128"), LAYER, ROWS)
        figures += linear.measure(ceilings, ("int8",), ("head",), (1, 16))
        figures += linear.measure(ceilings, ("fp16",), ("o",), ROWS)
        figures += attention.measure(ceilings, attention.FORMATS, 9, 3, 64)
        parts.append(f"## {isa}\n\n{ceilings.line()}\n\n![roofline](roofline-{isa}.svg)\n\n{markdown(figures)}")
        (options.out / f"roofline-{isa}.svg").write_text(roofline(figures, f"{processor()}, {isa}"), encoding="utf-8")
    if peers:
        parts.append(f"## Beside the peers\n\n```\n{peers}\n```")
    (options.out / "RESULTS.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(options.out / "RESULTS.md")


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
