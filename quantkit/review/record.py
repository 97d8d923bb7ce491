"""The record of judgements: lines are appended, never changed, each chained to the one before (artifact/people.py).

Undoing appends a retraction, and reaches only what the reviewer said last, short of a major or critical degree: what
the page shows next may tell whose answers those were. A line is on disk before anyone is told that it was kept; only
one process writes at a time, and verifies what is there before every append.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from quantkit.artifact.files import sync
from quantkit.artifact.people import HEAD, RECORD, SAMPLE, Chain, read_chain, sample_id
from quantkit.errors import CheckpointError, PreflightError, RequestError
from quantkit.gate.evidence import write_evidence, write_text
from quantkit.review.answers import sha256
from quantkit.review.sample import Kind, Sample, Showing

Outcome = Literal["better", "worse", "tie", "both-bad"]
Severity = Literal["none", "minor", "major", "critical"]
Side = Literal["baseline", "candidate"]
Choice = Literal["first", "second", "tie", "both-bad"]

OUTCOMES: tuple[Outcome, ...] = ("better", "worse", "tie", "both-bad")
SEVERITIES: tuple[Severity, ...] = ("none", "minor", "major", "critical")
CHOICES: tuple[Choice, ...] = ("first", "second", "tie", "both-bad")
REASONS = ("facts", "instruction", "language", "garbled", "format", "unsafe", "incomplete")
MOST_COMMENT, MOST_NAME = 2000, 80
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Judgement:
    """What one reviewer said to one showing. outcome: of the candidate against the baseline.

    Of a catch, `better` and `worse` only say that one of two identical answers was preferred. severity: how much worse
    the worse answer is. n: its line in the record.
    """

    n: int
    showing: str
    kind: Kind
    item: str
    reviewer: str
    outcome: Outcome
    severity: Severity
    reasons: tuple[str, ...]
    comment: str
    seconds: float

    @property
    def grave(self) -> bool:
        """Major or critical, of whichever answer. It stands: what follows from it tells which one that was."""
        return self.severity in ("major", "critical")

    @property
    def defect(self) -> bool:
        """A major or critical regression."""
        return self.kind == "pair" and self.outcome == "worse" and self.grave

    @property
    def critical(self) -> bool:
        """A critical regression."""
        return self.defect and self.severity == "critical"


@dataclass(frozen=True)
class Said:
    """A reviewer's answer on the page, before it is checked: which of the two answers, as they stood, was better."""

    showing: str
    choice: Choice
    severity: Severity = "none"
    reasons: tuple[str, ...] = ()
    comment: str = ""


@dataclass(frozen=True)
class Record:
    """The verified record of one sample: every line, and the judgements that were not retracted, in order."""

    chain: Chain
    judgements: tuple[Judgement, ...]

    def of(self, reviewer: str) -> dict[str, Judgement]:
        """One reviewer's judgements by showing."""
        return {one.showing: one for one in self.judgements if one.reviewer == reviewer}

    def latest(self, reviewer: str) -> Judgement | None:
        """The judgement that this reviewer's last line holds; None when that line retracts one, or there is none."""
        n = next((line["n"] for line in reversed(self.chain.lines) if line["reviewer"] == reviewer), 0)
        return next((one for one in self.judgements if one.n == n), None)

    def undoable(self, reviewer: str) -> Judgement | None:
        """The same, unless it is a grave one."""
        latest = self.latest(reviewer)
        return None if latest is None or latest.grave else latest

    @property
    def reviewers(self) -> tuple[str, ...]:
        """Everybody who judged something, in order of appearance."""
        return tuple(dict.fromkeys(one.reviewer for one in self.judgements))


def sides(sample: Sample, showing: Showing, reviewer: str) -> tuple[str, tuple[Side, Side]]:
    """The side seed, and what stands first and second for this reviewer; a repeat has the pair's sides swapped."""
    seed = sha256(f"{sample.id}\n{showing.item}\n{reviewer}")[:16]
    baseline_first = (int(seed, 16) % 2 == 0) != (showing.kind == "repeat")
    return seed, ("baseline", "candidate") if baseline_first else ("candidate", "baseline")


def read_record(folder: Path, sample: Sample) -> Record:
    """The record in the review folder, verified line by line against its chain, its head and the sample.

    Raises CheckpointError naming the line that is wrong, or when another sample lies there now.
    """
    _require_drawn(folder, sample)
    return _record(read_chain(folder, sample.payload_digest), sample, str(folder / RECORD))


