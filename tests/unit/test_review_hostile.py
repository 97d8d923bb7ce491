"""Every file of a review with every value replaced by nonsense is read, or refused in one line: never a crash."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact.people import first_hash, read_signoff, read_waiver, sample_id, word_of_people
from quantkit.errors import QuantkitError
from quantkit.review.answers import answer_of, read_answers
from quantkit.review.decide import tally
from quantkit.review.record import read_record, retract
from quantkit.review.sample import draw, read_sample, write_sample
from tests.review_case import QUICK, answers, rate

DIGEST = "sha256:" + "d" * 64
NONSENSE: tuple[Any, ...] = (None, True, -1, 10**30, 0.5, float("inf"), "x", "\ud800", [], [[]], {}, {"id": 1})


def spoilt(value: Any) -> Iterator[Any]:
    """Copies of JSON data, each with one value (of the first few in lists) replaced or one key gone."""
    keys: Any = range(min(len(value), 2)) if isinstance(value, list) else list(value)[:40]
    for key in keys:
        for nonsense in NONSENSE:
            changed = copy.copy(value)
            changed[key] = nonsense
            yield changed
        if isinstance(value, dict):
            yield {name: one for name, one in value.items() if name != key}
        if isinstance(value[key], dict | list) and key != "answers":
            for inner in spoilt(value[key]):
                changed = copy.copy(value)
                changed[key] = inner
                yield changed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "evidence" / "review"
    sample = draw([answer_of(line, "") for line in answers(16, critical=1, identical=2)], QUICK, 0, DIGEST)
    write_sample(place, sample)
    rate(place, sample, most=3)
    retract(place, sample, "Ann")
    return place


def refused_or_read(folder: Path) -> bool:
    """Whether everything about the review can be read; False when it is refused as it should be."""
    try:
        word_of_people(folder.parents[1], DIGEST)
        sample = read_sample(folder, DIGEST)
        if sample is not None:
            tally(sample, read_record(folder, sample))
    except QuantkitError as error:
        return one_line(error)
    return True


def one_line(error: QuantkitError) -> bool:
    """False, for an error that says what is wrong in a line; any other is no refusal."""
    if not error.where or "\n" in error.line():
        raise error
    return False


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("name", ["sample.json", "head.json", "signoff.json", "waiver.json"])
def test_nonsense_in_a_file_is_refused_or_harmless(folder: Path, name: str) -> None:
    path = folder / name
    record = read_record(folder, read_sample(folder, DIGEST))  # type: ignore[arg-type]
    if name == "signoff.json":
        lines = {"lines": len(record.chain.lines), "sha256": record.chain.head}
        write(
            path, {"payload_digest": DIGEST, "decision": "accept", "reviewer": "A", "signed": "2026", "record": lines}
        )
        assert read_signoff(folder, DIGEST) is not None
    if name == "waiver.json":
        write(path, {"payload_digest": DIGEST, "reason": "for a trial", "until": "2999-01-01"})
        assert read_waiver(folder, DIGEST) is not None
    whole = json.loads(path.read_text(encoding="utf-8"))
    if name == "sample.json":  # a record would refuse any other sample
        (folder / "record.jsonl").unlink()
        (folder / "head.json").unlink()
    assert refused_or_read(folder)
    refused = 0
    for changed in spoilt(whole):
        write(path, changed)
        refused += not refused_or_read(folder)
    assert refused > 10
    for text in ("", "[]", "7", "{", "[" * 100_000, json.dumps({"payload_digest": DIGEST})):
        path.write_text(text)
        refused_or_read(folder)


@pytest.mark.parametrize("line", [0, 3])
def test_nonsense_in_a_well_chained_line_is_refused_or_harmless(folder: Path, line: int) -> None:
    rows = [json.loads(raw) for raw in (folder / "record.jsonl").read_bytes().splitlines()]
    refused = 0
    for changed in spoilt({key: value for key, value in rows[line].items() if key not in ("n", "previous")}):
        head, raws = first_hash(DIGEST, sample_id(folder)), []
        for number, row in enumerate([*rows[:line], changed, *rows[line + 1 :]], 1):
            raws.append(json.dumps(row | {"n": number, "previous": head}).encode())
            head = sha256(raws[-1]).hexdigest()
        (folder / "record.jsonl").write_bytes(b"".join(raw + b"\n" for raw in raws))
        write(folder / "head.json", {"payload_digest": DIGEST, "lines": len(raws), "sha256": head})
        refused += not refused_or_read(folder)
    assert refused > 20


def test_nonsense_among_the_answers_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    refused = 0
    for changed in spoilt(answers(1)[0]):
        head = {"payload_digest": DIGEST, "kind": "answers", "version": 1}
        path.write_text(f"{json.dumps(head)}\n{json.dumps(changed)}\n")
        try:
            write_sample(tmp_path, draw(read_answers(path, DIGEST), QUICK, 0, DIGEST))
            assert read_sample(tmp_path, DIGEST) is not None
        except QuantkitError as error:
            refused += not one_line(error)
    assert refused > 50
