"""From measurements to a verdict: every rule with its interval, limit and outcome, and what the verdict covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.gate.answer_rules import answer_rules
from quantkit.gate.answers import Pair
from quantkit.gate.bootstrap import Estimate, Resampler, estimate
from quantkit.gate.data import Window
from quantkit.gate.domains import Domain, domains_of
from quantkit.gate.metrics import Floats, Scores
from quantkit.gate.policy import Domains, Limit, Policy, PolicyClass
from quantkit.gate.rule import Outcome, Rule, tally

EXIT_CODES = {"pass": 0, "fail": 10, "inconclusive": 11, "pending-review": 12}

EXACT_FLOOR = 0.0
LOOSE_FLOOR = 1e-5
"""Largest mean KL between two runs of the baseline: nothing on the native CPU backend, rounding elsewhere."""


@dataclass(frozen=True)
class Coverage:
    """What a verdict is about: it says nothing of another backend, instruction set, compute mode or KV format."""

    backend: str
    isa: str
    compute: str
    kv_format: str
    threads: int


@dataclass(frozen=True)
class Verdict:
    """`verdict` is pass, fail, inconclusive or pending-review; `tokens` the outcome of the rules, before any review.

    `notes` name domains that stand out without failing; `waiver` is the reason a review was waived for.
    """

    verdict: str
    tokens: Outcome
    policy: str
    policy_class: str
    coverage: Coverage
    rules: tuple[Rule, ...]
    notes: tuple[str, ...]
    waiver: str | None

    @property
    def exit_code(self) -> int:
        """0, 10, 11 or 12."""
        return EXIT_CODES[self.verdict]

    @property
    def deciding(self) -> tuple[Rule, ...]:
        """The rules whose outcome is the worst one met; of a pass, those on tokens, which carry it."""
        worst = tuple(rule for rule in self.rules if rule.outcome == self.tokens)
        return worst if self.tokens != "pass" else tuple(rule for rule in worst if rule.section == "tokens")

    @property
    def tally(self) -> str:
        """How many rules came out how: `19 rules hold, 4 unproven, 3 unmeasurable`."""
        return tally(rule.outcome for rule in self.rules)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the form of `evidence/gate/verdict.json`."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """What the rules are decided on. `ladder`: scores of each rung on the same tokens; `floor`: the noise floor.

    in_json: which scored tokens stand inside JSON, mask `[S]`.
    """

    windows: Sequence[Window]
    candidate: Scores
    ladder: Mapping[str, Scores]
    floor: Scores
    parameters: int
    least_bits: int
    coverage: Coverage
    in_json: NDArray[np.bool_]


def decide(
    policy: Policy,
    measured: Measured,
    waiver: str | None,
    *,
    pairs: Sequence[Pair] = (),
    others: Sequence[Rule] = (),
) -> Verdict:
    """The verdict of `policy` on what was measured, on the answers of both models, and on rules decided elsewhere.

    Fail when any rule fails, inconclusive when none fails and one straddles its limit; otherwise pass when a review
    was waived and pending-review when not.
    """
    chosen = policy.class_for(measured.parameters, measured.least_bits)
    resampler = Resampler(measured.candidate.cluster, samples=policy.bootstrap.samples, seed=policy.bootstrap.seed)
    rules = [_enough(policy, measured), _floor(measured)]
    rules += [_limit(limit, chosen, policy, measured, resampler) for limit in chosen.limits]
    notes: list[str] = []
    if policy.domains is not None:
        judged, notes = _domains(policy.domains, policy, measured)
        rules += judged
    rules += answer_rules(pairs, chosen.answers, policy)
    rules += others
    worst: Outcome = "pass"
    for outcome in ("inconclusive", "fail"):
        if any(rule.outcome == outcome for rule in rules):
            worst = outcome
    passed = "pending-review" if waiver is None else "pass"
    verdict = passed if worst == "pass" else worst
    return Verdict(verdict, worst, policy.name, chosen.name, measured.coverage, tuple(rules), tuple(notes), waiver)


def _limit(limit: Limit, chosen: PolicyClass, policy: Policy, measured: Measured, resampler: Resampler) -> Rule:
    results = resampler.metric(limit.metric, measured.candidate)
    absolute = estimate(results, policy.confidence)
    if limit.share_of is None:
        return _rule(limit.metric, absolute, limit, f"{_shown(limit.metric, absolute)}; {_limit_text(limit)}")
    reference = resampler.metric(limit.metric, measured.ladder[limit.share_of])
    shares = estimate(_ratio(results, reference), policy.confidence)
    text = (
        f"{_shown(limit.metric, absolute)}; {shares.value:.2f} × {limit.share_of}'s {reference[0]:.4g} "
        f"({shares.low:.2f} to {shares.high:.2f}), {_limit_text(limit)}"
    )
    return _rule(limit.metric, shares, limit, text)


def _rule(name: str, found: Estimate, limit: Limit, text: str) -> Rule:
    upper = limit.upper is not None
    inside = found.high <= limit.bound if upper else found.low >= limit.bound
    outside = found.low > limit.bound if upper else found.high < limit.bound
    outcome: Outcome = "pass" if inside else "fail" if outside else "inconclusive"
    side: Literal["upper", "lower"] = "upper" if upper else "lower"
    return Rule(name, found.value, found.low, found.high, limit.bound, side, limit.share_of, outcome, text)


_ALIKE = 2.0
"""Times its damage elsewhere that a domain may be hurt in its text of another and count as explained by it."""


@dataclass(frozen=True)
class _Standing:
    """Mean KL of some text beside the rung's there, and the share that is allowed, given the text around it."""

    ours: float
    theirs: float
    share: Estimate
    elsewhere: float
    most: float

    @property
    def fails(self) -> bool:
        return self.share.low > self.most