def judge(
    folder: Path, sample: Sample, reviewer: str, said: Said, shown: datetime, *, now: datetime | None = None
) -> tuple[Judgement, Record]:
    """Append one judgement; it is on disk when this returns, with the record as it was before.

    Args:
        shown: when the pair was shown; now: when it was judged, the present if left out.

    Raises RequestError for a judgement that makes no sense or was made already, CheckpointError for a damaged record.
    """
    showing = next((one for one in sample.showings if one.id == said.showing), None)
    if showing is None:
        raise RequestError(f"there is no pair {said.showing[:40]!r} in this sample")
    _check(reviewer, said)
    judged = now or datetime.now(UTC)
    seed, order = sides(sample, showing, reviewer)
    answer = sample.answer(showing.item)
    item = sample.items.get(showing.item)
    content = {
        "kind": "judgement",
        "showing": showing.id,
        "shows": showing.kind,
        "item": showing.item,
        "stratum": answer.stratum,
        "slices": list(item.slices) if item and showing.kind == "pair" else [],
        "inclusion": item.inclusion if item and showing.kind == "pair" else 0.0,
        **answer.hashes,
        "side_seed": seed,
        "first": order[0],
        "reviewer": reviewer,
        "shown": shown.isoformat(timespec="milliseconds"),
        "judged": judged.isoformat(timespec="milliseconds"),
        "choice": said.choice,
        "outcome": _outcome(said.choice, order),
        "severity": said.severity,
        "reasons": list(said.reasons),
        "comment": said.comment,
    }
    with _writing(folder, sample) as (record, append):
        if showing.id in record.of(reviewer):
            raise RequestError("you judged this pair already", next="Undo that first")
        line = append(content)
    return _judgement(line, sample, str(folder / RECORD)), record


def retract(folder: Path, sample: Sample, reviewer: str) -> Judgement:
    """Append the retraction of the judgement a reviewer made last, and give that judgement back.

    RequestError when there is none, or when their last one is retracted already.
    """
    with _writing(folder, sample) as (record, append):
        last = record.undoable(reviewer)
        if last is None:
            raise RequestError(
                "there is nothing to undo",
                next="Only the last judgement can be, and none of a major or critical degree",
            )
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        append({"kind": "retraction", "retracts": last.n, "reviewer": reviewer, "judged": now})
    return last


