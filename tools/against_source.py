"""How far models are from the one they were made from, token by token through the serving runtime.

    python tools/against_source.py SOURCE OTHER [OTHER ...] --data evals/heldout.jsonl [--out TABLE.md]

OTHER is an artifact's folder, or a source of any kind, whose weights are dequantized: llama.cpp's own Q4_0 file, say. A
source runs with a float cache and exact products, an artifact as it is served.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from quantkit.artifact.layout import MANIFEST
from quantkit.artifact.read import open_artifact
from quantkit.gate.data import make_windows, read_conversations
from quantkit.gate.evaluate import Baseline, Variant
from quantkit.gate.rungs import baseline
from quantkit.models import open_source
from quantkit.models.source_weights import SourceWeights
from quantkit.program import build_program, fuse, lower_precision
from quantkit.runtime.text import ChatText


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("others", nargs="+")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source, threads = open_source(args.source), torch.get_num_threads()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        source.write_tokenizer(Path(folder))
        held_out = read_conversations(args.data)
        limits = {"max_samples": args.windows, "max_tokens": args.tokens, "max_window": 512, "seed": 0}
        data = make_windows(held_out, ChatText(Path(folder)), **limits)
    base = Baseline(baseline(source, threads, "auto"), data, lambda tokens: None, floor_windows=1)
    lines = [
        f"{args.source}, {data.scored} tokens of {len(data.windows)} windows",
        "",
        "| model | mean KL ± SE | P99 | same top-1 |",
        "|---|---|---|---|",
    ]
    for name in args.others:
        scores = base.compare(variant(name, threads), lambda tokens: None).scores
        means = np.array([scores.kl[scores.cluster == i].mean() for i in range(len(data.windows))])
        lines.append(
            f"| {name} | {scores.kl.mean():.4f} ± {means.std() / len(means) ** 0.5:.4f} "
            f"| {np.quantile(scores.kl, 0.99):.3f} | {scores.same.mean():.1%} |"
        )
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(table)
    if args.out:
        args.out.write_text(table + "\n")


def variant(name: str, threads: int) -> Variant:
    """The model at `name` as it is served, or with its weights dequantized."""
    if (Path(name) / MANIFEST).is_file():
        artifact = open_artifact(name)
        return Variant(name, artifact.program, artifact, threads)
    source = open_source(name)
    return Variant(name, lower_precision(fuse(build_program(source.spec)), {}, "FP32"), SourceWeights(source), threads)


if __name__ == "__main__":
    main()
