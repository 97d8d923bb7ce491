"""Predicted against measured: does the sensitivity of a group tell what quantizing it alone does to the model?

    python tools/sensitivity_check.py SOURCE --layers 0 7 15 22 29 --schemes W4A16_G64 W8A16 [--out TABLE.md]

For every (group, scheme) of the layers named: the mean KL divergence of the next-token distribution when this group
alone is quantized, measured by running the layers above it again, beside what the build's sensitivity stage predicts
from gradients (by token, and by sample) and from weights alone. Text for the measurement is drawn apart from the
text that gradients are taken on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from quantkit.calibration.dataset import load_samples
from quantkit.calibration.samples import CalibrationSet
from quantkit.calibration.statistics import collect
from quantkit.calibration.steps import sample_steps, slice_executor
from quantkit.formats.integer import scale_dtype
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES
from quantkit.gate.stream import Head
from quantkit.models import ModelSource, SourceWeights, open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.program.ir import Program, Weight
from quantkit.program.slices import slices
from quantkit.quantize.gradients import GradientWalk, choose
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sensitivity import kl_by_sample, kl_by_token, loss_changes, weight_error, weight_sensitivity
from quantkit.runtime.text import ChatText

PACKAGED = Path(__file__).parents[1] / "calib" / "conversations.jsonl"
PREDICTORS = ("gradient, by token", "gradient, by sample", "weight")
_ROWS = 128


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
        every = load_samples(args.calibration, ChatText(work), max_samples=1000, max_tokens=512, seed=0)
        measured_on = choose(every.samples, args.measured, args.seed + 1)
        held = {sample.ids for sample in measured_on.samples}
        learnt_from = choose([s for s in every.samples if s.ids not in held], args.tokens, args.seed)
        rows = check(source, args, learnt_from, measured_on, work)
    print("\n".join(rows[-len(PREDICTORS) - 4 :]))
    if args.out:
        args.out.write_text("\n".join(rows) + "\n")


def check(
    source: ModelSource, args: argparse.Namespace, learnt_from: CalibrationSet, measured_on: CalibrationSet, work: Path
) -> list[str]:
    """Markdown lines: one a (group, scheme), then one a predictor."""
    program, load = fuse(build_program(source.spec)), SourceWeights(source).load
    squares = collect(source, program, learnt_from).input_sq
    walk = GradientWalk(source, program, learnt_from, work, seed=args.seed)
    model = Model(source, program, measured_on)
    lengths = [len(sample.ids) for sample in learnt_from.samples]
    predicted: list[list[float]] = []
    measured: list[float] = []
    lines = [
        f"{args.source}: gradients on {learnt_from.tokens} tokens, KL measured on {measured_on.tokens} others",
        "",
        "| group | scheme | measured KL | " + " | ".join(PREDICTORS) + " |",
        "|---" * (3 + len(PREDICTORS)) + "|",
    ]
    for layer in range(walk.begin() - 1, -1, -1):
        groups = {
            n: w for n, w in program.groups().items() if n.startswith(f"layers.{layer}.") and layer in args.layers
        }
        taps = walk.taps(layer, list(groups))
        for group, weight in groups.items():
            matrix = load(weight)
            for scheme in args.schemes:
                quantized = rtn(matrix, SCHEMES[scheme], scale_dtype=scale_dtype(getattr(torch, source.spec.dtype)))
                changes = loss_changes(taps[group], weight_error(matrix, quantized))
                by_weight = weight_sensitivity(matrix, quantized, squares[group])
                predicted.append([kl_by_token(changes), kl_by_sample(changes, lengths), by_weight])
                measured.append(model.kl(layer, group, quantized))
                cells = " | ".join(f"{value:.3g}" for value in (measured[-1], *predicted[-1]))
                lines.append(f"| {group} | {scheme} | {cells} |")
                print(lines[-1], flush=True)
        walk.finish(layer)
        if layer <= min(args.layers):
            break
    return [*lines, "", *_summary(np.array(predicted), np.array(measured))]


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


class Model:
    """The unquantized model with its activations at every boundary held, to be run again from any layer on."""

    def __init__(self, source: ModelSource, program: Program, samples: CalibrationSet) -> None:
        self._source, self._program = source, program
        (self._step,) = sample_steps(samples.samples, 1 << 20)
        weights = SourceWeights(source)
        self._slices = [slice_executor(piece, weights, [self._step]) for piece in slices(program)[:-1]]
        self._head = Head(program, weights, rows=_ROWS, threads=torch.get_num_threads(), backend="auto")
        self._before: list[dict[str, Tensor]] = [{}]
        for executor in self._slices:
            self._before.append(executor.run_slice(self._step.inputs(), self._before[-1]))

    def kl(self, layer: int, group: str, quantized: QuantizedMatrix) -> float:
        """Mean KL(original ‖ with this one group quantized) in nats over all tokens."""
        lowered = slices(lower_precision(self._program, {group: quantized.scheme.name}, "FP32"))[layer + 1]
        weights = _One(self._source, group, quantized)
        values = slice_executor(lowered, weights, [self._step]).run_slice(self._step.inputs(), self._before[layer + 1])
        for executor in self._slices[layer + 2 :]:
            values = executor.run_slice(self._step.inputs(), values)
        total = 0.0
        for rows in np.array_split(np.arange(self._step.tokens), -(-self._step.tokens // _ROWS)):
            ours, theirs = (self._log_probabilities(v, rows) for v in (self._before[-1], values))
            total += float((ours.exp() * (ours - theirs)).sum())
        return total / self._step.tokens

    def _log_probabilities(self, values: dict[str, Tensor], rows: Sequence[int] | np.ndarray) -> Tensor:
        logits = self._head.logits({name: value.numpy() for name, value in values.items()}, np.asarray(rows))
        return torch.log_softmax(logits.double(), dim=-1)


class _One:
    """One group quantized, the source's weights for the rest."""

    def __init__(self, source: ModelSource, group: str, quantized: QuantizedMatrix) -> None:
        self._source, self._group, self._quantized = SourceWeights(source), group, quantized

    def load(self, weight: Weight) -> Tensor | QuantizedMatrix:
        return self._quantized if weight.group == self._group else self._source.load(weight)


if __name__ == "__main__":
    main()
