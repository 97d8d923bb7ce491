"""What people found out about a payload: the record of their judgements, their sign-off, a waiver. Reading only.

`evidence/review/` holds

    sample.json    what they were to look at; its SHA-256 names the sample
    record.jsonl   one judgement or retraction a line, each with the SHA-256 of the line before (`previous`)
    head.json      lines and SHA-256 of the last line, renewed after every append: a lost tail is seen
    signoff.json   who signed which decision, over how many lines ending in which SHA-256
    waiver.json    why people need not look, and until when

The first line's `previous` is SHA-256 over payload digest and sample, so that a record cannot be moved to another
payload or sample. The chain shows accidents and careless edits; it's no signature: who may write all files can
write a new chain. Serving reads this, so it needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from quantkit.artifact.layout import EVIDENCE
from quantkit.errors import CheckpointError

FOLDER = f"{EVIDENCE}/review"
SAMPLE, RECORD, HEAD, SIGNOFF, WAIVER = "sample.json", "record.jsonl", "head.json", "signoff.json", "waiver.json"

Decision = Literal["pass", "fail", "pending-review"]


@dataclass(frozen=True)
class Chain:
    """A verified record. `hashes[k]` is what line k + 1 names as `previous`; `torn` is a last line never finished."""

    lines: tuple[Mapping[str, Any], ...]
    hashes: tuple[str, ...]
    torn: bytes = b""

    @property
    def head(self) -> str:
        """SHA-256 of the last line."""
        return self.hashes[-1]


@dataclass(frozen=True)
class Signoff:
    """Who signed what (`accept` or `reject`), over the first `lines` lines; `content` is the whole file."""

    decision: Literal["accept", "reject"]
    reviewer: str
    signed: str
    lines: int
    head: str
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Waiver:
    """Why people need not look, and the last day on which that holds."""

    reason: str
    until: date
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Word:
    """What people say of a payload, in one word and in a sentence."""

    decision: Decision
    text: str


def word_of_people(artifact: Path, payload_digest: str, today: date | None = None) -> Word:
    """What sign-off and waiver amount to on `today` (default: now). CheckpointError when they cannot be trusted."""
    folder = artifact / FOLDER
    signoff, chain = read_signoff(folder, payload_digest), read_chain(folder, payload_digest)
    if signoff is not None and signoff.lines == len(chain.lines):
        if signoff.decision == "accept":
            return Word("pass", f"accepted by {signoff.reviewer} on {signoff.signed[:10]}")
        return Word("fail", f"people rejected it: signed by {signoff.reviewer} on {signoff.signed[:10]}")
    waiver = read_waiver(folder, payload_digest)
    if waiver is not None and (today or date.today()) <= waiver.until:
        return Word("pass", f"review waived until {waiver.until}: {waiver.reason}")
    if signoff is not None:
        return Word("pending-review", f"{len(chain.lines) - signoff.lines} lines were added after the sign-off")
    if waiver is not None:
        return Word("pending-review", f"the waiver ended on {waiver.until}")
    return Word("pending-review", "nobody has signed")


def read_chain(folder: Path, payload_digest: str) -> Chain:
    """The record in review folder `folder`; empty when there is none.

    Raises CheckpointError naming the line that was changed, dropped or moved, lines lost at the end, or another
    payload or sample than the record is about.
    """
    path = folder / RECORD
    head = _object(folder / HEAD, payload_digest)  # before the record: a writer may be at work, and renews it last
    data = _bytes(path)
    if data is None and (head is None or head.get("lines") == 0):
        return Chain((), (first_hash(payload_digest, sample_id(folder)),))
    if head is None:
        raise CheckpointError("is missing beside the record", where=str(folder / HEAD), next=_ANEW)
    chain = parse_chain(data or b"", payload_digest, sample_id(folder), str(path))
    _require_lines(chain, head.get("lines"), head.get("sha256"), str(path), "were written")
    return chain


def parse_chain(data: bytes, payload_digest: str, sample: str, where: str) -> Chain:
    """The lines of `data`, each checked to follow from the one before; CheckpointError names the first that doesn't."""
    *whole, torn = data.split(b"\n")
    hashes, lines = [first_hash(payload_digest, sample)], []
    for number, raw in enumerate(whole, 1):
        line = _parsed(raw, f"{where}:{number}")
        at = f"{where}:{number}"
        if line.get("payload_digest") != payload_digest:
            other = str(line.get("payload_digest"))[:80]
            raise CheckpointError(f"is about another payload, {other}", where=at, next=_ANEW)
        if line.get("sample") != sample:
            raise CheckpointError("is about another sample than sample.json beside it", where=at, next=_ANEW)
        if type(line.get("n")) is not int or line["n"] != number:
            found = str(line.get("n"))[:20]
            raise CheckpointError(f"calls itself line {found}: a line was dropped or moved", where=at, next=_ANEW)
        if line.get("previous") != hashes[-1]:
            before = f"line {number - 1} was changed" if number > 1 else "the record begins otherwise"
            raise CheckpointError(f"does not follow from what is above it: {before}", where=at, next=_ANEW)
        hashes.append(hashlib.sha256(raw).hexdigest())
        lines.append(line)
    return Chain(tuple(lines), tuple(hashes), torn)


