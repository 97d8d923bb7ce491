"""What the page asks for and is told, as plain data. Blind: nothing tells which answer is whose while the pair can
still be judged, be it once more after an undo or as a repeat.

Knows nothing of HTTP. Every text passes `shown`, which gives hidden and turning characters names; the page sets it as
text, never as markup.
"""

from __future__ import annotations

import statistics
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantkit.artifact import people
from quantkit.errors import RequestError
from quantkit.report.escape import shown
from quantkit.review import record
from quantkit.review.decide import Tally, tally
from quantkit.review.record import Judgement, Record, Said, check_reviewer, read_record
from quantkit.review.sample import Sample, Showing
from quantkit.review.status import drawn_from, review_status, sign
from quantkit.review.words import Segments, differing

_GUESS_S = 20.0
"""Seconds a pair is taken to need before the reviewer's own pace is known."""
_ASKED = 40
"""Characters of a request that name its pair."""
NAMES = {"baseline": "the original model", "candidate": "the quantized model"}


class Session:
    """One artifact under review; `reviewer` is fixed when it isn't empty. Calls may come from several threads."""

    def __init__(self, artifact: Path, sample: Sample, reviewer: str = "") -> None:
        if reviewer:
            check_reviewer(reviewer)
        self._artifact, self._sample, self._fixed = artifact, sample, reviewer
        self._folder = artifact / people.FOLDER
        self._cut = {one.id: one.cut for one in drawn_from(artifact, sample) or ()}
        self._since: dict[tuple[str, str], datetime] = {}
        self._lock = threading.Lock()

    def state(self, reviewer: str, *, more: bool = False) -> dict[str, Any]:
        """Where the reviewer is and the next pair for them.

        Args:
            more: go on judging although the plan is decided.

        Raises RequestError for a name that is none, CheckpointError for a damaged record.
        """
        name = self._fixed or reviewer
        about = {"artifact": shown(self._artifact.resolve().name)}
        if not name:
            return {**about, "reviewer": "", "pair": None, "done": None, "progress": self._progress(None, ())}
        check_reviewer(name)
        with self._lock:
            kept = read_record(self._folder, self._sample)
            found = tally(self._sample, kept)
            wanted = [showing for showing in self._sample.showings if showing.stage <= found.stage]
            judged = kept.of(name)
            next_one = next((showing for showing in wanted if showing.id not in judged), None)
            begun = more or bool(judged)  # who is at it sees their checks and repeats through
            over = found.decision == "reject" or (found.decision == "accept" and not begun)
            pair = None if next_one is None or over else self._pair(next_one, name)
            return {
                **about,
                "reviewer": name,
                "progress": self._progress(found, [judged.get(showing.id) for showing in wanted]),
                "pair": pair,
                "undo": kept.undoable(name) is not None,
                "done": self._done(kept, found, open_pairs=next_one is not None) if pair is None else None,
            }

    def judge(self, reviewer: str, said: Said) -> dict[str, Any]:
        """Keep a judgement; tells of the one before, which this puts beyond undoing, which answer was whose.

        RequestError for one that is none.
        """
        name = self._fixed or reviewer
        with self._lock:
            shown_at = self._since.get((name, said.showing))
            if shown_at is None:
                raise RequestError("this pair was not shown to you yet", next="Reload the page")
            _, before = record.judge(self._folder, self._sample, name, said, shown_at)
        return {"told": f"Kept.{self._names(before, name)}"}

    def undo(self, reviewer: str) -> dict[str, Any]:
        """Retract the reviewer's last judgement. RequestError when there is none."""
        name = self._fixed or reviewer
        with self._lock:
            last = record.retract(self._folder, self._sample, name)
            self._since[name, last.showing] = datetime.now(UTC)
        return {"told": "Undone. The record keeps both."}

    def sign(self, reviewer: str) -> dict[str, Any]:
        """Sign the decision in the reviewer's name. NotDecided while there is none."""
        with self._lock:
            signed = sign(self._artifact, self._fixed or reviewer)
        return {"told": f"Signed by {signed.reviewer}: {signed.decision}."}

    def _pair(self, showing: Showing, reviewer: str) -> dict[str, Any]:
        self._since.setdefault((reviewer, showing.id), datetime.now(UTC))
        answer = self._sample.answer(showing.item)
        _, drawn = record.sides(self._sample, showing, reviewer)
        order = (drawn[0], drawn[0]) if showing.kind == "catch" else drawn
        first, second = differing(*(shown(getattr(answer, side)) for side in order))
        return {
            "id": showing.id,
            "language": shown(answer.language),
            "turns": [{"role": shown(role), "text": shown(text)} for role, text in answer.messages],
            "criteria": shown(answer.criteria),
            "answers": [_plain(first), _plain(second)],
            "cut": [side in self._cut.get(answer.id, ()) for side in order],
        }

    def _names(self, kept: Record, reviewer: str) -> str:
        """Who was who in the pair judged last, by the record before this judgement; nothing of a pair that is yet to be
        judged, or to be judged again."""
        made = kept.latest(reviewer)
        if made is None:
            return ""
        answer = self._sample.answer(made.item)
        asked = shown(next((text for role, text in reversed(answer.messages) if role == "user"), answer.id))
        about = f" Of the pair before that, about “{asked if len(asked) <= _ASKED else f'{asked[:_ASKED].rstrip()}…'}”:"
        if made.kind == "catch":
            slip = made.outcome in ("better", "worse")
            return f"{about} a check, both answers were the same{', word for word' if slip else ''}."
        both = {one.id for one in self._sample.showings if one.kind != "catch" and one.item == made.item}
        if not both <= kept.of(reviewer).keys():
            return ""
        showing = next(one for one in self._sample.showings if one.id == made.showing)
        _, order = record.sides(self._sample, showing, reviewer)
        return f"{about} answer 1 was {NAMES[order[0]]}'s, answer 2 {NAMES[order[1]]}'s."

    def _progress(self, found: Tally | None, judged: list[Judgement | None] | tuple[()]) -> dict[str, Any]:
        times = [one.seconds for one in judged if one is not None]
        left = sum(one is None for one in judged)
        pace = statistics.median(times) if len(times) >= 3 else _GUESS_S
        return {
            "done": len(judged) - left,
            "total": len(judged),
            "minutes": max(1, round(left * min(pace, 300.0) / 60)) if left else 0,
            "stage": found.stage + 1 if found else 1,
            "notice": self._notice(found.stage if found else 0, begun=bool(times)),
        }

    def _notice(self, stage: int, *, begun: bool) -> str:
        """What a reviewer should know about prompts that do not exist: at once, or before they begin."""
        sample, last = self._sample, len(self._sample.plan.stages) - 1
        if sample.missing(stage):
            return (
                f"The plan needs {sample.plan.needed(stage)} prompts and the gate answered {sample.prompts}: "
                f"{sample.missing(stage)} are missing. This review can reject, it cannot accept."
            )
        if sample.missing(last) and not begun:
            return (
                f"A later round, if defects turn up, needs {sample.plan.items} prompts and the gate answered "
                f"{sample.prompts}. Better run quantkit gate with --max-prompts {sample.plan.items} first."
            )
        return ""

    def _done(self, kept: Record, found: Tally, *, open_pairs: bool) -> dict[str, Any]:
        """The last page: what the judgements amount to."""
        status = review_status(self._artifact)
        signed = status.signoff if status.signoff and status.signoff.lines == len(kept.chain.lines) else None
        title = {"accept": "Accepted by the plan", "reject": "Rejected", "continue": "Not decided yet"}
        return {
            "decision": found.decision,
            "title": title[found.decision],
            "reason": f"{found.reason[0].upper()}{found.reason[1:]}.",
            "rate": f"{found.defects} of {found.rated} answers of the random slice were worse to a major or critical "
            f"degree: {found.rate:.1%} (95% interval {found.low:.1%} to {found.high:.1%}).",
            "notes": [shown(note) for note in found.notes],
            "signed": f"Signed by {shown(signed.reviewer)}: {signed.decision}." if signed else "",
            "more": open_pairs and found.decision == "accept",
        }


def _plain(segments: Segments) -> list[list[Any]]:
    return [[text, mark] for text, mark in segments]
