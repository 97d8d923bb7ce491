"""Import parity: the source run by Transformers against the source run by our own program, both unquantized.

Both go layer by layer, so that memory does not grow with depth: Transformers' modules get their float32 weights from
our reader just before they run and lose them after; ours runs as slices of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantkit.errors import CheckpointError, NumericsError
from quantkit.models.source_weights import SourceWeights
from quantkit.program import slices
from quantkit.program.ir import Program
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs

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

    Raises NumericsError naming a tensor that holds NaN or Inf, CheckpointError when the two disagree.
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
        values, backend = executor.run_slice(inputs, read), executor.backend_name
        del executor
    (logits,) = values.values()
    return list(logits.split([len(ids) for ids in prompts])), backend


def transformers_logits(source: ModelSource, prompts: Sequence[list[int]], step: Step) -> list[Tensor]:
    """Float32 logits `[tokens, V]` of each prompt from Transformers' own model, eager attention, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{k: v for k, v in source.config.items() if k != "torch_dtype"})
    config.use_cache = False
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    known = set(source.reader.names())
    for prefix, module in model.named_modules():
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if own:
            _stream(module, {key: _tensor_name(f"{prefix}.{key}", known) for key in own}, source)
    layers = model.model.layers
    for done, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, done=done: step(done + 1, 2 * (len(layers) + 2), "Transformers"))
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask).logits.float()
    return [logits[row, : len(prompt)].clone() for row, prompt in enumerate(prompts)]


def _tensor_name(parameter: str, known: set[str]) -> str:
    """The checkpoint's name of a Transformers parameter; a tied head is read from the embedding."""
    if parameter not in known and parameter == "lm_head.weight":
        parameter = "model.embed_tokens.weight"
    if parameter not in known:
        raise CheckpointError("Transformers expects this tensor, the checkpoint does not hold it", where=parameter)
    return parameter


def require_finite(tensor: Tensor, name: str) -> None:
    """NumericsError naming the tensor and the count when it holds NaN or Inf."""
    bad = sum(int((~torch.isfinite(part)).sum()) for part in tensor.flatten().split(_CHUNK))
    if bad:
        raise NumericsError(
            f"{bad} of {tensor.numel()} weights are NaN or Inf",
            where=name,
            next="The checkpoint is damaged, or was converted to a type too narrow for it",
        )


def _stream(module: nn.Module, tensors: dict[str, str], source: ModelSource) -> None:
    """Make `module` hold its weights only while it runs."""

    def load(_: nn.Module, __: Any) -> None:
        for key, name in tensors.items():
            tensor = source.reader.read(name)
            require_finite(tensor, name)
            module.register_parameter(key, nn.Parameter(tensor.float(), requires_grad=False))

    def drop(_: nn.Module, __: Any, output: Any) -> Any:
        for key in tensors:
            module.register_parameter(key, nn.Parameter(torch.empty(0, device="meta"), requires_grad=False))
        return output

    module.register_forward_pre_hook(load)
    module.register_forward_hook(drop)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside keep their buffers (rope tables are computed there) and get parameters without memory."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
