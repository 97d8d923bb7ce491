"""The record only grows, and whatever happens to it afterwards is found and named."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact.people import read_chain
from quantkit.errors import CheckpointError, RequestError
from quantkit.review.answers import answer_of
from quantkit.review.record import Said, judge, read_record, retract, sides
from quantkit.review.sample import Sample, draw, write_sample
from tests.review_case import QUICK, T0, answers, rate, say

DIGEST = "sha256:" + "d" * 64


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    found = draw([answer_of(line, "") for line in answers(24, critical=2)], QUICK, 0, DIGEST)
    write_sample(tmp_path, found)
    return found


def lines_of(folder: Path) -> list[bytes]:
    return (folder / "record.jsonl").read_bytes().splitlines(keepends=True)


def test_a_line_says_what_was_shown_to_whom_and_what_they_said(tmp_path: Path, sample: Sample) -> None:
    number = next(i for i, one in enumerate(sample.showings) if one.kind == "pair" and sample.items[one.item].inclusion)
    said = say(sample, number, "worse", "major")
    judge(tmp_path, sample, "Ann", Said(said.showing, said.choice, "major", ("facts",), "nein"), T0)
    line = json.loads(lines_of(tmp_path)[0])
    item = sample.items[sample.showings[number].item]
    seed, order = sides(sample, sample.showings[number], "Ann")
    wanted = {
        "n": 1, "payload_digest": DIGEST, "sample": sample.id, "kind": "judgement", "stratum": item.answer.stratum,
        "inclusion": item.inclusion, "side_seed": seed, "first": order[0], "reviewer": "Ann", "outcome": "worse",
        "severity": "major", "reasons": ["facts"], "comment": "nein", "shown": T0.isoformat(timespec="milliseconds"),
        **item.answer.hashes,
    }  # fmt: skip
    assert {key: line[key] for key in wanted} == wanted


def test_sides_differ_over_pairs_and_reviewers_and_swap_in_repeats(sample: Sample) -> None:
    first = {name: [sides(sample, one, name)[1][0] for one in sample.showings] for name in ("Ann", "Bo")}
    assert set(first["Ann"]) == {"baseline", "candidate"}
    assert first["Ann"] != first["Bo"]
    by_kind = {(one.kind, one.item): one for one in sample.showings}
    repeats = [one for one in sample.showings if one.kind == "repeat"]
    assert repeats
    for again in repeats:
        assert sides(sample, again, "Ann")[1] == sides(sample, by_kind["pair", again.item], "Ann")[1][::-1]


def test_undo_appends_and_what_was_said_stays_in_the_file(tmp_path: Path, sample: Sample) -> None:
    rate(tmp_path, sample, most=3)
    before = b"".join(lines_of(tmp_path))
    assert retract(tmp_path, sample, "Ann").n == 3
    assert b"".join(lines_of(tmp_path)).startswith(before)
    assert [one.n for one in read_record(tmp_path, sample).judgements] == [1, 2]
    judge(tmp_path, sample, "Ann", say(sample, 2, "better"), T0)
    assert retract(tmp_path, sample, "Ann").n == 5


def test_undo_reaches_only_what_was_said_last(tmp_path: Path, sample: Sample) -> None:
    with pytest.raises(RequestError, match="nothing to undo"):
        retract(tmp_path, sample, "Ann")
    rate(tmp_path, sample, most=3)
    rate(tmp_path, sample, most=1, reviewer="Bo")
    assert retract(tmp_path, sample, "Ann").n == 3
    with pytest.raises(RequestError, match="nothing to undo"):
        retract(tmp_path, sample, "Ann")
    assert len(lines_of(tmp_path)) == 5


def test_undo_takes_back_ones_own_judgement_only(tmp_path: Path, sample: Sample) -> None:
    rate(tmp_path, sample, most=2)
    rate(tmp_path, sample, most=1, reviewer="Bo")
    assert retract(tmp_path, sample, "Ann").reviewer == "Ann"
    assert [(one.reviewer, one.n) for one in read_record(tmp_path, sample).judgements] == [("Ann", 1), ("Bo", 3)]


def change(lines: list[bytes]) -> list[bytes]:
    lines[3] = lines[3].replace(b'"outcome": "tie"', b'"outcome": "bad"')
    return lines


TAMPERINGS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "changed": (change, r"jsonl:5: does not follow .* line 4 was changed"),
    "changed at the end": (
        lambda ls: [*ls[:-1], ls[-1].replace(b"tie", b"TIE", 1)],
        r"line 6 was changed since 6 lines",
    ),
    "dropped": (lambda ls: ls[:2] + ls[3:], r"jsonl:3: calls itself line 4: a line was dropped or moved"),
    "dropped at the start": (lambda ls: ls[1:], r"jsonl:1: calls itself line 2"),
    "swapped": (
        lambda ls: [*ls[:2], ls[3], ls[2], *ls[4:]],
        r"jsonl:3: calls itself line 4: a line was dropped or moved",
    ),
    "doubled": (lambda ls: [*ls[:3], ls[2], *ls[3:]], r"jsonl:4: calls itself line 3"),
    "truncated": (lambda ls: ls[:-2], r"has 4 lines and 6 were written: the end is missing"),
    "emptied": (lambda ls: [], r"has 0 lines and 6 were written"),
    "torn": (lambda ls: [*ls[:-1], ls[-1][:40]], r"has 5 lines and 6 were written"),
    "no JSON": (lambda ls: [b"}\n", *ls[1:]], r"jsonl:1: not readable as JSON"),
    "a number": (lambda ls: [b"7\n", *ls[1:]], r"jsonl:1: not a JSON object"),
    "another payload": (
        lambda ls: [one.replace(DIGEST.encode(), b"sha256:" + b"e" * 64) for one in ls],
        r"jsonl:1: is about another payload, sha256:e",
    ),
}


@pytest.mark.parametrize("how", TAMPERINGS)
def test_a_record_that_was_tampered_with_is_refused_by_line(tmp_path: Path, sample: Sample, how: str) -> None:
    rate(tmp_path, sample, most=6)
    assert len(read_record(tmp_path, sample).judgements) == 6
    tamper, words = TAMPERINGS[how]
    (tmp_path / "record.jsonl").write_bytes(b"".join(tamper(lines_of(tmp_path))))
    with pytest.raises(CheckpointError, match=words):
        read_record(tmp_path, sample)
    with pytest.raises(CheckpointError, match=words):
        judge(tmp_path, sample, "Ann", say(sample, 6, "tie"), T0)


def rechained(folder: Path, edit: Callable[[list[dict[str, Any]]], None]) -> None:
    """Edit lines and make the chain and the head whole again, as somebody would who means it."""
    from hashlib import sha256

    from quantkit.artifact.people import first_hash, sample_id

    lines = [json.loads(line) for line in lines_of(folder)]
    edit(lines)
    head, raws = first_hash(DIGEST, sample_id(folder)), []
    for number, line in enumerate(lines, 1):
        line |= {"n": number, "previous": head}
        raws.append(json.dumps(line, ensure_ascii=False).encode())
        head = sha256(raws[-1]).hexdigest()
    (folder / "record.jsonl").write_bytes(b"".join(raw + b"\n" for raw in raws))
    (folder / "head.json").write_text(json.dumps({"payload_digest": DIGEST, "lines": len(raws), "sha256": head}))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda ls: ls[0].update(candidate_sha256="0" * 64), "candidate_sha256 is not what the sample"),
        (lambda ls: ls[0].update(outcome="better"), "outcome is not what the sample and the choice make it"),
        (lambda ls: ls[0].update(first="nobody"), "first is not what the sample"),
        (lambda ls: ls[0].update(showing="s999"), "judges a pair that is not in the sample"),
        (lambda ls: ls[0].update(severity="awful"), "not a judgement of this sample"),
        (lambda ls: ls[0].update(shown="noon"), "not a judgement of this sample"),
        (lambda ls: ls[0].update(kind="poem"), "is a 'poem'"),
        (lambda ls: ls.append(dict(ls[0])), "had judged already"),
        (lambda ls: ls[1].update(kind="retraction", retracts=9), "retracts what does not stand"),
        (lambda ls: ls[2].update(kind="retraction", retracts=1), "retracts what could not be undone"),
        (lambda ls: ls[0].update(sample="sha256:other"), "about another sample"),
    ],
)
def test_a_whole_chain_of_wrong_lines_is_refused_too(
    tmp_path: Path, sample: Sample, edit: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    rate(tmp_path, sample, most=3)
    rechained(tmp_path, lambda lines: None)
    assert len(read_record(tmp_path, sample).judgements) == 3
    rechained(tmp_path, edit)
    with pytest.raises(CheckpointError, match=words):
        read_record(tmp_path, sample)


def test_a_changed_sample_is_refused_by_the_record(tmp_path: Path, sample: Sample) -> None:
    rate(tmp_path, sample, most=2)
    path = tmp_path / "sample.json"
    path.write_text(path.read_text(encoding="utf-8").replace("arrives", "leaves"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="was drawn anew meanwhile"):
        read_record(tmp_path, sample)
    with pytest.raises(CheckpointError, match="drawn anew meanwhile"):
        judge(tmp_path, sample, "Ann", say(sample, 2, "tie"), T0)


def test_a_record_without_its_head_or_a_head_without_its_record_is_refused(tmp_path: Path, sample: Sample) -> None:
    rate(tmp_path, sample, most=2)
    record = (tmp_path / "record.jsonl").read_bytes()
    (tmp_path / "record.jsonl").unlink()
    with pytest.raises(CheckpointError, match="has 0 lines and 2 were written"):
        read_record(tmp_path, sample)
    (tmp_path / "record.jsonl").write_bytes(record)
    (tmp_path / "head.json").unlink()
    with pytest.raises(CheckpointError, match=r"head\.json: is missing"):
        read_record(tmp_path, sample)


def test_a_line_cut_off_by_a_crash_is_set_aside_and_judging_goes_on(tmp_path: Path, sample: Sample) -> None:
    rate(tmp_path, sample, most=2)
    with (tmp_path / "record.jsonl").open("ab") as file:
        file.write(b'{"n": 3, "previous": "ab')
    assert len(read_record(tmp_path, sample).judgements) == 2
    judge(tmp_path, sample, "Ann", say(sample, 2, "tie"), T0)
    assert len(read_record(tmp_path, sample).judgements) == 3
    assert (tmp_path / "torn-after-line-2.txt").read_text() == '{"n": 3, "previous": "ab'


def test_a_crash_between_line_and_head_loses_nothing(tmp_path: Path, sample: Sample) -> None:
    rate(tmp_path, sample, most=2)
    head = (tmp_path / "head.json").read_bytes()
    judge(tmp_path, sample, "Ann", say(sample, 2, "tie"), T0)
    (tmp_path / "head.json").write_bytes(head)
    assert len(read_record(tmp_path, sample).judgements) == 3


def _judge_all(folder: Path, sample: Sample, reviewer: str) -> None:
    rate(folder, sample, reviewer=reviewer)


def test_two_processes_write_one_whole_chain(tmp_path: Path, sample: Sample) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_judge_all, args=(tmp_path, sample, name)) for name in ("Ann", "Bo")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
        assert writer.exitcode == 0
    record = read_record(tmp_path, sample)
    first_pass = sum(one.stage == 0 for one in sample.showings)
    assert len(record.judgements) == len(read_chain(tmp_path, DIGEST).lines) == 2 * first_pass
    assert set(record.reviewers) == {"Ann", "Bo"}


@pytest.mark.parametrize(
    ("reviewer", "said", "words"),
    [
        ("", Said("s001", "tie"), "needs a name"),
        (" Ann", Said("s001", "tie"), "needs a name"),
        ("A\u202en", Said("s001", "tie"), "hidden"),
        ("A" * 81, Said("s001", "tie"), "longer than 80"),
        ("Ann", Said("s999", "tie"), "no pair 's999'"),
        ("Ann", Said("s001", "left"), "first, second, tie"),  # type: ignore[arg-type]
        ("Ann", Said("s001", "first", "awful"), "none, minor, major"),  # type: ignore[arg-type]
        ("Ann", Said("s001", "tie", "major"), "a tie has no severity"),
        ("Ann", Said("s001", "first", "minor", ("mood",)), "reasons are among"),
        ("Ann", Said("s001", "first", "minor", ("facts", "facts")), "reasons are among"),
        ("Ann", Said("s001", "tie", comment="x" * 2001), "at most 2000"),
        ("Ann", Said("s001", "tie", comment="\ud800"), "a comment is text"),
    ],
)
def test_a_judgement_that_is_none_is_refused_and_not_written(
    tmp_path: Path, sample: Sample, reviewer: str, said: Said, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        judge(tmp_path, sample, reviewer, said, T0)
    assert not (tmp_path / "record.jsonl").exists()


def test_nobody_judges_a_pair_twice(tmp_path: Path, sample: Sample) -> None:
    rate(tmp_path, sample, most=1)
    with pytest.raises(RequestError, match="judged this pair already"):
        judge(tmp_path, sample, "Ann", say(sample, 0, "better"), T0)


def test_a_line_that_could_not_be_made_safe_is_taken_back(
    tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else the reviewer is told that nothing was kept, and it was."""
    rate(tmp_path, sample, most=2)
    before = (tmp_path / "record.jsonl").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantkit.review.record.write_evidence", full)
    with pytest.raises(OSError, match="No space left"):
        judge(tmp_path, sample, "Ann", say(sample, 2, "better"), T0)
    assert (tmp_path / "record.jsonl").read_bytes() == before
    monkeypatch.undo()
    judge(tmp_path, sample, "Ann", say(sample, 2, "better"), T0)
    assert len(read_record(tmp_path, sample).judgements) == 3


def test_a_head_of_no_lines_without_a_record_says_nothing(tmp_path: Path, sample: Sample) -> None:
    """What a first judgement leaves that was interrupted before its line."""
    rate(tmp_path, sample, most=1)
    head = json.loads((tmp_path / "head.json").read_bytes())
    (tmp_path / "record.jsonl").unlink()
    (tmp_path / "head.json").write_text(json.dumps(head | {"lines": 0, "sha256": "of another sample"}))
    assert read_record(tmp_path, sample).judgements == ()
    judge(tmp_path, sample, "Ann", say(sample, 0, "tie"), T0)
    assert len(read_record(tmp_path, sample).judgements) == 1
