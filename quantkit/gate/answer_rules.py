"""Rules on answers. A count fails only when its whole interval lies beyond the limit; an interval that straddles the
limit says so, and how many more items would settle it, but blocks nothing unless the policy asks for proof.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.gate.answers import Pair
from quantkit.gate.counts import Change, clopper_pearson, items_needed
from quantkit.gate.policy import AnswerLimit, Policy
from quantkit.gate.rule import Outcome, Rule
from quantkit.gate.tasks import LENGTHS, Score, length_ratio, score

_NO_EVIDENCE, _WORSE = "no evidence of harm", "worse than chance explains, but not surely beyond the limit"
_LEANS = "it leans to harm: the interval excludes no change, McNemar's test does not"


def answer_rules(pairs: Sequence[Pair], limits: Sequence[AnswerLimit], policy: Policy) -> list[Rule]:
    """One rule a limit, on both models' answers to the same prompts."""
    return [_rule(limit, pairs, policy) for limit in limits] if pairs else []


def _rule(limit: AnswerLimit, pairs: Sequence[Pair], policy: Policy) -> Rule:
    if limit.metric in LENGTHS:
        return _length(limit, pairs, policy)
    found = score("task" if limit.metric == "flips" else limit.metric, pairs)
    if not found.measurable(policy.measurable_from):
        return _unmeasurable(limit, found, policy)
    return _flips(limit, found, policy) if limit.metric == "flips" else _drop(limit, found, policy)


def _unmeasurable(limit: AnswerLimit, found: Score, policy: Policy) -> Rule:
    share = float(found.base.mean()) if len(found) else 0.0
    why = f"the baseline manages {int(found.base.sum())} of {len(found)}" if len(found) else "no such prompt"
    text = f"{_title(limit, found)}: {why}; not measurable on this model below {policy.measurable_from:.0%}"
    return Rule(
        limit.metric, share, share, share, policy.measurable_from, "lower", None, "unmeasurable", text, "answers"
    )


def _drop(limit: AnswerLimit, found: Score, policy: Policy) -> Rule:
    seen = found.change(policy.confidence)
    outcome = _outcome(seen.low >= limit.bound, seen.high < limit.bound, policy)
    text = (
        f"{found.what}: {int(found.base.sum())} → {int(found.ours.sum())} of {len(found)}, {seen.losses} lost, "
        f"{seen.gains} gained: {_points(seen.value)} points ({_points(seen.low)} to {_points(seen.high)}), McNemar p "
        f"{seen.p:.2g}; at most {-100 * limit.bound:g} points lost allowed"
    )
    if outcome in ("unproven", "inconclusive"):
        needed = items_needed(seen.losses, len(found), -limit.bound, policy.confidence)
        text += _more(needed, -limit.bound, _said(seen, policy))
    return Rule(limit.metric, seen.value, seen.low, seen.high, limit.bound, "lower", None, outcome, text, "answers")


def _flips(limit: AnswerLimit, found: Score, policy: Policy) -> Rule:
    count, n = found.losses + found.gains, len(found)
    low, high = clopper_pearson(count, n, policy.confidence)
    outcome = _outcome(high <= limit.bound, low > limit.bound, policy)
    text = (
        f"flips: {found.losses} right → wrong and {found.gains} wrong → right of {n}, {count / n:.1%} ({low:.1%} to "
        f"{high:.1%}); at most {limit.bound:.0%} allowed"
    )
    if outcome in ("unproven", "inconclusive"):
        text += _more(items_needed(count, n, limit.bound, policy.confidence), limit.bound)
    return Rule("flips", count / n, low, high, limit.bound, "upper", None, outcome, text, "answers")


def _length(limit: AnswerLimit, pairs: Sequence[Pair], policy: Policy) -> Rule:
    found = length_ratio(
        pairs,
        limit.metric,
        samples=policy.bootstrap.samples,
        seed=policy.bootstrap.seed,
        confidence=policy.confidence,
    )
    least, most = 1.0 - limit.bound, 1.0 + limit.bound
    outcome = _outcome(least <= found.low and found.high <= most, found.high < least or found.low > most, policy)
    which = "median" if limit.metric == "length_median" else "95th percentile"
    text = (
        f"answer length, {which}: {found.value:.2f} × the baseline's ({found.low:.2f} to {found.high:.2f}) over "
        f"{len(pairs)} prompts; {least:.2f} to {most:.2f} allowed"
    )
    if outcome == "unproven":
        text += f": {_NO_EVIDENCE}"
    return Rule(limit.metric, found.value, found.low, found.high, limit.bound, "within", None, outcome, text, "answers")


def _outcome(inside: bool, outside: bool, policy: Policy) -> Outcome:
    return "pass" if inside else "fail" if outside else "inconclusive" if policy.prove else "unproven"


def _title(limit: AnswerLimit, found: Score) -> str:
    return "flips" if limit.metric == "flips" else found.what


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _said(seen: Change, policy: Policy) -> str:
    """What a difference that settles nothing means; the interval and the test may disagree."""
    if seen.value < 0 and seen.p < 1 - policy.confidence:
        return _WORSE
    return _LEANS if seen.high < 0 else _NO_EVIDENCE


def _more(items: int | None, limit: float, said: str = _NO_EVIDENCE) -> str:
    if items is None:
        return f": {said}"
    return f": {said}; {items:,} more items without another one would exclude {100 * limit:g} points"
