"""The recipe as typed data: everything a build may be told, with defaults and bounds.

`quantkit schema` prints the JSON Schema of `Recipe`, descriptions included, for editors.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from quantkit.formats.schemes import SCHEMES

SCHEMA_VERSION = 1
QUANTIZED_SCHEMES = [s.name for s in SCHEMES.values() if s.quantized]


def nearest(word: str, known: list[str]) -> str:
    """`, did you mean 'x'?` for the known word closest to `word`, or the list of known words when none is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def _scheme_among(known: list[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"unknown scheme {name!r}; {nearest(name.upper(), known)}")
        return name

    return AfterValidator(check)


CandidateScheme = Annotated[
    str, _scheme_among(QUANTIZED_SCHEMES), Field(json_schema_extra={"enum": list(QUANTIZED_SCHEMES)})
]
AnyScheme = Annotated[str, _scheme_among(list(SCHEMES)), Field(json_schema_extra={"enum": list(SCHEMES)})]
PathText = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A section of the recipe: immutable, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model to build from."""

    source: PathText = Field(
        description="A Hugging Face folder or *.gguf file (relative to the recipe), `package:NAME/path` for a file "
        "inside an installed Python package, or a hub id where a network exists."
    )


class CalibrationSection(Section):
    """The conversations that ranges are measured on; they should look like production traffic."""

    data: list[PathText] = Field(
        default=["builtin:calib/conversations.jsonl"],
        min_length=1,
        description="JSONL files, one conversation a line, relative to the recipe; `builtin:calib/...` ships along.",
    )
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
    budget_bits: float = Field(
        default=8.0,
        ge=4.0,
        le=16.0,
        description="Stored bits a weight, scales counted, averaged over the decoder layers' matrices, pinned ones "
        "included. lm_head and the embedding do not count.",
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


class KVCacheSection(Section):
    """The paged key/value cache."""

    format: Literal["INT8", "FP16", "BF16", "FP32"] = Field(
        default="INT8", description="INT8 uses scales per channel, measured on the calibration data."
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


class ReviewSection(Section):
    """The look that people take at real answers."""

    waive: str | None = Field(
        default=None,
        min_length=8,
        description="A reason to do without it, kept in the artifact's evidence. Without one, a fresh build ends "
        "pending-review (exit 12).",
    )


class GateSection(Section):
    """How the packaged artifact is judged."""

    policy: PathText = Field(default="standard", description="`standard`, or a policy file relative to the recipe.")
    data: list[PathText] = Field(
        default=["builtin:evals/heldout.jsonl"],
        min_length=1,
        description="JSONL files that calibration does not see, one conversation a line.",
    )
    max_samples: int = Field(default=64, ge=2, le=100_000, description="Conversations used at most.")
    review: ReviewSection = Field(default=ReviewSection())


class Recipe(Section):
    """One file: model, calibration, quantization, KV cache, serving limits, gate."""

    version: int = Field(description="Major version of the recipe's form: 1.")
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Names the artifact; the recipe's file name when absent.",
    )
    model: ModelSection
    calibration: CalibrationSection = Field(default=CalibrationSection())
    quantization: QuantizationSection = Field(default=QuantizationSection())
    kv_cache: KVCacheSection = Field(default=KVCacheSection())
    runtime: RuntimeSection = Field(default=RuntimeSection())
    gate: GateSection = Field(default=GateSection())


def json_schema() -> dict[str, object]:
    """The JSON Schema of a recipe, for editors (`# yaml-language-server: $schema=...`)."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "quantkit recipe"
    schema["properties"]["version"] = {"const": SCHEMA_VERSION, "description": "Major version of the recipe's form."}
    return schema