def _require_drawn(folder: Path, sample: Sample) -> None:
    if sample_id(folder) != sample.id:
        raise CheckpointError("was drawn anew meanwhile", where=str(folder / SAMPLE), next="Open the page again")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing in the review folder meanwhile. PreflightError when nobody may write there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise PreflightError(
            f"cannot be written to ({error.strerror})", where=str(folder), next="Copy the artifact to a place of yours"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _writing(folder: Path, sample: Sample) -> Iterator[tuple[Record, _Append]]:
    """The verified record and a way to append to it, the folder locked. A line that was never finished is set aside."""
    with locked(folder):
        path = folder / RECORD
        _require_drawn(folder, sample)
        chain = read_chain(folder, sample.payload_digest)
        if chain.torn:
            write_text(folder / f"torn-after-line-{len(chain.lines)}.txt", chain.torn.decode("utf-8", "replace"))
            os.truncate(path, path.stat().st_size - len(chain.torn))
        yield _record(chain, sample, str(path)), _Append(folder, sample, chain)


class _Append:
    """Appends to the record while the folder is locked."""

    def __init__(self, folder: Path, sample: Sample, chain: Chain) -> None:
        self._folder, self._sample, self._count, self._head = folder, sample, len(chain.lines), chain.head

    def __call__(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line, flush it to disk, then renew the head. What fails on the way leaves no line."""
        path = self._folder / RECORD
        if not self._count:
            self._renew_head()
        about = {"payload_digest": self._sample.payload_digest, "sample": self._sample.id}
        line = {"n": self._count + 1, "previous": self._head, **about, **content}
        raw = json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(raw + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync(self._folder)
            self._count, self._head = self._count + 1, hashlib.sha256(raw).hexdigest()
            self._renew_head()
        except OSError:
            with suppress(OSError):
                os.truncate(path, size)
            raise
        return line

    def _renew_head(self) -> None:
        content = {"lines": self._count, "sha256": self._head}
        write_evidence(self._folder / HEAD, self._sample.payload_digest, content)


def _record(chain: Chain, sample: Sample, where: str) -> Record:
    standing: dict[int, Judgement] = {}
    latest: dict[str, int] = {}
    for line in chain.lines:
        at = f"{where}:{line['n']}"
        if line.get("kind") == "judgement":
            one = _judgement(line, sample, at)
            if any((one.reviewer, one.showing) == (other.reviewer, other.showing) for other in standing.values()):
                raise CheckpointError("judges a pair that this reviewer had judged already", where=at, next=_ANEW)
            standing[one.n] = one
        elif line.get("kind") == "retraction":
            which = line.get("retracts")
            retracted = standing.pop(which, None) if type(which) is int else None
            if retracted is None or retracted.reviewer != line.get("reviewer"):
                raise CheckpointError("retracts what does not stand", where=at, next=_ANEW)
            if latest[retracted.reviewer] != which or retracted.grave:
                raise CheckpointError("retracts what could not be undone any more", where=at, next=_ANEW)
        else:
            raise CheckpointError(
                f"is a {str(line.get('kind'))[:40]!r}, which a record has none of", where=at, next=_ANEW
            )
        latest[line["reviewer"]] = line["n"]
    return Record(chain, tuple(standing.values()))


def _judgement(line: Mapping[str, Any], sample: Sample, where: str) -> Judgement:
    """A judgement's line, checked against what the sample says was shown."""
    showing = next((one for one in sample.showings if one.id == line.get("showing")), None)
    if showing is None:
        raise CheckpointError("judges a pair that is not in the sample", where=where, next=_ANEW)
    try:
        said = Said(showing.id, line["choice"], line["severity"], tuple(line["reasons"]), line["comment"])
        _check(line["reviewer"], said)
        seed, order = sides(sample, showing, line["reviewer"])
        answer = sample.answer(showing.item)
        wanted = answer.hashes | {"item": showing.item, "shows": showing.kind, "side_seed": seed, "first": order[0]}
        wanted["outcome"] = _outcome(said.choice, order)
        for name, value in wanted.items():
            if line[name] != value:
                raise ValueError(f"{name} is not what the sample and the choice make it")
        seconds = (datetime.fromisoformat(line["judged"]) - datetime.fromisoformat(line["shown"])).total_seconds()
    except (LookupError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise CheckpointError(f"not a judgement of this sample ({error})"[:300], where=where, next=_ANEW) from None
    return Judgement(
        n=line["n"],
        showing=showing.id,
        kind=showing.kind,
        item=showing.item,
        reviewer=line["reviewer"],
        outcome=line["outcome"],
        severity=said.severity,
        reasons=said.reasons,
        comment=said.comment,
        seconds=seconds,
    )


_ANEW = "Restore the folder from a copy, or start over: quantkit review ARTIFACT --redraw"


def _outcome(choice: Choice, order: tuple[Side, Side]) -> Outcome:
    if choice in ("tie", "both-bad"):
        return choice
    return "better" if order[0 if choice == "first" else 1] == "candidate" else "worse"


def check_reviewer(name: str) -> None:
    """RequestError unless `name` can stand for a person in a record."""
    if not isinstance(name, str) or not name.strip() or name != name.strip():
        raise RequestError("a reviewer needs a name", next="Give yours: it goes into the record")
    if len(name) > MOST_NAME or not name.isprintable():
        raise RequestError(f"the name is longer than {MOST_NAME} characters or has hidden ones")


def _check(reviewer: str, said: Said) -> None:
    """RequestError for a judgement that is not one."""
    check_reviewer(reviewer)
    if said.choice not in CHOICES or said.severity not in SEVERITIES:
        raise RequestError("a judgement is first, second, tie or both-bad, and none, minor, major or critical")
    if said.choice == "tie" and said.severity != "none":
        raise RequestError("a tie has no severity")
    if any(reason not in REASONS for reason in said.reasons) or len(set(said.reasons)) != len(said.reasons):
        raise RequestError(f"reasons are among {', '.join(REASONS)}")
    if not isinstance(said.comment, str) or len(said.comment) > MOST_COMMENT or _SURROGATES.search(said.comment):
        raise RequestError(f"a comment is text of at most {MOST_COMMENT} characters")
