"""An artifact's review as a whole: its sample, where it stands, signing and waiving it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from quantkit.artifact import people
from quantkit.artifact.files import digest_file
from quantkit.artifact.people import Decision, Signoff, Waiver, Word
from quantkit.artifact.read import open_artifact
from quantkit.errors import CheckpointError, QuantkitError, RecipeError
from quantkit.gate.evidence import FOLDER, read_evidence, write_evidence
from quantkit.review.answers import ANSWERS, Answer, read_answers
from quantkit.review.decide import Tally, tally
from quantkit.review.plan import Plan
from quantkit.review.record import Record, check_reviewer, locked, read_record
from quantkit.review.sample import Sample, draw, read_sample, write_sample

EXIT_CODES: Mapping[Decision, int] = {"pass": 0, "fail": 10, "pending-review": 12}
_RUN = Path("run") / "run.json"
_SEED = 0
_LEAST_REASON = 8


class NotDecided(QuantkitError):
    """The plan is not met yet."""

    exit_code = 12


@dataclass(frozen=True)
class Status:
    """Where the review of a payload stands.

    verdict: pass, fail or pending-review, with `reason` in a sentence. An accept counts once it is signed, a reject at
    once. sample, record and tally are None before a sample was drawn. set_aside: reviews that a redraw ended.
    """

    payload_digest: str
    verdict: Decision
    reason: str
    sample: Sample | None
    record: Record | None
    tally: Tally | None
    signoff: Signoff | None
    waiver: Waiver | None
    set_aside: int = 0

    @property
    def exit_code(self) -> int:
        """0 pass, 10 fail, 12 pending-review."""
        return EXIT_CODES[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the operating curve included."""
        return {
            "payload_digest": self.payload_digest,
            "verdict": self.verdict,
            "reason": self.reason,
            "plan": self.sample.plan.as_dict() if self.sample else None,
            "plan_text": str(self.sample.plan) if self.sample else None,
            "operating_curve": self.sample.plan.operating_curve() if self.sample else None,
            "tally": self.tally.as_dict() if self.tally else None,
            "record": _lines(self.record) if self.record else None,
            "signoff": dict(self.signoff.content) if self.signoff else None,
            "waiver": dict(self.waiver.content) if self.waiver else None,
            "set_aside": self.set_aside,
        }


def review_status(artifact: Path | str, *, today: date | None = None) -> Status:
    """Where the review of an artifact stands, everything about it verified first.

    Raises CheckpointError for a record with a changed, dropped or moved line, a lost end, or another payload's digest.
    """
    folder = Path(artifact)
    digest = open_artifact(folder, check="sizes").payload_digest
    place = folder / people.FOLDER
    word = people.word_of_people(folder, digest, today)
    signoff, waiver = people.read_signoff(place, digest), people.read_waiver(place, digest)
    sample = read_sample(place, digest)
    if sample is None:
        return Status(digest, word.decision, word.text, None, None, None, signoff, waiver)
    record = read_record(place, sample)
    found = tally(sample, record)
    _require_signed_as_found(place, signoff, record, found)
    verdict, reason = _verdict(word, found)
    return Status(digest, verdict, reason, sample, record, found, signoff, waiver, _aside(place))


def joined(gate: str, people: str) -> str:
    """The gate's verdict and people's in one: people decide where the gate left it to them (pending-review), and their
    reject outweighs a pass."""
    return people if gate == "pending-review" or (gate == "pass" and people == "fail") else gate


def open_sample(artifact: Path | str, *, redraw: bool = False) -> Sample:
    """The artifact's sample, drawn from the gate's answers; once somebody has judged, it stays as it is.

    redraw: set sample, record and sign-off aside (`evidence/review/aside-N/`) and draw anew.
    Plan and seed are the recipe's (`gate.review`), the defaults where it has none.

    Raises CheckpointError when there are no answers, or sample or answers are another payload's.
    """
    folder = Path(artifact)
    digest = open_artifact(folder, check="sizes").payload_digest
    place, answers = folder / people.FOLDER, folder / FOLDER / ANSWERS
    with locked(place):
        if not redraw and ((place / people.RECORD).exists() or not answers.exists()):
            found = read_sample(place, digest)
            if found is not None:
                return found
        rows = read_answers(answers, digest)
        if not rows:
            raise CheckpointError("holds no answers", where=str(answers), next="Run quantkit gate")
        plan, seed = _asked(folder, digest)
        sample = draw(rows, plan, seed, digest, digest_file(answers).sha256)
        if redraw:
            _set_aside(place)
        if people.sample_id(place) != sample.id:
            write_sample(place, sample)
    return sample


def drawn_from(artifact: Path | str, sample: Sample) -> list[Answer] | None:
    """The gate's answers that the sample was drawn from; None when they are gone."""
    answers = Path(artifact) / FOLDER / ANSWERS
    if not answers.exists() or digest_file(answers).sha256 != sample.drawn_from:
        return None
    return read_answers(answers, sample.payload_digest)


