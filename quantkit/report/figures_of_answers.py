"""What the page shows of both models' answers: scores, flips, and rows by category and language, harm first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Flips:
    """How many answers are right of both, of one or of neither."""

    label: str
    both: int
    lost: int
    gained: int
    neither: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.both + self.lost + self.gained + self.neither


@dataclass(frozen=True)
class AnswerFigures:
    """scores, rows: as the gate has them, those with a loss first; rows: all, languages, then category and language;
    unmeasurable: rows in which the baseline has too little right.

    reach: the widest interval's end, for the scale they share. flips: of all, and of every language. longest: tokens.
    """

    scores: Sequence[Row]
    rows: Sequence[Row]
    unmeasurable: Sequence[Row]
    reach: float
    flips: Sequence[Flips]
    longest: int


def surely_worse(gate: Mapping[str, Any]) -> list[Row]:
    """Rules on answers that do not fail, though chance does not explain what was lost (McNemar's test)."""
    scores = (gate.get("answers") or {}).get("scores") or {}
    chance = 1 - gate["policy"]["confidence"]
    lost = {name for name, row in scores.items() if row.get("change", 0) < 0 and row.get("mcnemar_p", 1) < chance}
    return [rule for rule in gate["verdict"]["rules"] if rule["outcome"] == "unproven" and rule["name"] in lost]


def worth_a_look(gate: Mapping[str, Any]) -> list[str]:
    """What decides nothing and a reader should know all the same, in sentences."""
    return [*(str(rule["text"]) for rule in surely_worse(gate)), *map(str, gate["verdict"]["notes"])]


def answer_figures(answers: Mapping[str, Any]) -> AnswerFigures:
    """From the `answers` of a gate's details."""
    checked = [row for row in answers["rows"] if "change" in row]
    everything = [row for row in checked if row["category"] == "*"]
    everything.sort(key=lambda row: row["language"] != "*")
    cells = [row for row in checked if row["category"] != "*" and row["language"] != "*"]
    cells.sort(key=lambda row: (row["change"], row["category"], row["language"]))
    scores = [{"name": name, **row} for name, row in answers["scores"].items()]
    scores.sort(key=lambda row: (not row.get("measurable", False), row.get("change", 0.0)))
    ends = [abs(row[side]) for row in (*everything, *cells, *scores) if row.get("measurable") for side in _ENDS]
    return AnswerFigures(
        scores=scores,
        rows=[*everything, *(row for row in cells if row["measurable"])],
        unmeasurable=[row for row in cells if not row["measurable"]],
        reach=min(1.0, max(ends, default=0.1)),
        flips=[_flips(row) for row in everything],
        longest=max((max(pair) for pair in answers["lengths"]), default=1),
    )


_ENDS = ("low", "high")


def _flips(row: Row) -> Flips:
    label = "all answers" if row["language"] == "*" else str(row["language"])
    both = row["baseline"] - row["losses"]
    return Flips(label, both, row["losses"], row["gains"], row["checked"] - both - row["losses"] - row["gains"])
