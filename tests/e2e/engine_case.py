"""A tiny quantized model with a quantized cache, and engines over it, for tests of the engine."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.formats.kv_cache import scale_from_absmax
from quantkit.models import open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.quantize.weights import RtnWeights
from quantkit.runtime.engine import EngineConfig, EngineCore
from quantkit.runtime.executor import Executor
from quantkit.runtime.request import EngineRequest, RequestOutput
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.scheduler import SchedulerConfig
from quantkit_kernels.tensors import as_array
from tests.tiny import make_checkpoint

VOCAB = 384
SCHEMES = {"qkv": "W8A16", "o": "FP16", "gate_up": "W4A16_G64", "down": "W4A16_G32_ASYM"}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def make_executor(
    folder: Path, *, family: str = "llama", num_blocks: int = 401, max_tokens: int = 1024, length: int = 1024,
    threads: int | None = None, backend: str = "cpu", spill: Path | None = None, compute: str = "int8",
    kv_format: str = "INT8",
) -> Executor:  # fmt: skip
    """An executor of a tiny random model: every group by another scheme, INT8 head, a quantized cache."""
    checkpoint = make_checkpoint(folder, family, dtype="float16", max_position_embeddings=length)
    source = open_source(str(checkpoint))
    program = fuse(build_program(source.spec))
    schemes = {group: SCHEMES.get(group.split(".")[-1], "W8A16") for group in program.groups()}
    lowered = lower_precision(program, schemes, kv_format, compute)
    kv_scales = {
        weight.name: as_array(scale_from_absmax(torch.full(weight.shape, 3.81), kv_format))
        for weight in lowered.weights.values()
        if weight.kind == "scales"
    }
    weights = RtnWeights(source, kv_scales=kv_scales)
    return Executor(
        lowered, weights, max_tokens=max_tokens, max_seqs=16, max_rows=16, num_blocks=num_blocks,
        max_model_len=length, threads=threads, backend=backend, spill=spill,
    )  # fmt: skip


def make_core(executor: Executor, **overrides: Any) -> EngineCore:
    """An engine over `executor`; fields of EngineConfig or SchedulerConfig by name."""
    capacity = executor.capacity
    own = {key: overrides.pop(key) for key in list(overrides) if key in EngineConfig.__dataclass_fields__}
    extra = {key: overrides.pop(key) for key in ("on_logits", "clock") if key in overrides}
    scheduler = {
        "max_num_seqs": 16, "max_num_batched_tokens": capacity.max_tokens, "max_model_len": capacity.max_model_len,
    } | overrides  # fmt: skip
    config = {
        "vocab_size": executor.program.vocab_size, "num_blocks": capacity.num_blocks, "check_prefix_tokens": True,
    } | own  # fmt: skip
    return EngineCore(executor, EngineConfig(**config, scheduler=SchedulerConfig(**scheduler)), **extra)


def prompts(count: int, *, seed: int = 0, low: int = 5, high: int = 60, vocab: int = VOCAB) -> list[list[int]]:
    """Random prompts of different lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(10, vocab, int(random.integers(low, high))).tolist() for _ in range(count)]


def drain(core: EngineCore, limit: int = 20_000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left, the books checked after every step; outputs by request."""
    outputs: dict[str, list[RequestOutput]] = defaultdict(list)
    for _ in range(limit):
        if not core.has_work():
            return outputs
        for output in core.step():
            outputs[output.request_id].append(output)
        core.check()
    raise RuntimeError("the engine made no end of it")


def run(
    core: EngineCore, asked: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], **kwargs: Any
) -> list[list[int]]:
    """Generate for all prompts together; token ids in order."""
    each = [params] * len(asked) if isinstance(params, SamplingParams) else params
    for i, (prompt, sampling) in enumerate(zip(asked, each, strict=True)):
        core.add_request(EngineRequest(f"r{i}", prompt, sampling, **kwargs))
    outputs = drain(core)
    return [[token for output in outputs[f"r{i}"] for token in output.token_ids] for i in range(len(asked))]


class LogitsDigest:
    """Observer: SHA-256 over each request's logits rows, every output position once and in order."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = defaultdict(hashlib.sha256)
        self.rows: dict[str, int] = defaultdict(int)

    def __call__(self, request_id: str, position: int, row: np.ndarray) -> None:
        """One row."""
        if position != self.rows[request_id]:
            raise RuntimeError(f"{request_id}: position {position} after {self.rows[request_id]} rows")
        self.rows[request_id] += 1
        self._hashes[request_id].update(row.tobytes())

    def digests(self) -> dict[str, str]:
        """Request id -> hexadecimal digest."""
        return {name: digest.hexdigest() for name, digest in sorted(self._hashes.items())}
