"""Whether an artifact may be served here: what the gate found, and whether that finding covers this machine.

The verdict is read as plain JSON (`evidence/gate/verdict.json`): serving must not need the gate. What people signed
(`evidence/review/`) joins in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.artifact.people import Word, word_of_people
from quantkit.errors import CheckpointError, QuantkitError

VERDICT = Path("evidence") / "gate" / "verdict.json"
_COVERED = ("backend", "isa", "compute", "kv_format")


class NotAdmitted(QuantkitError):
    """An artifact that must not be served: the gate failed it, or never judged it for this machine."""

    exit_code = 10


class NotCovered(NotAdmitted):
    """No verdict speaks for this machine, neither for nor against the artifact."""

    exit_code = 3


@dataclass(frozen=True)
class Standing:
    """What is known of an artifact. `verdict`: pass, fail, inconclusive, pending-review, or none.

    coverage: what the verdict is about, by name (backend, isa, compute, kv_format). rules: those that decided.
    """

    verdict: str
    coverage: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Mapping[str, Any], ...] = ()

    def covers(self, target: Mapping[str, str]) -> bool:
        """Whether the verdict is about `target`."""
        return self.verdict != "none" and all(self.coverage.get(name) == target[name] for name in _COVERED)

    def admit(self, target: Mapping[str, str], *, accept_ungated: bool, where: str) -> None:
        """Raises unless the artifact may serve on `target` (see `target_of`).

        A failed artifact is never served (NotAdmitted); one without a verdict on this target only with
        `accept_ungated` (else NotCovered).
        """
        if self.verdict == "fail":
            broken = [rule.get("text") or rule.get("name") for rule in self.rules if rule.get("outcome") == "fail"]
            raise NotAdmitted(
                f"the gate failed this artifact{f' ({broken[0]})' if broken else ''}",
                where=where,
                next="See its gate report; build again with more bits",
            )
        if self.covers(target) or accept_ungated:
            return
        here, about = described(target), described(self.coverage)
        what = "no verdict" if self.verdict == "none" else f"the verdict covers {about}, not"
        raise NotCovered(
            f"{what} {here}" if self.coverage else f"no gate verdict covers {here}",
            where=where,
            next="Run `quantkit gate` here, or pass --accept-ungated",
        )


def described(target: Mapping[str, str]) -> str:
    """What a verdict covers, in words: `cpu avx2, int8 compute, INT8 KV cache`."""
    backend, isa, compute, kv_format = (target.get(name, "?") for name in _COVERED)
    return f"{backend} {isa}".rstrip() + f", {compute} compute, {kv_format} KV cache"


def target_of(backend_name: str, compute: str, kv_format: str) -> dict[str, str]:
    """What a verdict must cover to speak for this runtime: `backend_name` as the executor gives it (`cpu:avx2`)."""
    backend, _, isa = backend_name.partition(":")
    return {"backend": backend, "isa": isa, "compute": compute, "kv_format": kv_format}


def read_standing(folder: Path, payload_digest: str) -> Standing:
    """The artifact's standing; a verdict on another payload counts as none.

    What people signed or waived joins in: it decides where the gate left it to them (pending-review), and a signed
    reject outweighs a pass.

    Raises:
        CheckpointError: a verdict file that is not one, or a review that cannot be trusted.
    """
    path = folder / VERDICT
    if not path.is_file():
        return Standing("none")
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["payload_digest"] != payload_digest:
            return Standing("none")
        coverage = {name: str(value) for name, value in found["coverage"].items()}
        standing = _consistent(str(found["verdict"]), coverage, tuple(dict(rule) for rule in found.get("rules", ())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"not a gate verdict ({error!r})", where=str(path), next="Run `quantkit gate` to judge anew"
        ) from error
    return _with_people(standing, word_of_people(folder, payload_digest))


def _with_people(standing: Standing, word: Word) -> Standing:
    if word.decision == "fail" and standing.verdict in ("pass", "pending-review"):
        return Standing("fail", standing.coverage, (*standing.rules, {"outcome": "fail", "text": word.text}))
    return replace(standing, verdict=word.decision) if standing.verdict == "pending-review" else standing


def _consistent(verdict: str, coverage: Mapping[str, str], rules: tuple[Mapping[str, Any], ...]) -> Standing:
    """ValueError for a word that is no verdict, and for one that is milder than the rules it rests on."""
    outcomes = {rule.get("outcome") for rule in rules}
    worst = next((word for word in ("fail", "inconclusive") if word in outcomes), "pass")
    known = {"fail": 0, "inconclusive": 1, "pending-review": 2, "pass": 2}
    if verdict not in known:
        raise ValueError(f"unknown verdict {verdict[:40]!r}")
    if known[verdict] > known[worst]:
        raise ValueError(f"it says {verdict}, its rules say {worst}")
    return Standing(verdict, coverage, rules)
