"""What was measured as plain data for `gate.json`.

payload_digest, source, policy, seconds
verdict    verdict, tokens (outcome before review), policy, policy_class, coverage, notes, waiver,
           rules: name, section (tokens | answers | structure | audit), outcome (pass | fail | inconclusive |
           unproven | unmeasurable), value, low, high, limit, side (upper | lower | within), share_of, text
data       the held-out text, see `data_table`
variants   noise floor, artifact and rungs against the baseline, see `metrics.Summary`
domains    kind (language | category | format), value, mean_kl with interval, ladder, ..., see `domain_rows`
answers    None without prompts, else scores, rows and lengths, see `answers_table`; texts are in `answers.jsonl`
audit      weights and cache scales, see `audit.audit_table`
worst      windows of held-out text in words, see `worst_items`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.gate.answering import DIVERGENCE, Answered
from quantkit.gate.bootstrap import Estimate, Resampler, estimate
from quantkit.gate.data import EvalSet, Window
from quantkit.gate.domains import domains_of
from quantkit.gate.evaluate import Choice, Compared
from quantkit.gate.metrics import Scores, quantile, summarize
from quantkit.gate.modules import run_modules
from quantkit.gate.policy import Policy
from quantkit.gate.tasks import SCORES, Score, score, table
from quantkit.gate.verdict import Measured
from quantkit.runtime.text import ChatText

WORST = 8
"""Windows shown in full."""
BEFORE, AFTER = 60, 16
"""Tokens of context shown before and after the worst one."""


def variant_row(compared: Compared) -> dict[str, Any]:
    """One variant against the baseline."""
    figures = summarize(compared.scores).as_dict()
    return {**figures, "backend": compared.backend, "weight_bytes": compared.weight_bytes}


def data_table(data: EvalSet) -> dict[str, Any]:
    """Where the held-out text came from, how much was used, and how it spreads over language and category."""
    cells: dict[tuple[str, str], list[Window]] = {}
    for window in data.windows:
        cells.setdefault((window.language, window.category), []).append(window)
    return {
        "files": list(data.files),
        "fingerprint": data.fingerprint,
        "available": data.available,
        "conversations": len(data.windows),
        "tokens": data.tokens,
        "scored": data.scored,
        "cut": sum(window.cut for window in data.windows),
        "cells": [
            {
                "language": language,
                "category": category,
                "conversations": len(windows),
                "tokens": sum(len(window.ids) for window in windows),
            }
            for (language, category), windows in sorted(cells.items())
        ],
    }


def domain_rows(measured: Measured, policy: Policy) -> list[dict[str, Any]]:
    """Each kind of text: the artifact's and the rungs' mean KL with intervals, same-top-1, P99."""
    rows = []
    for domain in domains_of(measured.windows, measured.in_json):
        chosen = domain.chosen
        candidate = measured.candidate.where(chosen)
        rows.append(
            {
                "kind": domain.kind,
                "value": domain.value,
                "conversations": domain.conversations,
                "tokens": int(chosen.sum()),
                "mean_kl": _interval(candidate, policy),
                "p99_kl": float(quantile(candidate.kl, 0.99)),
                "same_top1": float(candidate.same.mean()),
                "ladder": {rung: _interval(scores.where(chosen), policy) for rung, scores in measured.ladder.items()},
            }
        )
    return rows


def answers_table(answered: Answered, policy: Policy, metrics: Sequence[Path] = ()) -> dict[str, Any]:
    """Both models' answers summed up; the answers themselves are in `answers.jsonl`.

    prompts, left_out (ids), divergence_is (what the divergence measures), scores: by name, what it is, n, baseline,
    candidate, losses, gains, change, low, high, measurable, ids lost and gained. rows: by category × language (`*`:
    all), see `tasks.table`. first_divergences: token index of the first difference by prompt, None where there is none.
    lengths: `[baseline, candidate]` tokens by prompt. metrics: `{module: {number: [baseline, candidate]}}`.
    """
    pairs = answered.pairs
    return {
        "prompts": len(pairs),
        "left_out": list(answered.left_out),
        "divergence_is": DIVERGENCE,
        "scores": {name: _score_row(score(name, pairs), policy) for name in SCORES},
        "rows": table(pairs, policy.measurable_from, policy.confidence),
        "metrics": run_modules(metrics, pairs),
        "first_divergences": [pair.first_divergence for pair in pairs],
        "lengths": [[len(pair.baseline.token_ids), len(pair.candidate.token_ids)] for pair in pairs],
    }


def _score_row(found: Score, policy: Policy) -> dict[str, Any]:
    row: dict[str, Any] = {"what": found.what, "n": len(found)}
    if len(found):
        seen = found.change(policy.confidence)
        ids = np.asarray(found.ids)
        row |= {"baseline": int(found.base.sum()), "candidate": int(found.ours.sum())}
        row |= {"losses": seen.losses, "gains": seen.gains, "change": seen.value, "low": seen.low, "high": seen.high}
        row |= {"mcnemar_p": seen.p, "measurable": found.measurable(policy.measurable_from)}
        row |= {"lost": ids[found.base & ~found.ours].tolist(), "gained": ids[found.ours & ~found.base].tolist()}
    return row


def worst_items(windows: Sequence[Window], compared: Compared, text: ChatText) -> list[dict[str, Any]]:
    """The windows with the highest mean KL, each with the token where the artifact strays furthest.

    Text is as the model reads it, special tokens by name; it's data from outside and must be escaped where shown.
    """
    scores = compared.scores
    means = {int(i): float(scores.kl[scores.cluster == i].mean()) for i in np.unique(scores.cluster)}
    found = {item.window: item for item in compared.worst}
    rows = []
    for index in sorted(means, key=lambda i: -means[i])[:WORST]:
        item, window = found[index], windows[index]
        at = item.position + 1
        rows.append(
            {
                "id": window.id,
                "language": window.language,
                "category": window.category,
                "mean_kl": means[index],
                "kl": item.kl,
                "position": at,
                "before": _context(window.ids[max(0, at - BEFORE) : at], text),
                "token": token_text(window.ids[at], text),
                "after": _context(window.ids[at + 1 : at + 1 + AFTER], text),
                "baseline": _named(item.base, text),
                "artifact": _named(item.candidate, text),
            }
        )
    return rows


def _context(ids: Sequence[int], text: ChatText) -> str:
    """The text of `ids` without the halves of characters at its ends."""
    return text.decode(ids, skip_special=False).strip("\ufffd")


def token_text(token: int, text: ChatText) -> str:
    """A token's text; its bytes in hexadecimal when they are no whole characters, as happens inside Chinese."""
    raw = text.token_bytes(token)
    try:
        return raw.decode() or text.token_text(token)
    except UnicodeDecodeError:
        return f"‹{raw.hex(' ')}›"


def _named(choices: Sequence[Choice], text: ChatText) -> list[dict[str, Any]]:
    return [{"token": token_text(c.token, text), "probability": c.probability} for c in choices]


def _interval(scores: Scores, policy: Policy) -> dict[str, float]:
    resampler = Resampler(scores.cluster, samples=policy.bootstrap.samples, seed=policy.bootstrap.seed)
    found: Estimate = estimate(resampler.mean(scores.kl), policy.confidence)
    return vars(found).copy()
