"""The recipe as typed data: everything a build may be told, with defaults and bounds.

`quantkit schema` prints the JSON Schema of `Recipe`, descriptions included, for editors.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from quantkit.compile.targets import TARGETS
from quantkit.errors import RecipeError
from quantkit.formats.schemes import SCHEMES
from quantkit.review.plan import Plan

SCHEMA_VERSION = 1
QUANTIZED_SCHEMES = [s.name for s in SCHEMES.values() if s.quantized]


def nearest(word: str, known: list[str]) -> str:
    """`, did you mean 'x'?` for the known word closest to `word`, or the list of known words when none is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def _scheme_among(known: list[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:  # the same bits before the same letters: W4A15 is no W8A16
            alike = [one for one in known if one[:2] == name[:2].upper()]
            raise ValueError(f"unknown scheme {name!r}; {nearest(name.upper(), alike or known)}")
        return name

    return AfterValidator(check)


def _gpu_target(name: str) -> str:
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}; {nearest(name.lower(), list(TARGETS))}")
    return name


CandidateScheme = Annotated[
    str, _scheme_among(QUANTIZED_SCHEMES), Field(json_schema_extra={"enum": list(QUANTIZED_SCHEMES)})
]
AnyScheme = Annotated[str, _scheme_among(list(SCHEMES)), Field(json_schema_extra={"enum": list(SCHEMES)})]
GpuTarget = Annotated[str, AfterValidator(_gpu_target), Field(json_schema_extra={"enum": list(TARGETS)})]
_LEAST_REASON = 8
"""Characters of a reason worth the name."""
PathText = Annotated[str, Field(min_length=1)]

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(B|[kK]B|MB|GB|[kK]iB|MiB|GiB)")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(value: Any) -> Any:
    """A number of bytes as it is, text such as `140MB` or `0.5 GiB` read."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"a size is a number of bytes or reads like '140MB' or '0.5GiB', not {value[:40]!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


ByteCount = Annotated[
    int,
    BeforeValidator(_bytes, json_schema_input_type=int | str),
    Field(ge=1, le=2**53),
]


def _in_words(reason: str) -> str:
    if not reason.isprintable() or len(reason.strip()) < _LEAST_REASON:
        raise ValueError(f"a reason has at least {_LEAST_REASON} characters, none of them hidden")
    return reason.strip()


Reason = Annotated[str, Field(min_length=_LEAST_REASON, max_length=1000), AfterValidator(_in_words)]


class Section(BaseModel):
    """A section of the recipe: immutable, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model to build from."""

    source: PathText = Field(
        description="A Hugging Face folder or *.gguf file (relative to the recipe), `package:NAME/path` for a file "
        "inside an installed Python package, or a hub id where a network exists."
    )


class PiiSection(Section):
    """Personal data in calibration text."""

    scrub: bool = Field(
        default=True,
        description="Replace e-mail and IP addresses, phone and card numbers, IBANs, resident ids, social security "
        "numbers, keys, and URLs with credentials by placeholders before tokenizing; counts are kept, text is not.",
    )


class CalibrationSection(Section):
    """The conversations that ranges are measured on; they should look like production traffic."""

    data: list[PathText] = Field(
        default=["builtin:calib/conversations.jsonl"],
        min_length=1,
        description="JSONL, Parquet or CSV files, one conversation a row, relative to the recipe; `builtin:calib/...` "
        "ships along, `hub:ORG/NAME/FILES` names files of a hub data set.",
    )
    profile: PathText | None = Field(
        default=None,
        description="A traffic profile (`quantkit profile` makes one) that the sample follows by category, language "
        "and length; `builtin:calib/profile.yaml` is the shipped data's own. Without one, an even spread.",
    )
    pii: PiiSection = Field(default=PiiSection())
    max_samples: int = Field(default=64, ge=1, le=100_000, description="Conversations used at most.")
    max_tokens: int = Field(default=512, ge=16, le=131_072, description="Tokens kept of one conversation.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Chooses the sample.")


class Override(Section):
    """Pins the groups that a pattern matches to one scheme; of several that match, the last counts."""

    match: PathText = Field(description="Glob on group names: layers.N.{qkv,o,gate_up,down}.")
    scheme: AnyScheme


class GptqSection(Section):
    """How GPTQ compensates rounding errors."""

    damping: float = Field(
        default=0.01,
        gt=0.0,
        le=1.0,
        description="Share of the mean Hessian diagonal added to it; ten times as much after a failed factorisation.",
    )
    block: int = Field(default=128, ge=1, le=4096, description="Input channels between two updates of all later ones.")
    act_order: bool = Field(default=True, description="Round the channels of the largest inputs first.")


class QuantizationSection(Section):
    """How the decoder layers' matrices are stored."""

    schemes: list[CandidateScheme] = Field(
        default=["W8A16", "W4A16_G64"],
        min_length=1,
        description="Schemes to choose from for each group; FP16 (the source's 16-bit type) always is one more.",
    )
    budget_bits: float | None = Field(
        default=8.0,
        ge=4.0,
        le=16.0,
        description="Stored bits a weight, scales counted, averaged over the decoder layers' matrices, pinned ones "
        "included. lm_head and the embedding do not count.",
    )
    budget_bytes: ByteCount | None = Field(
        default=None,
        description="Stored bytes of the decoder layers' matrices, instead of budget_bits: a number, or text such as "
        "140MB or 0.5GiB.",
    )
    sensitivity: Literal["gradient", "weight"] = Field(
        default="gradient",
        description="gradient: what a scheme does to the model's predictions, by the loss's gradients on calibration "
        "samples; weight: what it does to its own group's output, faster and blind to later layers.",
    )
    allocation: PathText | None = Field(
        default=None,
        description="An allocation file of `quantkit search`, relative to the recipe: its schemes are taken instead of "
        "searching. Overrides given beside it still pin.",
    )
    overrides: list[Override] = Field(
        default=[Override(match="*.o", scheme="FP16")],
        description="Pinned groups. The default keeps attention output projections in 16 bits; a list given here "
        "replaces it. Norms, biases and the embedding are always stored in the source's type.",
    )
    method: Literal["gptq", "rtn"] = Field(
        default="gptq",
        description="gptq: each column's rounding error is made up for by later ones, on the calibration samples, "
        "layer after quantized layer; rtn: round to nearest.",
    )
    gptq: GptqSection = Field(default=GptqSection())
    scale_search: Literal["mse", "minmax"] = Field(
        default="mse", description="mse: shrink each scale to the least weighted error; minmax: cover the range."
    )
    lm_head: Literal["FP16", "W8A16"] = Field(
        default="W8A16", description="Scheme the head is computed in; with a tied embedding it is derived at load."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_beside(cls, data: Any) -> Any:
        """Bytes or an allocation take the place of the default bits; an allocation that of the default pins."""
        if not isinstance(data, dict):
            return data
        instead: dict[str, Any] = {}
        if data.get("budget_bytes") is not None or data.get("allocation") is not None:
            instead["budget_bits"] = None
        if data.get("allocation") is not None:
            instead["overrides"] = []
        return {**instead, **data}

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.budget_bits is not None and self.budget_bytes is not None:
            raise ValueError("give budget_bits or budget_bytes, not both (null takes one back)")
        if self.budget_bits is None and self.budget_bytes is None and self.allocation is None:
            raise ValueError("give budget_bits or budget_bytes")
        return self


class KVCacheSection(Section):
    """The paged key/value cache."""

    format: Literal["INT8", "FP8", "INT4", "FP16", "BF16", "FP32"] = Field(
        default="INT8",
        description="INT8: scales per channel, measured on the calibration data; FP8 (e4m3): one scale a head, "
        "measured likewise; INT4: 5 bits a value, groups of channels quantized as each token is written, for heads of "
        "a multiple of 8 channels.",
    )
    percentile: float = Field(
        default=100.0,
        ge=99.9,
        le=100.0,
        description="Share of calibration tokens, in %, that a channel's scale must cover; INT8 and FP8 saturate the "
        "rest.",
    )


class CompileSection(Section):
    """GPU kernels compiled while building, on any machine."""

    targets: list[GpuTarget] = Field(
        default=[],
        description="Architectures to compile for: sm_80 (A100), sm_86 (RTX 30, A10), sm_89 (RTX 40, L4), "
        "sm_90 (H100), sm_100 (B200), sm_120 (RTX 50). None: the artifact holds no kernels.",
    )


class RuntimeSection(Section):
    """What the artifact is served with unless `serve` is told otherwise."""

    max_model_len: int | None = Field(
        default=None,
        ge=16,
        le=1_048_576,
        description="Tokens of prompt and answer together; 2048, or the model's own limit when lower, if absent.",
    )
    max_num_seqs: int = Field(default=16, ge=1, le=1024, description="Requests running at once.")
    max_num_batched_tokens: int = Field(default=512, ge=16, le=65_536, description="Tokens of one step.")


class ReviewStage(Section):
    """`items` more answers; the limits count defects (major or critical regressions) over all stages so far."""

    items: int = Field(ge=1, le=10_000, description="Answers shown in this stage.")
    accept: int = Field(ge=0, description="At most so many defects accept.")
    reject: int = Field(ge=1, description="So many defects reject; between the two the next stage decides.")


class ReviewPlan(Section):
    """The acceptance plan of the spot check; any critical regression rejects."""

    stages: list[ReviewStage] = Field(
        default=[ReviewStage(items=60, accept=0, reject=3), ReviewStage(items=80, accept=3, reject=4)],
        min_length=1,
        description="The default accepts a model with 1 % defects 94 times in 100, one with 5 % 10 times.",
    )
    worst: int = Field(default=10, ge=0, le=1000, description="Answers that stray furthest, shown beside them.")
    critical: int = Field(default=20, ge=0, le=1000, description="Scenarios marked critical, shown beside them.")
    catches: float = Field(default=0.10, ge=0, le=1, description="Identical pairs added, as a share of the pairs.")
    repeats: float = Field(default=0.05, ge=0, le=1, description="Pairs shown again with sides swapped, as a share.")
    catch_limit: float = Field(
        default=0.34, ge=0, le=1, description="Share of identical pairs a counted reviewer may fall for."
    )

    @model_validator(mode="after")
    def _in_order(self) -> ReviewPlan:
        try:
            Plan.of(self.model_dump())
        except RecipeError as error:
            raise ValueError(error.what) from None
        return self


class ReviewSection(Section):
    """The look that people take at real answers."""

    waive: Reason | None = Field(
        default=None,
        description="A reason to do without it, kept in the artifact's evidence. Without one, a fresh build ends "
        "pending-review (exit 12).",
    )
    plan: ReviewPlan = Field(default=ReviewPlan(), description="How many answers decide, and how.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Draws the sample, and who stands on which side.")


class GateSection(Section):
    """How the packaged artifact is judged."""

    policy: PathText = Field(default="standard", description="`standard`, or a policy file relative to the recipe.")
    data: list[PathText] = Field(
        default=["builtin:evals/heldout.jsonl"],
        min_length=1,
        description="JSONL files that calibration does not see, one conversation a line.",
    )
    prompts: list[PathText] = Field(
        default=["builtin:evals/prompts.jsonl"],
        description="JSONL files of prompts with checkable answers, answered by source and artifact; [] for none.",
    )
    max_samples: int = Field(default=64, ge=2, le=100_000, description="Conversations used at most.")
    max_prompts: int = Field(default=140, ge=1, le=100_000, description="Prompts answered at most.")
    max_new_tokens: int = Field(default=96, ge=1, le=4096, description="Tokens of an answer at most.")
    review: ReviewSection = Field(default=ReviewSection())


class Recipe(Section):
    """One file: model, calibration, quantization, compute, KV cache, compilation, serving limits, gate."""

    version: int = Field(description="Major version of the recipe's form: 1.")
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Names the artifact; the recipe's file name when absent.",
    )
    model: ModelSection
    calibration: CalibrationSection = Field(default=CalibrationSection())
    quantization: QuantizationSection = Field(default=QuantizationSection())
    compute: Literal["int8", "exact"] = Field(
        default="int8",
        description="How products with quantized matrices are taken on a CPU. int8: their inputs are quantized on the "
        "fly, 128 channels or a group to a scale, which is several times as fast and judged by the gate like anything "
        "else; exact: in float32.",
    )
    kv_cache: KVCacheSection = Field(default=KVCacheSection())
    compile: CompileSection = Field(default=CompileSection())
    runtime: RuntimeSection = Field(default=RuntimeSection())
    gate: GateSection = Field(default=GateSection())


def json_schema() -> dict[str, object]:
    """The JSON Schema of a recipe, for editors (`# yaml-language-server: $schema=...`)."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "quantkit recipe"
    schema["properties"]["version"] = {"const": SCHEMA_VERSION, "description": "Major version of the recipe's form."}
    return schema