def _standing(
    domains: Domains, policy: Policy, measured: Measured, chosen: NDArray[np.bool_], others: NDArray[np.bool_]
) -> _Standing | None:
    """How `chosen` stands beside `others`; None where it comes from fewer than two conversations."""
    candidate, rung = measured.candidate.where(chosen), measured.ladder[domains.share_of]
    if len(np.unique(candidate.cluster)) < 2:
        return None
    resampler = Resampler(candidate.cluster, samples=policy.bootstrap.samples, seed=policy.bootstrap.seed)
    ours, theirs = resampler.mean(candidate.kl), resampler.mean(rung.where(chosen).kl)
    share = estimate(_ratio(ours, theirs), policy.confidence)
    elsewhere = _share(measured.candidate, rung, others) if others.any() else share.value
    most = min(domains.fail_above, max(domains.apart_from, domains.apart_above * elsewhere))
    return _Standing(float(ours[0]), float(theirs[0]), share, elsewhere, most)


def _domains(domains: Domains, policy: Policy, measured: Measured) -> tuple[list[Rule], list[str]]:
    """Rules that fail, and notes on domains that come near or fail only through what they share with another."""
    rules, notes = [], []
    failing: list[tuple[Domain, _Standing, str]] = []
    for domain in domains_of(measured.windows, measured.in_json):
        found = _standing(domains, policy, measured, domain.chosen, ~domain.chosen)
        if found is None:
            continue
        text = (
            f"{domain.name}: mean KL {found.ours:.4g} is {found.share.value:.2f} × {domains.share_of}'s "
            f"{found.theirs:.4g} there, {found.elsewhere:.2f} × on all other text"
        )
        if found.fails:
            failing.append((domain, found, text))
        elif found.share.value > min(domains.name_above, found.most):
            notes.append(text)

    def explained(domain: Domain, other: Domain) -> bool:
        """Whether `domain` is hurt only where it overlaps `other`, and there about as much as the rest of `other`."""
        apart, shared = domain.chosen & ~other.chosen, domain.chosen & other.chosen
        alone = other.chosen & ~domain.chosen
        left = _standing(domains, policy, measured, alone, ~(domain.chosen | other.chosen))
        if left is None or not left.fails:
            return False
        rung = measured.ladder[domains.share_of]
        if apart.any() and _share(measured.candidate, rung, apart) > left.most:
            return False
        return _share(measured.candidate, rung, shared) <= _ALIKE * left.share.value

    kinds = [domain for domain, _, _ in failing]
    through = {domain.name: [other for other in kinds if explained(domain, other)] for domain in kinds}
    for domain, found, text in failing:
        roots = [other.name for other in through[domain.name] if not through[other.name]]
        if roots:
            notes.append(f"{text}; only through its text of {roots[0]}")
            continue
        limit = Limit(metric="mean_kl", upper=found.most, share_of=domains.share_of)
        text += f" ({found.share.low:.2f} to {found.share.high:.2f}, at most {found.most:.2f} allowed)"
        rules.append(_rule(domain.name, found.share, limit, text))
    return rules, notes


def _share(candidate: Scores, rung: Scores, chosen: NDArray[np.bool_]) -> float:
    return float(candidate.kl[chosen].mean() / max(float(rung.kl[chosen].mean()), 1e-12))


def _enough(policy: Policy, measured: Measured) -> Rule:
    tokens, conversations = len(measured.candidate.kl), len(measured.windows)
    need = policy.need
    enough = tokens >= need.tokens and conversations >= need.conversations
    text = f"{tokens:,} tokens of {conversations} conversations; {need.tokens:,} and {need.conversations} are needed"
    found, wanted = float(tokens), float(need.tokens)
    return Rule("data", found, found, found, wanted, "lower", None, "pass" if enough else "inconclusive", text)


def _floor(measured: Measured) -> Rule:
    limit = EXACT_FLOOR if measured.coverage.backend == "cpu" else LOOSE_FLOOR
    found = float(measured.floor.kl.mean())
    text = f"the baseline against itself, batched and chunked otherwise: mean KL {found:.2g}, at most {limit:g} allowed"
    outcome: Outcome = "pass" if found <= limit else "fail"
    return Rule("noise_floor", found, found, found, limit, "upper", None, outcome, text)


def _ratio(ours: Floats, theirs: Floats) -> Floats:
    """ours / theirs; a rung that loses nothing counts as losing 1e-12, so that the ratio stays finite."""
    return ours / np.maximum(theirs, 1e-12)


_WORDS = {
    "mean_kl": "mean KL",
    "p99_kl": "P99 KL",
    "same_top1": "same top-1",
    "lost_top1": "lost top-1",
    "ppl_ratio": "perplexity ratio",
}


def _shown(metric: str, found: Estimate) -> str:
    form = ".1%" if metric in ("same_top1", "lost_top1") else ".4g"
    return f"{_WORDS[metric]} {found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


def _limit_text(limit: Limit) -> str:
    unit = f" × {limit.share_of}" if limit.share_of else ""
    return f"{'at most' if limit.upper is not None else 'at least'} {limit.bound:g}{unit} allowed"
