"""Decode speed of an artifact beside Transformers in float32 on the same source model, in one run.

    python kernels/benchmarks/against_transformers.py ARTIFACT [--source LOCATION] [--rounds 5]

Both decode 96 tokens greedily after a prompt of 32 random tokens, one sequence, two threads; the rounds alternate, the
medians and their ratio are printed. The source is read through quantkit's own reader into Transformers' model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from arguments import count
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.artifact.read import open_artifact
from quantkit.bench import throughput
from quantkit.models.source import open_source

PROMPT, OUTPUT = throughput.DECODE_PROMPT, throughput.DECODE_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--source", help="default: what the artifact's manifest names")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--threads", type=count, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = args.source or open_artifact(args.artifact).manifest.source["location"]
    model = transformers_model(source)
    core = throughput.load(args.artifact, args.threads)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(args.rounds):
        ours.append(decode_ours(core))
        theirs.append(decode_theirs(model))
    result = {
        "quantkit decode_1, tok/s": round(statistics.median(ours), 1),
        "transformers float32 decode_1, tok/s": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 2),
        "rounds": args.rounds,
    }
    print(json.dumps(result))


def transformers_model(location: str) -> torch.nn.Module:
    """The source as Transformers runs it, in float32."""
    source = open_source(location)
    with tempfile.TemporaryDirectory() as folder:
        source.write_tokenizer(Path(folder))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    state = {name: source.reader.read(name).to(torch.float32) for name in source.reader.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the source does not fit Transformers' model: {missing} {unexpected}")
    model.tie_weights()
    return model.eval()


def decode_ours(core: throughput.EngineCore) -> float:
    run = throughput.run(core, np.random.default_rng(0), 1, PROMPT, OUTPUT + 1)
    return OUTPUT / (run.total - run.first_tokens)


def decode_theirs(model: torch.nn.Module) -> float:
    ids = torch.randint(100, 40_000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=True)
        start = time.perf_counter()
        for _ in range(OUTPUT):
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        return OUTPUT / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
