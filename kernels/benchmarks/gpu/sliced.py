"""A slice of a real artifact that is small enough to carry to a GPU machine, and what the CPU's exact mode makes of it.

One safetensors file: the program of the artifact's first layers over its first tokens, weights as the kernels read
them, sequences of token ids, and float32 logits by the native CPU library: of each sequence's last prompt token, then
of a few further tokens one by one. `tools/gpu_slice.py` makes it where there is a compiler; here it is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpu.ahead import Ahead
from gpu.decoder import BLOCK, Decoder
from gpu.report import Section
from quantkit.errors import QuantkitError
from quantkit.formats.schemes import scheme
from quantkit.program import program_from_json, program_to_json
from quantkit.program.ir import Program
from quantkit.runtime.step import StepInputs
from quantkit_kernels.triton.layout import GpuMatrix

MOST_BYTES = 55 << 20
BOUND = 0.01
"""Mean KL of the GPU's FP16 activations from the CPU's exact mode above which something is wrong."""
_PARTS = ("words", "scale", "zero")


@dataclass(frozen=True)
class Slice:
    """matrices, arrays: weights by name, on the CPU. sequences: token ids, the last `further` of which are decoded.
    expected: float32 `[1 + further, sequences, V]`."""

    program: Program
    matrices: dict[str, GpuMatrix]
    arrays: dict[str, Tensor]
    sequences: list[list[int]]
    expected: Tensor

    @property
    def further(self) -> int:
        """Tokens of a sequence that follow its prompt."""
        return self.expected.shape[0] - 1

    @property
    def blocks(self) -> int:
        """Cache blocks a sequence."""
        return -(-max(map(len, self.sequences)) // BLOCK)

    def steps(self) -> Iterator[tuple[StepInputs, Tensor]]:
        """Each step and the logits that it must give: all prompts together, then a token of every sequence."""
        tables = [list(range(1 + i * self.blocks, 1 + (i + 1) * self.blocks)) for i in range(len(self.sequences))]
        for at in range(self.further + 1):
            ends = [len(ids) - self.further + at for ids in self.sequences]
            starts = [end - 1 if at else 0 for end in ends]
            tokens = [ids[start:end] for ids, start, end in zip(self.sequences, starts, ends, strict=True)]
            yield StepInputs.of_sequences(tokens, tables, starts=starts, block_size=BLOCK), self.expected[at]

    def save(self, path: Path) -> None:
        """ValueError where the file would be larger than MOST_BYTES."""
        tensors = {f"array {name}": array for name, array in self.arrays.items()}
        for name, matrix in self.matrices.items():
            for part in _PARTS:
                if getattr(matrix, part) is not None:
                    tensors[f"{part} {name}"] = getattr(matrix, part)
        tensors["tokens"] = torch.tensor([token for ids in self.sequences for token in ids], dtype=torch.int32)
        tensors["lengths"] = torch.tensor([len(ids) for ids in self.sequences], dtype=torch.int32)
        tensors["expected"] = self.expected
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > MOST_BYTES:
            raise ValueError(
                f"the slice takes {size / 2**20:.1f} MiB, more than {MOST_BYTES >> 20}: fewer layers or tokens"
            )
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, path, {"program": program_to_json(self.program)}
        )


def load(path: Path) -> Slice:
    """The slice in a file."""
    with safe_open(path, "pt") as file:
        program = program_from_json(file.metadata()["program"], str(path))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    matrices = {}
    for name, weight in program.weights.items():
        if weight.kind == "matrix":
            how, (words, scale, zero) = scheme(weight.scheme), (tensors.get(f"{part} {name}") for part in _PARTS)
            assert words is not None
            assert scale is not None
            matrices[name] = GpuMatrix(words, scale, zero, weight.shape[1], how.bits, how.group_size)
    arrays = {name.removeprefix("array "): tensor for name, tensor in tensors.items() if name.startswith("array ")}
    ids = iter(tensors["tokens"].tolist())
    sequences = [[next(ids) for _ in range(count)] for count in tensors["lengths"].tolist()]
    return Slice(program, matrices, arrays, sequences, tensors["expected"])


class CarriedWeights:
    """A slice's weights on a device."""

    def __init__(self, carried: Slice, device: str) -> None:
        self.matrices = {name: _moved(matrix, device) for name, matrix in carried.matrices.items()}
        self.arrays = {name: array.to(device) for name, array in carried.arrays.items()}


def _moved(matrix: GpuMatrix, device: str) -> GpuMatrix:
    zero = None if matrix.zero is None else matrix.zero.to(device)
    return replace(matrix, words=matrix.words.to(device), scale=matrix.scale.to(device), zero=zero)


def check(section: Section, dry: bool, path: Path) -> None:
    """KL of the GPU's logits from the CPU's exact mode, for prompts and for each token after them."""
    if not path.exists():
        section.notes.append(
            f"left out: no {path} (python tools/gpu_slice.py ARTIFACT makes it, on the building machine)"
        )
        return
    try:
        carried, device = load(path), "cpu" if dry else "cuda"
    except (SafetensorError, LookupError, TypeError, QuantkitError) as error:
        raise ValueError(f"{path} is no slice ({error}): tools/gpu_slice.py ARTIFACT makes one") from None
    decoder = Decoder(
        carried.program, CarriedWeights(carried, device), max_tokens=sum(map(len, carried.sequences)),
        max_seqs=len(carried.sequences), max_model_len=carried.blocks * BLOCK, ahead=Ahead(dry), device=device,
    )  # fmt: skip
    section.notes.append(f"{carried.program.num_layers} layers, {carried.program.vocab_size} tokens, "
                         f"{path.stat().st_size / 2**20:.1f} MiB")  # fmt: skip
    for at, (inputs, expected) in enumerate(carried.steps()):
        decoder.write(inputs)
        decoder.logits.fill_(float("nan"))
        for call in decoder.bind(len(inputs.token_ids), len(inputs.seq_lens), decodes=at > 0):
            call()
        found = decoder.logits[: len(expected)].float().cpu()
        kl = divergence(expected, found)
        agree = int((found.argmax(1) == expected.argmax(1)).sum())
        section.rows.append({
            "what": f"token {at} after {len(expected)} prompts" if at else f"{len(expected)} prompts",
            "ok": float(kl.mean()) <= BOUND, "mean KL": float(kl.mean()), "largest KL": float(kl.max()),
            "same top-1": f"{agree} of {len(expected)}",
        })  # fmt: skip


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL(expected || found) of each row of logits, nats; infinite where one found is no number."""
    p, q = expected.double().log_softmax(1), found.double().log_softmax(1)
    return ((p.exp() * (p - q)).sum(1)).nan_to_num(nan=float("inf"))