def first_hash(payload_digest: str, sample: str) -> str:
    """What the first line of a record names as `previous`."""
    return hashlib.sha256(f"quantkit review record\n{payload_digest}\n{sample}\n".encode()).hexdigest()


def sample_id(folder: Path) -> str:
    """`sha256:<hex>` of `sample.json`; empty when there is none."""
    data = _bytes(folder / SAMPLE)
    return "" if data is None else f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_signoff(folder: Path, payload_digest: str) -> Signoff | None:
    """The sign-off, checked to be about this payload and the record as it lies; None when nobody signed.

    A record that has grown since is no error: compare `lines`. CheckpointError when what was signed isn't there.
    """
    path = folder / SIGNOFF
    found = _object(path, payload_digest)
    if found is None:
        return None
    try:
        record, decision = found["record"], found["decision"]
        signoff = Signoff(
            decision, str(found["reviewer"]), str(found["signed"]), record["lines"], record["sha256"], found
        )
        if decision not in ("accept", "reject"):
            raise ValueError(f"{str(decision)[:20]!r} is no decision")
        tally = found.get("tally")
        if isinstance(tally, dict) and tally.get("decision", decision) != decision:
            raise ValueError("its own tally decides otherwise")
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"not a sign-off ({error!r})", where=str(path), next=_SIGN) from None
    chain = read_chain(folder, payload_digest)
    _require_lines(chain, signoff.lines, signoff.head, str(folder / RECORD), "were signed")
    return signoff


def read_waiver(folder: Path, payload_digest: str) -> Waiver | None:
    """The waiver, whether it still holds or not; None when there is none. CheckpointError for another file there."""
    path = folder / WAIVER
    found = _object(path, payload_digest)
    if found is None:
        return None
    try:
        return Waiver(str(found["reason"]), date.fromisoformat(found["until"]), found)
    except (LookupError, TypeError, ValueError) as error:
        next = "quantkit review waive ARTIFACT --reason TEXT --until YYYY-MM-DD"
        raise CheckpointError(f"not a waiver ({error!r})", where=str(path), next=next) from None


_ANEW = "Restore the folder from a copy, or start over: quantkit review ARTIFACT --redraw"
_SIGN = "quantkit review sign ARTIFACT --reviewer NAME"


def _require_lines(chain: Chain, lines: Any, sha256: Any, where: str, what: str) -> None:
    """CheckpointError unless the first `lines` lines of the chain end in `sha256`."""
    if type(lines) is not int or lines < 0:
        raise CheckpointError(f"{str(lines)[:20]!r} is no number of lines", where=where, next=_ANEW)
    if lines > len(chain.lines):
        raise CheckpointError(
            f"has {len(chain.lines)} lines and {lines} {what}: the end is missing", where=where, next=_ANEW
        )
    if chain.hashes[lines] != sha256:
        raise CheckpointError(f"line {lines} was changed since {lines} lines {what}", where=where, next=_ANEW)


def _object(path: Path, payload_digest: str) -> dict[str, Any] | None:
    """The JSON object in a file about this payload; None when there is no such file."""
    data = _bytes(path)
    if data is None:
        return None
    found = _parsed(data, str(path))
    if found.get("payload_digest") != payload_digest:
        raise CheckpointError("is about another payload", where=str(path), next=_ANEW)
    return found


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not readable as JSON ({error})", where=where, next=_ANEW) from None
    if not isinstance(found, dict):
        raise CheckpointError("not a JSON object", where=where, next=_ANEW)
    return found


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from None
