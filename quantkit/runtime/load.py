"""From an artifact, or from a source model unquantized, to an engine core ready to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.artifact.layout import MANIFEST
from quantkit.artifact.marks import Mark, check_unchanged
from quantkit.artifact.read import Artifact, open_artifact
from quantkit.errors import CheckpointError, RecipeError
from quantkit.program import Program, WeightProvider, build_program, fuse, lower_precision
from quantkit.runtime.admission import Standing, read_standing, target_of
from quantkit.runtime.engine import EngineConfig, EngineCore
from quantkit.runtime.executor import Executor
from quantkit.runtime.memory import MemoryPlan, plan_memory
from quantkit.runtime.scheduler import SchedulerConfig
from quantkit.runtime.text import ChatText
from quantkit_kernels.cache_formats import CACHE_FORMATS

_SEQS, _TOKENS = 16, 512
_LIMITS = {"max_num_seqs": 1024, "max_model_len": 1 << 31, "max_num_batched_tokens": 65_536}
"""What a recipe may say about serving, each with the most it may ask for."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to serve a model.

    max_num_seqs, max_model_len (prompt and answer together), max_num_batched_tokens: None: what the artifact's recipe
    says, else 16, all the model's positions, 512. kv_cache_gib: None: what the
    limits need, at most 1 GiB and 90 % of what memory is left beside the weights. threads: None: the cores there are.
    backend: auto, cpu or reference.
    """

    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_gib: float | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_utilization: bool = False
    """Admit by prompt alone and preempt when blocks run out, instead of admitting only what can finish."""
    threads: int | None = None
    backend: str = "auto"
    accept_ungated: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in {**_LIMITS, "kv_cache_gib": 1 << 20, "block_size": 1024, "threads": 1024}.items():
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise RecipeError(f"{name} must be greater than 0, got {value}")
            if value is not None and not value <= most:
                raise RecipeError(f"{name} must be at most {most}, got {value}")


@dataclass(frozen=True)
class Loaded:
    """A model ready to serve. `standing` and `payload_digest` say "none" and "" for an unquantized source.

    marks: of the artifact's files, none for a source.
    """

    core: EngineCore
    executor: Executor
    text: ChatText
    memory: MemoryPlan
    max_model_len: int
    kv_format: str
    standing: Standing
    payload_digest: str
    target: dict[str, str] = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)


def load_artifact(path: Path | str, options: EngineOptions | None = None) -> Loaded:
    """Open, verify, admit and load an artifact.

    Raises:
        CheckpointError: it cannot be read or trusted, or was changed meanwhile. NotAdmitted: it may not serve here.
        RecipeError, PreflightError: options that contradict the model, or memory that is not there.
    """
    artifact = open_artifact(Path(path))
    options = _as_recipe_says(options or EngineOptions(), artifact)
    standing = read_standing(artifact.folder, artifact.payload_digest)
    if standing.verdict == "fail":  # known before any weight is read
        standing.admit({}, accept_ungated=False, where=str(path))
    executor, memory, limits = load_executor(artifact.program, artifact, options)
    kv_format = _kv_format(artifact.program)
    target = target_of(executor.backend_name, executor.program.compute, kv_format)
    standing.admit(target, accept_ungated=options.accept_ungated, where=str(path))
    text = ChatText(artifact.folder)
    check_unchanged(artifact.folder, artifact.marks)
    digest = artifact.payload_digest
    core = _core(executor, text, memory, limits, options, f"{digest} {kv_format}")
    return Loaded(
        core, executor, text, memory, limits.max_model_len, kv_format, standing, digest, target, artifact.marks
    )


def load_source(
    location: str, options: EngineOptions | None = None, *, kv_format: str = "FP32", base: Path = Path(".")
) -> Loaded:
    """Load a source model unquantized, weights in its own type, keys and values in a float format."""
    from quantkit.models.source import open_source  # imports torch, which serving an artifact does without
    from quantkit.models.source_weights import SourceWeights

    options = options or EngineOptions()
    plain = [kind.name for kind in CACHE_FORMATS.values() if not kind.scaled]
    if kv_format not in plain:
        raise RecipeError(f"an unquantized model has no {kv_format} cache", next=f"Choose one of {', '.join(plain)}")
    source = open_source(location, base=base)
    program = lower_precision(fuse(build_program(source.spec)), {}, kv_format)
    executor, memory, limits = load_executor(program, SourceWeights(source), options)
    text = ChatText.of_source(source)
    core = _core(executor, text, memory, limits, options, f"{source.fingerprint()} {kv_format}")
    target = target_of(executor.backend_name, executor.program.compute, kv_format)
    return Loaded(core, executor, text, memory, limits.max_model_len, kv_format, Standing("none"), "", target)


def _as_recipe_says(options: EngineOptions, artifact: Artifact) -> EngineOptions:
    """`options` with the limits that were left open taken from the recipe the artifact was built by."""
    stated = artifact.manifest.recipe.get("runtime")
    limits: dict[str, Any] = {}
    for name, most in _LIMITS.items():
        value = stated.get(name) if isinstance(stated, dict) else None
        if value is None or getattr(options, name) is not None:
            continue
        if type(value) is not int or not 0 < value <= most:
            where = str(artifact.folder / MANIFEST)
            raise CheckpointError(f"recipe.runtime.{name} is {str(value)[:40]}, not 1 to {most}", where=where)
        limits[name] = value
    return replace(options, **limits)


def load_executor(
    program: Program, weights: WeightProvider, options: EngineOptions
) -> tuple[Executor, MemoryPlan, SchedulerConfig]:
    """An executor for `program` within `options`, the memory it was given and the limits it was made for.

    Options that contradict each other or the model are refused before a weight is read.
    """
    length = options.max_model_len or program.max_position
    seqs, tokens = options.max_num_seqs or _SEQS, options.max_num_batched_tokens or _TOKENS
    if length > program.max_position:
        raise RecipeError(f"max_model_len {length} exceeds the {program.max_position} positions the model was made for")
    limits = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        block_size=options.block_size,
        admission="max-utilization" if options.max_utilization else "no-evict",
    )
    memory = plan_memory(
        program,
        max_num_seqs=seqs,
        max_model_len=length,
        block_size=options.block_size,
        kv_cache_bytes=None if options.kv_cache_gib is None else int(options.kv_cache_gib * (1 << 30)),
    )
    executor = Executor(
        program,
        weights,
        max_tokens=tokens,
        max_seqs=seqs,
        max_rows=seqs,
        num_blocks=memory.num_blocks,
        block_size=options.block_size,
        max_model_len=length,
        threads=options.threads,
        backend=options.backend,
        huge_cache=True,
    )
    return executor, memory, limits


def _core(
    executor: Executor,
    text: ChatText,
    memory: MemoryPlan,
    limits: SchedulerConfig,
    options: EngineOptions,
    identity: str,
) -> EngineCore:
    config = EngineConfig(
        vocab_size=executor.program.vocab_size,
        num_blocks=memory.num_blocks,
        scheduler=limits,
        stop_token_ids=text.stop_token_ids,
        enable_prefix_caching=options.enable_prefix_caching,
        cache_identity=identity,
        seed=options.seed,
        threads=options.threads,
    )
    return EngineCore(executor, config)


def _kv_format(program: Program) -> str:
    return "+".join(sorted({kv.format for kv in program.kv}))
