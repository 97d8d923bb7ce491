"""Ways to quantize one model at equal bits, compared token by token with the original through the serving runtime.

    python tools/fidelity.py SOURCE --scheme W4A16_G128 --data heldout.jsonl other.jsonl [--out TABLE.md]

Every decoder matrix takes the same scheme, or its own by `--allocation`; head and cache stay in float, so only the
method differs. `rtn` is plain rounding over the min-max range, `rtn-mse` with searched scales, `gptq` what
`quantkit build` does by default. Calibration reads `--calibration` (the packaged conversations); the compared text must
not be in it. Domains are the `category` of each data row unless `--by file`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from quantkit.build.allocation import read_allocation
from quantkit.calibration.dataset import load_samples
from quantkit.calibration.samples import CalibrationSet
from quantkit.formats.integer import scale_dtype
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES
from quantkit.gate.data import EvalSet, make_windows, read_conversations, refuse_overlap
from quantkit.gate.evaluate import Baseline, Variant
from quantkit.gate.rungs import HEAD, baseline
from quantkit.models import ModelSource, open_source
from quantkit.models.source_weights import SourceWeights
from quantkit.program import build_program, fuse, lower_precision
from quantkit.program.ir import Weight
from quantkit.quantize.gptq import gptq
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sequential import LayerWalk
from quantkit.runtime.text import ChatText
from quantkit_kernels.arrays import Array

PACKAGED = Path(__file__).parents[1] / "calib" / "conversations.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--scheme", default="W4A16_G128")
    parser.add_argument("--allocation", type=Path, help="schemes by group, as `quantkit search -o` writes them")
    parser.add_argument("--methods", nargs="+", default=["rtn", "rtn-mse", "gptq"])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--by", choices=["category", "file"], default="category")
    parser.add_argument("--calibration", type=Path, nargs="+", default=[PACKAGED])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--damping", type=float, default=0.01)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = open_source(args.source)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        source.write_tokenizer(Path(folder))
        text = ChatText(Path(folder))
        held_out = read_conversations(args.data)
        refuse_overlap(held_out, read_conversations(args.calibration, strict=False))
        data = make_windows(held_out, text, max_samples=args.windows, max_tokens=args.tokens, max_window=512, seed=0)
        samples = load_samples(args.calibration, text, max_samples=args.samples, max_tokens=512, seed=0)
        rows = compare(source, args, data, samples, Path(folder))
    print(rows)
    if args.out:
        args.out.write_text(rows + "\n")


def compare(source: ModelSource, args: argparse.Namespace, data: EvalSet, samples: CalibrationSet, work: Path) -> str:
    """A Markdown table: methods down, domains across, mean KL in nats a token."""
    threads = torch.get_num_threads()
    base = Baseline(baseline(source, threads, "auto"), data, lambda tokens: None, floor_windows=1)
    where = {item.id: Path(item.where.rpartition(":")[0]).stem for item in read_conversations(args.data)}
    names = np.array([where[w.id] if args.by == "file" else w.category for w in data.windows])
    domains = sorted(set(names))
    lines = [
        f"{args.source}, {args.allocation or args.scheme}, {data.scored} tokens of {len(data.windows)} windows, "
        f"calibrated on {len(samples.samples)} samples ({samples.tokens} tokens)",
        "",
        "| method | s | mean KL ± SE | P99 | same top-1 | " + " | ".join(domains) + " |",
        "|---" * (5 + len(domains)) + "|",
    ]
    program = fuse(build_program(source.spec))
    units = {group: weight for group, weight in program.groups().items() if group != HEAD}
    schemes = read_allocation(args.allocation, units) if args.allocation else dict.fromkeys(units, args.scheme)
    for method in args.methods:
        began = time.monotonic()
        matrices = quantized(source, method, schemes, samples, work, args)
        seconds = time.monotonic() - began
        weights = Held(source, matrices)
        scores = base.compare(
            Variant(method, lower_precision(program, schemes, "FP32"), weights, threads), lambda tokens: None
        ).scores
        of_window = names[scores.cluster]
        cells = [f"{scores.kl[of_window == name].mean():.4f}" for name in domains]
        means = np.array([scores.kl[scores.cluster == i].mean() for i in range(len(names))])
        lines.append(
            f"| {method} | {seconds:.0f} | {scores.kl.mean():.4f} ± {means.std() / len(means) ** 0.5:.4f} "
            f"| {np.quantile(scores.kl, 0.99):.3f} | {scores.same.mean():.1%} | " + " | ".join(cells) + " |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def quantized(
    source: ModelSource,
    method: str,
    schemes: Mapping[str, str],
    samples: CalibrationSet,
    work: Path,
    args: argparse.Namespace,
) -> dict[str, QuantizedMatrix]:
    """Every group's matrix by `method`."""
    program, dtype = fuse(build_program(source.spec)), scale_dtype(source.spec.dtype)
    load = SourceWeights(source).tensor
    groups = {name: weight for name, weight in program.groups().items() if quantizes(schemes, name)}
    if method != "gptq":
        search = "minmax" if method == "rtn" else "mse"
        return {
            name: rtn(load(weight), SCHEMES[schemes[name]], search=search, scale_dtype=dtype)
            for name, weight in groups.items()
        }
    walk = LayerWalk(source, program, lower_precision(program, schemes, "FP32"), samples, {}, work)
    walk.begin(0)
    made: dict[str, QuantizedMatrix] = {}
    for layer in range(program.num_layers):
        hessians = walk.hessians(layer)
        for name in filter(groups.__contains__, hessians):
            made[name], _ = gptq(
                load(groups[name]), hessians[name], SCHEMES[schemes[name]], scale_dtype=dtype, damping=args.damping
            )
        walk.advance(layer, made)
    walk.end()
    return made


def quantizes(schemes: Mapping[str, str], group: str) -> bool:
    """Whether a group's matrix is stored as codes."""
    return group in schemes and SCHEMES[schemes[group]].quantized


class Held:
    """Quantized matrices held in memory, the source's weights for the rest."""

    def __init__(self, source: ModelSource, matrices: Mapping[str, QuantizedMatrix]) -> None:
        self._source, self._matrices = SourceWeights(source), matrices

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        found = self._matrices.get(weight.group or "")
        return self._source.load(weight) if found is None else found


if __name__ == "__main__":
    main()
