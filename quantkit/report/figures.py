"""The gate table: the artifact's figures beside their limits, the rungs and the noise floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SERIES = {"artifact": "artifact", "RTN-INT8": "int8", "RTN-INT4": "int4"}
"""Variants shown on the ladder, and the colour each has."""

_COLUMNS = ("artifact", "RTN-INT8", "RTN-INT4", "noise floor")
_ROWS = (
    ("mean KL", "mean_kl", "mean_kl_se", False),
    ("median KL", "median_kl", "", False),
    ("P99 KL", "p99_kl", "", False),
    ("P99.9 KL", "p999_kl", "", False),
    ("largest KL", "max_kl", "", False),
    ("same top-1", "same_top1", "same_top1_se", True),
    ("perplexity ratio", "ppl_ratio", "ppl_ratio_se", False),
    ("perplexity", "ppl_cand", "", False),
    ("RMS Δp", "rms_dp", "", True),
)


@dataclass(frozen=True)
class Figure:
    """A number in words, with its standard error where it has one."""

    value: str
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One figure of every column."""

    label: str
    cells: tuple[Figure, ...]


@dataclass(frozen=True)
class Table:
    """Columns: artifact, its limit, then what it is compared with."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def figure_table(gate: Mapping[str, Any]) -> Table:
    """The table of a gate's details."""
    variants: Mapping[str, Mapping[str, Any]] = gate["variants"]
    names = [name for name in _COLUMNS if name in variants]
    columns = (names[0], "limit", *names[1:])
    limits = _limits(gate)
    rows = []
    for label, key, error, percent in _ROWS:
        first, *others = (_figure(variants[name], key, error, percent) for name in names)
        if key == "ppl_cand":  # of the text itself, so comparable on the same tokens only
            whole = variants[names[0]]["tokens"]
            others = [
                one if variants[name]["tokens"] == whole else Figure("–")
                for name, one in zip(names[1:], others, strict=True)
            ]
        rows.append(Row(label, (first, Figure(limits.get(key, "")), *others)))
    rows.append(Row("tokens", tuple(Figure("" if n == "limit" else f"{variants[n]['tokens']:,}") for n in columns)))
    return Table(columns, tuple(rows))


def _figure(variant: Mapping[str, Any], key: str, error: str, percent: bool) -> Figure:
    value = f"{variant[key]:.1%}" if percent else f"{variant[key]:.4g}"
    if not error:
        return Figure(value)
    return Figure(value, f"{variant[error]:.1%}" if percent else f"{variant[error]:.2g}")


def _limits(gate: Mapping[str, Any]) -> dict[str, str]:
    """The limit on each figure, as an absolute number where it is a share of a rung."""
    found = {}
    for rule in gate["verdict"]["rules"]:
        sign = "≤" if rule["side"] == "upper" else "≥"
        rung = gate["variants"].get(rule["share_of"])
        name, limit = rule["name"], rule["limit"]
        if name == "lost_top1":
            found["same_top1"] = f"≥ {1 - limit * (1 - rung['same_top1'] if rung else 1):.1%}"
        elif name == "same_top1":
            found[name] = f"{sign} {limit * (rung[name] if rung else 1):.1%}"
        elif name in ("mean_kl", "p99_kl", "ppl_ratio"):
            found[name] = f"{sign} {limit * (rung[name] if rung else 1):.4g}"
    return found
