"""Predicted against measured: does the sensitivity of a group tell what quantizing it alone does to the model?

    python tools/sensitivity_check.py SOURCE --layers 0 7 15 22 29 --schemes W4A16_G64 W8A16 [--out TABLE.md]

For every (group, scheme) of the layers named: the mean KL divergence of the next-token distribution when this group
alone is quantized, beside what the build's sensitivity stage predicts
from gradients (and from their two parts alone) and from weights. Text for the measurement is drawn apart from the
text that gradients are taken on.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from quantkit.calibration.dataset import load_samples
from quantkit.calibration.samples import CalibrationSet
from quantkit.calibration.statistics import collect
from quantkit.formats.integer import scale_dtype
from quantkit.formats.schemes import SCHEMES
from quantkit.models import ModelSource, SourceWeights, open_source
from quantkit.program import build_program, fuse
from quantkit.quantize.alone import Alone, kl_alone
from quantkit.quantize.gradients import GradientWalk, choose
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sensitivity import (
    kl_by_sample,
    kl_by_token,
    loss_changes,
    predicted_kl,
    weight_error,
    weight_sensitivity,
)
from quantkit.runtime.text import ChatText

PACKAGED = Path(__file__).parents[1] / "calib" / "conversations.jsonl"
PREDICTORS = ("gradient", "by token only", "by sample only", "weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    parser.add_argument("--schemes", nargs="+", default=["W4A16_G64"])
    parser.add_argument("--calibration", type=Path, nargs="+", default=[PACKAGED])
    parser.add_argument("--tokens", type=int, default=4096, help="that gradients are taken on")
    parser.add_argument("--measured", type=int, default=1024, help="tokens that KL is measured on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = open_source(args.source)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source.write_tokenizer(work)
        every = load_samples(args.calibration, ChatText(work), max_samples=1000, max_tokens=4096, seed=0)
        measured_on = choose(every.samples, args.measured, args.seed + 1)
        held = {sample.ids for sample in measured_on.samples}
        learnt_from = choose([s for s in every.samples if s.ids not in held], args.tokens, args.seed)
        rows = check(source, args, learnt_from, measured_on, work)
    print("\n".join(rows))
    if args.out:
        args.out.write_text("\n".join(rows) + "\n")


def check(
    source: ModelSource, args: argparse.Namespace, learnt_from: CalibrationSet, measured_on: CalibrationSet, work: Path
) -> list[str]:
    """Markdown lines: one a (group, scheme), then one a predictor."""
    program, load = fuse(build_program(source.spec)), SourceWeights(source).tensor
    dtype = scale_dtype(source.spec.dtype)
    squares = collect(source, program, learnt_from).input_sq
    walk = GradientWalk(source, program, learnt_from, work, seed=args.seed)
    lengths = [len(sample.ids) for sample in learnt_from.samples]
    predicted: dict[Alone, list[float]] = {}
    for layer in range(walk.begin() - 1, min(args.layers) - 1, -1):
        groups = {
            n: w for n, w in program.groups().items() if n.startswith(f"layers.{layer}.") and layer in args.layers
        }
        taps = walk.taps(layer, list(groups))
        for group, weight in groups.items():
            matrix = load(weight)
            for scheme in args.schemes:
                quantized = rtn(matrix, SCHEMES[scheme], scale_dtype=dtype)
                changes = loss_changes(taps[group], weight_error(matrix, quantized))
                predicted[Alone(group, scheme)] = [
                    predicted_kl(changes, lengths),
                    kl_by_token(changes),
                    kl_by_sample(changes, lengths),
                    weight_sensitivity(matrix, quantized, squares[group]),
                ]
        walk.finish(layer)
    measured = kl_alone(
        source,
        program,
        measured_on,
        list(predicted),
        lambda weight, scheme: rtn(load(weight), SCHEMES[scheme], scale_dtype=dtype),
        work,
    )
    lines = [
        f"{args.source}: gradients on {learnt_from.tokens} tokens, KL measured on {measured_on.tokens} others",
        "",
        "| group | scheme | measured KL | " + " | ".join(PREDICTORS) + " |",
        "|---" * (3 + len(PREDICTORS)) + "|",
    ]
    for (alone, values), found in zip(predicted.items(), measured, strict=True):
        lines.append(f"| {alone.group} | {alone.scheme} | " + " | ".join(f"{v:.3g}" for v in (found, *values)) + " |")
    return [*lines, "", *_summary(np.array(list(predicted.values())), np.array(measured))]


def _summary(predicted: np.ndarray, measured: np.ndarray) -> list[str]:
    """Rank correlation; geometric mean and spread of measured / predicted."""
    lines = ["| predictor | rank correlation | measured / predicted | spread |", "|---|---|---|---|"]
    for name, values in zip(PREDICTORS, predicted.T, strict=True):
        ratios = np.log(measured / values)
        cells = (
            f"{spearmanr(values, measured).statistic:.3f} | {np.exp(ratios.mean()):.3g} | x{np.exp(ratios.std()):.2f}"
        )
        lines.append(f"| {name} | {cells} |")
    return lines


if __name__ == "__main__":
    main()
