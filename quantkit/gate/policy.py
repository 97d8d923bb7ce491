"""Policies: which limits decide a verdict, read from YAML files such as `evals/policies/standard.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quantkit.errors import RecipeError
from quantkit.resources import resource
from quantkit.userpath import user_path
from quantkit.yaml_source import YamlSource, read_yaml

Metric = Literal["mean_kl", "p99_kl", "same_top1", "lost_top1", "ppl_ratio"]
Rung = Literal["RTN-INT4"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Limit(_Part):
    """One limit on a metric: `upper` or `lower`, absolute or as a share of the same metric on a rung of the ladder."""

    metric: Metric
    upper: float | None = None
    lower: float | None = None
    share_of: Rung | None = None

    @model_validator(mode="after")
    def _one_side(self) -> Limit:
        if (self.upper is None) == (self.lower is None):
            raise ValueError("a limit is either upper or lower")
        return self

    @property
    def bound(self) -> float:
        """The number that must not be passed."""
        return self.upper if self.upper is not None else self.lower or 0.0


AnswerMetric = Literal[
    "task", "json", "language", "refusal", "help", "loop_free", "flips", "length_median", "length_p95"
]


class AnswerLimit(_Part):
    """One limit on answers: a score loses at most `drop`, flips are at most `upper`, a length ratio is 1 ± `within`."""

    metric: AnswerMetric
    drop: float | None = Field(default=None, ge=0.0, le=1.0)
    upper: float | None = Field(default=None, ge=0.0, le=1.0)
    within: float | None = Field(default=None, gt=0.0)

    @model_validator(mode="after")
    def _suits(self) -> AnswerLimit:
        key = "upper" if self.metric == "flips" else "within" if self.metric.startswith("length") else "drop"
        if [name for name in ("drop", "upper", "within") if getattr(self, name) is not None] != [key]:
            raise ValueError(f"a limit on {self.metric} has {key!r} and no other")
        return self

    @property
    def bound(self) -> float:
        """The least change, the greatest share of flips, or the greatest distance of a ratio from 1."""
        if self.drop is not None:
            return -self.drop
        return self.upper if self.upper is not None else self.within or 0.0


class When(_Part):
    """Conditions on the artifact; all that are given must hold."""

    parameters_below: int | None = None
    least_bits: int | None = Field(default=None, description="Fewest bits any quantized matrix is stored in.")

    def holds(self, parameters: int, least_bits: int) -> bool:
        """Whether a model of `parameters` weights, the narrowest in `least_bits` bits, is meant."""
        small = self.parameters_below is None or parameters < self.parameters_below
        return small and (self.least_bits is None or least_bits >= self.least_bits)


class PolicyClass(_Part):
    """Limits for one class of artifacts."""

    name: str
    when: When = Field(default=When())
    limits: list[Limit] = Field(min_length=1)
    answers: list[AnswerLimit] = Field(default=[])


class Bootstrap(_Part):
    """How intervals are drawn."""

    samples: int = Field(default=1000, ge=100, le=20_000)
    seed: int = Field(default=0, ge=0)


class Need(_Part):
    """The least data a verdict may rest on."""

    conversations: int = Field(default=12, ge=2)
    tokens: int = Field(default=2000, ge=1)


class Domains(_Part):
    """Mean KL of one kind of text (see `domains`) as a share of the rung's on the same text.

    It fails surely above `fail_above`, or surely above `apart_above` times the artifact's share on all other text when
    that is more than `apart_from`.
    """

    share_of: Rung = "RTN-INT4"
    fail_above: float = 1.0
    name_above: float = 0.8
    apart_above: float = Field(default=2.0, gt=1.0)
    apart_from: float = Field(default=0.1, ge=0.0)


class Policy(_Part):
    """Everything a verdict is decided by."""

    version: Literal[1]
    name: str
    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    bootstrap: Bootstrap = Field(default=Bootstrap())
    need: Need = Field(default=Need())
    classes: list[PolicyClass] = Field(min_length=1)
    domains: Domains | None = None
    measurable_from: float = Field(
        default=0.3, ge=0.0, le=1.0, description="A score that the baseline itself does not reach is not judged."
    )
    prove: bool = Field(default=False, description="Whether a count that straddles its limit is inconclusive.")

    def class_for(self, parameters: int, least_bits: int) -> PolicyClass:
        """The first class whose conditions hold; RecipeError when none does."""
        for one in self.classes:
            if one.when.holds(parameters, least_bits):
                return one
        raise RecipeError(
            f"policy {self.name!r} has no class for {parameters:,} parameters at {least_bits} bits",
            next="End its classes with one whose `when` is {}",
        )


def load_policy(name: str, base: Path = Path(".")) -> Policy:
    """The packaged policy called `name` (`standard`) or the YAML file at `name`, relative to `base`.

    RecipeError names file and line of what is wrong.
    """
    is_file = bool(Path(name).suffix)
    path = user_path(name, base, where="gate policy") if is_file else resource(f"evals/policies/{name}.yaml")
    if not path.is_file():
        raise RecipeError("no such policy", where=str(path), next="Use `standard` or the path of a YAML file")
    source = read_yaml(path)
    try:
        return Policy.model_validate(source.data)
    except ValidationError as error:
        raise _told(error, source) from None


def _told(error: ValidationError, source: YamlSource) -> RecipeError:
    problems = error.errors(include_url=False)
    first = next(
        (p for p in problems if p["type"] == "extra_forbidden"), problems[0]
    )  # a typo explains what is missing
    key = ".".join(map(str, first["loc"])) or "the policy"
    message = f"unknown key {key!r}" if first["type"] == "extra_forbidden" else f"{key}: {first['msg']}"
    return RecipeError(message, where=source.where(tuple(first["loc"])))
