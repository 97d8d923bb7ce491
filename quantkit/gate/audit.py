"""Rules of the audits: damage named by layer, matrix, group or token, whatever it does to the averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.gate.audit_cache import LEAST_USE, MOST_REACH, CacheUse
from quantkit.gate.audit_weights import PartAudit, PlainAudit, WeightAudit
from quantkit.gate.results import token_text
from quantkit.gate.rule import Rule, exact
from quantkit.gate.wording import has_cjk
from quantkit.runtime.text import ChatText

MOST_NAMED = 12
"""Matrices or layers that get a rule of their own; what is beyond is counted."""
TOKENS_NAMED = 8


def audit_rules(weights: WeightAudit, cache: Sequence[CacheUse], text: ChatText) -> list[Rule]:
    """One rule where all is sound, one a matrix, tensor or scale that is not."""
    return [*_matrix_rules(weights.parts), *_plain_rules(weights, text), *_cache_rules(cache)]


def audit_table(weights: WeightAudit, cache: Sequence[CacheUse]) -> dict[str, Any]:
    """Plain data: `matrices` (tensor, group, scheme, rms and shift in steps, displaced, stretched of groups, problem),
    `plain` (unquantized tensors compared), `changed` (name, kind, rows that differ, of), `cache` (name, use, reach,
    clipped, narrow, channels, tokens, problem)."""
    return {
        "matrices": [vars(part) | {"problem": part.problem} for part in weights.parts],
        "plain": weights.plain,
        "changed": [
            {"name": one.name, "kind": one.kind, "rows": len(one.rows), "of": one.of} for one in weights.changed
        ],
        "cache": [vars(use) | {"problem": use.problem} for use in cache],
    }


def _matrix_rules(parts: Sequence[PartAudit]) -> list[Rule]:
    wrong = [part for part in parts if part.problem]
    if not wrong:
        rms = max((part.rms for part in parts), default=0.0)
        shift = max((abs(part.shift) for part in parts), default=0.0)
        text = (
            f"{len(parts)} quantized matrices are the source's, rounded: errors of at most {rms:.2f} steps in rms, "
            f"{shift:.3f} on average"
        )
        return [exact("weights", 0, text, "audit")]
    rules = [
        exact(f"weights {part.group}", 1, f"{part.group} ({part.tensor}): {part.problem}", "audit")
        for part in wrong[:MOST_NAMED]
    ]
    return rules + _beyond("weights", len(wrong))


def _plain_rules(weights: WeightAudit, text: ChatText) -> list[Rule]:
    if not weights.changed:
        return [exact("unquantized", 0, f"{weights.plain} unquantized tensors are the source's, bit for bit", "audit")]
    rules = [
        exact(f"unquantized {one.name}", len(one.rows), _changed(one, text), "audit")
        for one in weights.changed[:MOST_NAMED]
    ]
    return rules + _beyond("unquantized", len(weights.changed))


def _changed(one: PlainAudit, text: ChatText) -> str:
    said = f"{one.name}: {len(one.rows):,} of {one.of:,} rows are not the source's"
    if one.kind != "table":
        return said
    named = [token_text(row, text) for row in one.rows if row < text.vocab_size]
    kind = " (all with Chinese, Japanese or Korean characters)" if named and all(map(has_cjk, named)) else ""
    shown = ", ".join(repr(token) for token in named[:TOKENS_NAMED])
    return f"{said}: tokens {shown}{', …' if len(named) > TOKENS_NAMED else ''}{kind}"


def _cache_rules(cache: Sequence[CacheUse]) -> list[Rule]:
    if not cache:
        return []
    wrong = [use for use in cache if use.problem]
    if not wrong:
        least, most = min(use.use for use in cache), max(use.reach for use in cache)
        text = (
            f"{len(cache)} cache scales fit the gate's text: the median channel uses {least:.0%} or more of the range "
            f"({LEAST_USE:.0%} needed) and reaches at most {most:.2f} times it ({MOST_REACH:g} allowed)"
        )
        return [exact("cache_scales", 0, text, "audit")]
    rules = [exact(f"cache {use.name}", 1, use.problem, "audit") for use in wrong[:MOST_NAMED]]
    return rules + _beyond("cache", len(wrong))


def _beyond(name: str, count: int) -> list[Rule]:
    if count <= MOST_NAMED:
        return []
    return [exact(f"{name} (others)", count - MOST_NAMED, f"{count - MOST_NAMED} more like these", "audit")]