def check_draw(artifact: Path | str, sample: Sample) -> bool:
    """Whether the answers are still there that the sample was drawn from, and so the drawing could be checked.

    Raises CheckpointError when they give another sample: somebody picked it by hand.
    """
    folder, rows = Path(artifact), drawn_from(artifact, sample)
    if rows is None:
        return False
    if draw(rows, sample.plan, sample.seed, sample.payload_digest, sample.drawn_from) != sample:
        raise CheckpointError(
            "is not what its seed, plan and answers give: it was picked by hand",
            where=str(folder / people.FOLDER / people.SAMPLE),
            next="Start over: quantkit review ARTIFACT --redraw",
        )
    return True


def sign(artifact: Path | str, reviewer: str) -> Signoff:
    """Sign what the record amounts to: `evidence/review/signoff.json`, which binds payload, sample and record.

    Every byte of the payload is checked first, and that nobody picked the sample: what is signed is what was judged.

    Raises NotDecided (exit 12) while the plan asks for more, CheckpointError for a damaged record.
    """
    check_reviewer(reviewer)
    folder = Path(artifact)
    place = folder / people.FOLDER
    open_artifact(folder, check="full")
    check_draw(folder, open_sample(folder))
    with locked(place):
        status = review_status(folder)
        if status.sample is None or status.record is None or status.tally is None:
            raise NotDecided("nothing was judged yet", next=f"quantkit review {folder}")
        found = status.tally
        if found.decision == "continue":
            raise NotDecided(f"not decided yet: {found.reason}", where=str(folder), next=f"quantkit review {folder}")
        content = {
            "kind": "review sign-off",
            "version": 1,
            "decision": found.decision,
            "reason": found.reason,
            "reviewer": reviewer,
            "signed": datetime.now(UTC).isoformat(timespec="seconds"),
            "sample": status.sample.id,
            "record": _lines(status.record),
            "plan": status.sample.plan.as_dict(),
            "tally": found.as_dict(),
        }
        write_evidence(place / people.SIGNOFF, status.payload_digest, content)
        signed = people.read_signoff(place, status.payload_digest)
    if signed is None:
        raise CheckpointError("vanished while it was written", where=str(place / people.SIGNOFF))
    return signed


def waive(artifact: Path | str, reason: str, until: date, *, today: date | None = None) -> Waiver:
    """Let the figures alone decide until a day: `evidence/review/waiver.json`. A signed reject outweighs it.

    RecipeError for no reason worth the name, or a day that is past.
    """
    folder = Path(artifact)
    digest = open_artifact(folder, check="sizes").payload_digest
    now = today or date.today()
    if len(reason.strip()) < _LEAST_REASON or not reason.isprintable():
        raise RecipeError(f"a waiver needs a reason of at least {_LEAST_REASON} characters", next="--reason TEXT")
    if until < now:
        raise RecipeError(f"{until} is past", next="--until YYYY-MM-DD, the last day on which it holds")
    place = folder / people.FOLDER
    content = {"kind": "review waiver", "version": 1, "reason": reason.strip(), "until": until.isoformat()}
    with locked(place):
        write_evidence(place / people.WAIVER, digest, {**content, "waived": now.isoformat()})
    return Waiver(reason.strip(), until, content)


def _verdict(word: Word, found: Tally) -> tuple[Decision, str]:
    if found.decision == "reject":
        return "fail", f"people reject it: {found.reason}"
    if found.decision == "accept" and word.decision != "pass":
        return "pending-review", f"accepted, not signed: {found.reason}; {word.text}"
    if found.decision == "accept":
        return "pass", f"{found.reason}; {word.text}"
    return word.decision, word.text if word.decision == "pass" else f"{found.reason}; {word.text}"


def _require_signed_as_found(place: Path, signoff: Signoff | None, record: Record, found: Tally) -> None:
    """A sign-off over the whole record says what the record says."""
    whole = signoff is not None and signoff.lines == len(record.chain.lines)
    if signoff is not None and whole and signoff.decision != found.decision:
        raise CheckpointError(
            f"says {signoff.decision}, the record it signs says {found.decision} ({found.reason})",
            where=str(place / people.SIGNOFF),
            next="Remove the file and sign again: quantkit review sign ARTIFACT --reviewer NAME",
        )


def _lines(record: Record) -> dict[str, Any]:
    return {"lines": len(record.chain.lines), "sha256": record.chain.head}


def _asked(folder: Path, digest: str) -> tuple[Plan, int]:
    """Plan and seed of the recipe that the artifact was built by. CheckpointError for a run record that is none."""
    path = folder / FOLDER / _RUN
    run = read_evidence(path, digest) or {}
    try:
        review = ((run.get("recipe") or {}).get("gate") or {}).get("review") or {}
        return Plan.of(review.get("plan")), int(review.get("seed") or _SEED)
    except (AttributeError, TypeError, ValueError, OverflowError, RecipeError) as error:
        raise CheckpointError(f"not a run record ({error})", where=str(path), next="Build the artifact again") from None


def _set_aside(place: Path) -> None:
    names = [people.SAMPLE, people.RECORD, people.HEAD, people.SIGNOFF]
    present = [name for name in names if (place / name).exists()]
    if not present:
        return
    aside = place / f"aside-{_aside(place) + 1}"
    aside.mkdir()
    for name in present:
        (place / name).rename(aside / name)


def _aside(place: Path) -> int:
    return sum(1 for _ in place.glob("aside-*"))
