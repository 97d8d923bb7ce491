"""Cut a slice of an artifact for gpu-check to carry to a GPU machine: `python tools/gpu_slice.py demo/artifact`.

Its first layers over its first tokens, as the kernels read them, with logits of the CPU's exact mode. At most 55 MiB.

    python tools/gpu_slice.py ARTIFACT [--layers 8] [--tokens 16384] [--out gpu-slice.safetensors]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels/benchmarks")]

from arguments import count  # noqa: E402
from gpu.decoder import BLOCK  # noqa: E402
from gpu.sliced import Slice  # noqa: E402

from quantkit.artifact.architecture import architecture  # noqa: E402
from quantkit.artifact.layout import scale_type  # noqa: E402
from quantkit.artifact.read import Artifact, open_artifact  # noqa: E402
from quantkit.errors import QuantkitError  # noqa: E402
from quantkit.formats.matrix import QuantizedMatrix  # noqa: E402
from quantkit.program import build_program, fuse, lower_precision, plan_buffers  # noqa: E402
from quantkit.program.ir import Program, Weight  # noqa: E402
from quantkit.resources import resource  # noqa: E402
from quantkit.runtime.executor import Executor  # noqa: E402
from quantkit_kernels.arrays import Array  # noqa: E402
from quantkit_kernels.tensors import as_tensor  # noqa: E402
from quantkit_kernels.triton.layout import pack_matrix  # noqa: E402

SEQUENCES, FURTHER, SHORTEST = 16, 3, 20
_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("artifact", type=Path)
    options.add_argument("--layers", type=count, default=8)
    options.add_argument("--tokens", type=count, default=16384, help="of the vocabulary")
    options.add_argument("--out", type=Path, default=ROOT / "gpu-slice.safetensors")
    given = options.parse_args()
    try:
        if given.out.exists() and not given.out.is_file():
            raise ValueError(f"{given.out} is there and is no file: name another with --out")
        made = cut(open_artifact(given.artifact), given.layers, given.tokens)
        made.save(given.out)
    except (QuantkitError, ValueError, OSError, SafetensorError) as error:
        print(f"gpu-slice: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {made.program.num_layers} layers, {given.out.stat().st_size / 2**20:.1f} MiB")
    return 0


@dataclass(frozen=True)
class _Cut:
    """The artifact's weights for a program that has fewer tokens."""

    artifact: Artifact

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        whole = self.artifact.load(self.artifact.program.weights[weight.name])
        rows = weight.shape[0]
        if not isinstance(whole, QuantizedMatrix):
            return whole[:rows]
        zero = None if whole.zero is None else whole.zero[:rows]
        return replace(whole, codes=whole.codes[:rows], scale=whole.scale[:rows], zero=zero)


def cut(artifact: Artifact, layers: int, tokens: int, sequences: int = SEQUENCES, further: int = FURTHER) -> Slice:
    """The artifact's first layers and tokens, and what the CPU makes of them in exact mode.

    sequences: prompts of 20, 22, 24 ... tokens. further: tokens of each that follow it. ValueError for what the kernels
    of gpu-check's decoder do not serve.
    """
    if artifact.manifest.kv_format != "INT8":
        raise ValueError(f"its cache is {artifact.manifest.kv_format}: gpu-check's decoder holds an INT8 one")
    spec = architecture(artifact)
    spec = replace(spec, layers=spec.layers[:layers], vocab_size=min(tokens, spec.vocab_size))
    fused = fuse(build_program(spec))
    schemes = {group: artifact.manifest.schemes[group] for group in fused.groups()}
    program = plan_buffers(lower_precision(fused, schemes, artifact.manifest.kv_format, "exact"))
    weights = _Cut(artifact)
    loaded = {name: weights.load(weight) for name, weight in program.weights.items()}
    type_ = _TYPES[scale_type(program)]
    matrices = {
        name: pack_matrix(
            torch.from_numpy(each.codes), torch.from_numpy(each.scale).to(type_),
            None if each.zero is None else torch.from_numpy(each.zero),
            bits=each.scheme.bits, group_size=each.scheme.group_size,
        )
        for name, each in loaded.items() if isinstance(each, QuantizedMatrix)
    }  # fmt: skip
    arrays = {}
    for name, each in loaded.items():
        if not isinstance(each, QuantizedMatrix):
            kind = program.weights[name].kind
            if kind == "matrix":
                raise ValueError(f"{name} is kept in 16 bits, which no Triton kernel multiplies")
            arrays[name] = as_tensor(each) if kind == "table" else as_tensor(each).float()
    unfinished = Slice(
        program, matrices, arrays, _sequences(artifact, program, sequences, further), torch.zeros(further + 1, 0, 0)
    )
    return replace(unfinished, expected=_exact(unfinished, weights))


def _sequences(artifact: Artifact, program: Program, wanted: int, further: int) -> list[list[int]]:
    """Held-out conversations without the tokens that were cut off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(artifact.folder / "tokenizer.json"))
    found: list[list[int]] = []
    for line in resource("evals/heldout.jsonl").read_text(encoding="utf-8").splitlines():
        text = " ".join(message["content"] for message in json.loads(line)["messages"])
        ids = [token for token in tokenizer.encode(text).ids if token < program.vocab_size]
        length = SHORTEST + 2 * len(found) + further
        if len(ids) >= length:
            found.append(ids[:length])
        if len(found) == wanted:
            return found
    raise ValueError("the held-out conversations hold too few of the first tokens: keep more of them")


def _exact(carried: Slice, weights: _Cut) -> torch.Tensor:
    executor = Executor(
        carried.program, weights, max_tokens=sum(map(len, carried.sequences)), max_seqs=len(carried.sequences),
        max_rows=len(carried.sequences), num_blocks=len(carried.sequences) * carried.blocks + 1, block_size=BLOCK,
        max_model_len=carried.blocks * BLOCK,
    )  # fmt: skip
    return torch.stack([torch.from_numpy(executor.step(inputs).copy()) for inputs, _ in carried.steps()])


if __name__ == "__main__":
    raise SystemExit(main())
