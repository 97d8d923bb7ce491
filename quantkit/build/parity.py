"""Import parity: the source run by Transformers against the source run by our own program, both unquantized.

Both go layer by layer, so that memory does not grow with depth: accelerate gives Transformers' modules their float32
weights from our reader just before they run and takes them away after; ours runs as slices of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, NumericsError
from quantkit.freed_memory import return_freed_memory
from quantkit.models.source_weights import SourceWeights
from quantkit.program import slices
from quantkit.program.ir import Program
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs
from quantkit.runtime.tensors import run_slice

if TYPE_CHECKING:
    from quantkit.models import ModelSource

LIMIT = 2e-3
"""Greatest logit difference, as a share of the largest logit: float32 sums in another order stay far below, a wrong
rope, norm or mask far above."""
_BLOCK = 16
_CHUNK = 1 << 22


Step = Callable[[int, int, str], None]
"""Hears (done, total, what)."""


@dataclass(frozen=True)
class Parity:
    """Logits of both over all prompts. `max_abs_diff` in logits; `same_top1` a share."""

    prompts: int
    tokens: int
    max_abs_diff: float
    max_abs_logit: float
    same_top1: float
    transformers: str
    backend: str


def import_parity(
    source: ModelSource, program: Program, prompts: Sequence[list[int]], step: Step = lambda done, total, what: None
) -> Parity:
    """Compare the two on `prompts` (token ids). Every weight passes by once on the way and is checked to be finite.

    Raises NumericsError naming a tensor that holds NaN or Inf, or for a model that makes such logits by itself,
    CheckpointError when the two disagree.
    """
    import transformers

    theirs = transformers_logits(source, prompts, step)
    ours, backend = program_logits(source, program, prompts, step)
    reference, candidate = torch.cat(theirs), torch.cat(ours)
    result = Parity(
        prompts=len(prompts),
        tokens=len(reference),
        max_abs_diff=float((reference - candidate).abs().max()),
        max_abs_logit=float(reference.abs().max()),
        same_top1=float((reference.argmax(-1) == candidate.argmax(-1)).float().mean()),
        transformers=transformers.__version__,
        backend=backend,
    )
    if not math.isfinite(result.max_abs_logit):
        raise NumericsError(
            "the unquantized model itself makes logits of NaN or Inf, in float32 and in Transformers",
            where=source.location,
            next="Its weights are finite and too large: fetch or convert the checkpoint again",
        )
    if not result.max_abs_diff <= LIMIT * result.max_abs_logit:  # catches NaN too
        raise CheckpointError(
            f"our program and Transformers disagree on the unquantized model: logits up to {result.max_abs_logit:.3g} "
            f"differ by {result.max_abs_diff:.3g}",
            where=source.location,
            next="The adapter reads this checkpoint wrongly; please report it with config.json",
        )
    return result


def program_logits(
    source: ModelSource, program: Program, prompts: Sequence[list[int]], step: Step
) -> tuple[list[Tensor], str]:
    """Float32 logits `[tokens, V]` of each prompt through our executor, slice by slice, and the backend's name."""
    longest = max(map(len, prompts))
    blocks_each = -(-longest // _BLOCK)
    blocks = [list(range(1 + b * blocks_each, 1 + (b + 1) * blocks_each)) for b in range(len(prompts))]
    inputs = StepInputs.of_sequences(list(prompts), blocks, block_size=_BLOCK, logits="all")
    weights, values, backend = SourceWeights(source), dict[str, Tensor](), ""
    pieces = slices(program)
    for done, piece in enumerate(pieces):
        step(len(pieces) + done, 2 * len(pieces), "our program")
        executor = Executor(
            piece,
            weights,
            max_tokens=len(inputs.token_ids),
            max_seqs=len(prompts),
            num_blocks=1 + blocks_each * len(prompts),
            max_model_len=longest,
            block_size=_BLOCK,
        )
        read = {name: value for name, value in values.items() if name in piece.inputs}
        values, backend = run_slice(executor, inputs, read), executor.backend_name
        del executor
        return_freed_memory()
    (logits,) = values.values()
    return list(logits.split([len(ids) for ids in prompts])), backend


def transformers_logits(source: ModelSource, prompts: Sequence[list[int]], step: Step) -> list[Tensor]:
    """Float32 logits `[tokens, V]` of each prompt from Transformers' own model, eager attention, float32."""
    from accelerate import init_empty_weights
    from accelerate.hooks import attach_align_device_hook
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{k: v for k, v in source.config.items() if k != "torch_dtype"})
    config.use_cache = False
    with init_empty_weights(include_buffers=False):  # rope tables are computed, not read
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    attach_align_device_hook(model, execution_device=torch.device("cpu"), offload=True, weights_map=_Checkpoint(source))
    layers = model.model.layers

    def enter(done: int) -> None:
        return_freed_memory()
        step(done + 1, 2 * (len(layers) + 2), "Transformers")

    for done, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, done=done: enter(done))
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask).logits.float()
    return [logits[row, : len(prompt)].clone() for row, prompt in enumerate(prompts)]


class _Checkpoint(Mapping[str, Tensor]):
    """Transformers' parameters by name, each read when it is asked for: finite, float32."""

    def __init__(self, source: ModelSource) -> None:
        self._reader, self._names = source.reader, frozenset(source.reader.names())

    def __getitem__(self, parameter: str) -> Tensor:
        name = parameter
        if name not in self._names and name == "lm_head.weight":  # a tied head is read from the embedding
            name = "model.embed_tokens.weight"
        if name not in self._names:
            raise CheckpointError("Transformers expects this tensor, the checkpoint does not hold it", where=parameter)
        tensor = self._reader.read(name)
        require_finite(tensor, name)
        return tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def require_finite(tensor: Tensor, name: str) -> None:
    """NumericsError naming the tensor and the count when it holds NaN or Inf."""
    bad = sum(int((~torch.isfinite(part)).sum()) for part in tensor.flatten().split(_CHUNK))
    if bad:
        raise NumericsError(
            f"{bad} of {tensor.numel()} weights are NaN or Inf",
            where=name,
            next="The checkpoint is damaged, or was converted to a type too narrow for it",
        )
