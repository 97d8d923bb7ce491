"""What each format of the KV cache costs: the unquantized model with it, token by token against a float32 cache.

    python tools/kv_fidelity.py SOURCE [--data evals/heldout.jsonl] [--windows 16] [--window 256] [--out TABLE.md]

Weights stay as they are, so that the cache is all that differs; scales are calibrated as `quantkit build` calibrates
them. `bits a value` counts the levels of groups.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantkit.calibration.dataset import load_samples
from quantkit.calibration.statistics import collect
from quantkit.gate.data import make_windows, read_conversations, refuse_overlap
from quantkit.gate.evaluate import Baseline, Variant
from quantkit.gate.rungs import baseline
from quantkit.models import ModelSource, open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.quantize.kv import kv_scales
from quantkit.quantize.weights import RtnWeights
from quantkit.runtime.text import ChatText
from quantkit_kernels.cache_formats import CACHE_FORMATS

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--data", type=Path, nargs="+", default=[ROOT / "evals" / "heldout.jsonl"])
    parser.add_argument("--calibration", type=Path, nargs="+", default=[ROOT / "calib" / "conversations.jsonl"])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=256, help="tokens of a window at most")
    parser.add_argument("--formats", nargs="+", default=["BF16", "INT8", "FP8", "INT4"], choices=CACHE_FORMATS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = open_source(args.source)
    with tempfile.TemporaryDirectory() as folder:
        source.write_tokenizer(Path(folder))
        rows = compare(source, args, ChatText(Path(folder)))
    print(rows)
    if args.out:
        args.out.write_text(rows + "\n")


def compare(source: ModelSource, args: argparse.Namespace, text: ChatText) -> str:
    """A Markdown table: a format a row, mean KL in nats a token."""
    held_out, most = read_conversations(args.data), args.windows * args.window
    refuse_overlap(held_out, read_conversations(args.calibration, strict=False))
    data = make_windows(held_out, text, max_samples=args.windows, max_tokens=most, max_window=args.window, seed=0)
    samples = load_samples(args.calibration, text, max_samples=args.samples, max_tokens=512, seed=0)
    program = fuse(build_program(source.spec))
    ranges = collect(source, program, samples).kv_range()
    threads = torch.get_num_threads()
    base = Baseline(baseline(source, threads, "auto"), data, lambda tokens: None, floor_windows=1)
    lines = [
        f"{args.source}, {data.scored} tokens of {len(data.windows)} windows of at most {args.window}, "
        f"calibrated on {len(samples.samples)} samples ({samples.tokens} tokens)",
        "",
        "| cache | bits a value | mean KL ± SE | P99 | same top-1 |",
        "|---|---|---|---|---|",
    ]
    for form in args.formats:
        kind, size = CACHE_FORMATS[form], program.kv[0].head_dim
        scales: dict[str, Tensor] = {}
        if kind.scaled:
            scales = {f"{name}_scale": kv_scales(seen, form, where=name) for name, seen in ranges.items()}
        lowered = lower_precision(program, {}, form)
        variant = Variant(form, lowered, RtnWeights(source, kv_scales=scales), threads)
        scores = base.compare(variant, lambda tokens: None).scores
        means = np.array([scores.kl[scores.cluster == i].mean() for i in range(len(data.windows))])
        lines.append(
            f"| {form} | {8 * kind.cell_bytes(size) / size:g} | {scores.kl.mean():.5f} ± "
            f"{means.std() / len(means) ** 0.5:.5f} | {np.quantile(scores.kl, 0.99):.4f} | {scores.same.mean():.1%} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
