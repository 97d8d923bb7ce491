"""Which samples: the profile's shares and lengths, near duplicates out, memory bounded by the sample."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.calibration.dataset import load_samples
from quantkit.calibration.hub import hub_files
from quantkit.calibration.near import NearDuplicates, jaccard, shingles
from quantkit.calibration.pool import fill_pool
from quantkit.calibration.rows import read_rows
from quantkit.calibration.samples import read_samples, write_samples
from quantkit.calibration.sampling import Lengths, choose, largest_remainder, quotas
from quantkit.calibration.shown import coverage_lines, sample_lines
from quantkit.errors import PreflightError, RecipeError
from quantkit.profile import Cell, Histogram, Profile
from quantkit.runtime.text import ChatText
from tests.tiny import write_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ChatText:
    folder = tmp_path_factory.mktemp("llama")
    write_tokenizer(folder, "llama")
    return ChatText(folder)


def _file(folder: Path, rows: list[dict[str, object]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _row(category: str, language: str, number: int, words: int = 5) -> dict[str, object]:
    said = " ".join(f"{category}{language}{number}w{i}" for i in range(words))
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": f"Yes, {number}."}]
    return {"id": f"{category}-{language}-{number}", "category": category, "language": language, "messages": messages}


def _load(path: Path, text: ChatText, **options: object):
    settings: dict[str, object] = {"max_samples": 100, "max_tokens": 4096, "seed": 0} | options
    return load_samples([path], text, **settings)  # type: ignore[arg-type]


def _cells(made) -> Counter[tuple[str, str]]:
    return Counter((sample.category, sample.language) for sample in made.samples)


PROFILE = Profile((Cell("sql", "en", 0.2), Cell("sql", "zh", 0.1), Cell("support", "en", 0.7)))


@given(st.dictionaries(st.integers(0, 99), st.floats(0.001, 1), min_size=1, max_size=12), st.integers(0, 500))
def test_largest_remainder_stays_within_one_of_each_share(shares: dict[int, float], count: int) -> None:
    named = {(str(key), "en"): share for key, share in shares.items()}
    parts = largest_remainder(named, count)
    total = sum(named.values())
    assert sum(parts.values()) == count
    assert all(abs(parts[key] - count * share / total) < 1 + 1e-6 for key, share in named.items())


def test_the_samples_shares_follow_the_profile(text: ChatText, tmp_path: Path) -> None:
    rows = [_row(c, lang, i) for c in ("support", "sql", "other") for lang in ("en", "zh") for i in range(60)]
    made = _load(_file(tmp_path, rows), text, max_samples=40, profile=PROFILE)
    assert _cells(made) == {("support", "en"): 28, ("sql", "en"): 8, ("sql", "zh"): 4}
    assert made.coverage["outside"] == 3 * 60
    assert made.coverage["missing"] == []
    assert [(s["share"], s["wanted_share"]) for s in made.coverage["strata"]] == [(0.2, 0.2), (0.1, 0.1), (0.7, 0.7)]


def test_what_a_cell_cannot_give_is_shared_out_and_told(text: ChatText, tmp_path: Path) -> None:
    rows = [_row("support", "en", i) for i in range(60)] + [_row("sql", "en", i) for i in range(3)]
    made = _load(_file(tmp_path, rows), text, max_samples=40, profile=PROFILE)
    assert _cells(made) == {("support", "en"): 37, ("sql", "en"): 3}
    assert made.coverage["missing"] == [
        {"category": "sql", "language": "en", "samples": 3, "wanted": 8},
        {"category": "sql", "language": "zh", "samples": 0, "wanted": 4},
    ]
    shown = "\n".join(coverage_lines(made.coverage))
    assert "too few conversations: sql zh has 0 of 4 that the profile asks for" in shown


def test_a_cell_named_any_takes_what_no_other_cell_names(text: ChatText, tmp_path: Path) -> None:
    profile = Profile((Cell("any", "any", 0.5), Cell("sql", "en", 0.5)))
    rows = [_row(c, lang, i) for c in ("sql", "chat") for lang in ("en", "zh") for i in range(20)]
    made = _load(_file(tmp_path, rows), text, max_samples=20, profile=profile)
    assert _cells(made)["sql", "en"] == 10
    assert made.coverage["outside"] == 0


def test_no_sample_within_the_profile_is_refused(text: ChatText, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no calibration sample is left of 1 rows .*1 outside the profile"):
        _load(_file(tmp_path, [_row("chat", "fr", 1)]), text, profile=PROFILE)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30), min_size=1), st.integers(0, 120))
def test_quotas_give_all_there_is_and_no_more(available: dict[str, int], count: int) -> None:
    named = {(key, "en"): number for key, number in available.items()}
    given_ = quotas(named, count, None)
    assert sum(given_.values()) == min(count, sum(named.values()))
    assert all(given_[key] <= named[key] for key in named)
    open_ = [given_[key] for key in named if given_[key] < named[key]]
    assert not open_ or max(given_.values()) - min(open_) <= 1, "cells with rows left have about as many as any other"


def test_lengths_follow_the_profiles_histogram(text: ChatText, tmp_path: Path) -> None:
    rows = [_row("sql", "en", i, words=3) for i in range(80)] + [
        _row("sql", "en", 100 + i, words=40) for i in range(40)
    ]
    path = _file(tmp_path, rows)
    sizes = sorted(len(sample.ids) for sample in _load(path, text, max_samples=120).samples)
    short, long = sizes[0] + 60, sizes[-1]
    profile = Profile((Cell("sql", "en", 1.0, Histogram((short, long), (0.25, 0.75))),))
    made = _load(path, text, max_samples=40, profile=profile)
    assert sum(len(sample.ids) > short for sample in made.samples) == 30


def test_prompt_and_answer_lengths_are_matched_together() -> None:
    cell = Cell("a", "en", 1.0, Histogram((10, 100), (0.5, 0.5)), Histogram((10, 100), (0.5, 0.5)))
    kinds = [Lengths(5, 5), Lengths(5, 50), Lengths(50, 5), Lengths(50, 50)]
    picked = choose([kind for kind in kinds for _ in range(20)], 40, cell)
    assert Counter(kind // 20 < 2 for kind in picked) == {True: 20, False: 20}
    assert Counter(kind // 20 % 2 for kind in picked) == {0: 20, 1: 20}
    assert len(set(picked)) == 40


def test_prompt_tokens_end_where_the_last_answer_begins(text: ChatText, tmp_path: Path) -> None:
    (sample,) = _load(_file(tmp_path, [_row("sql", "en", 7)]), text).samples
    assert sample.prompt_tokens is not None
    assert text.decode(sample.ids[sample.prompt_tokens :], skip_special=False) == "Yes, 7.<|eot_id|>"


LONG = "The parcel with order {} was handed to the carrier on Monday morning and should reach you by Thursday evening"
CHINESE = "您的订单已经在星期一上午交给快递公司，预计星期四晚上之前送达，请您保持电话畅通，编号{}"


@pytest.mark.parametrize("said", [LONG, CHINESE])
def test_near_duplicates_are_dropped_and_counted_the_first_stays(text: ChatText, tmp_path: Path, said: str) -> None:
    ending = (said.format("kxq")).replace("Monday morning", "MONDAY, morning").replace("，", ", ")
    rows = [
        {"id": str(i), "text": words}
        for i, words in enumerate(
            [said.format("kxq"), f"{ending}!", "Something else altogether", said.format("kxq") * 2]
        )
    ]
    made = _load(_file(tmp_path, rows), text)
    assert [sample.name for sample in made.samples] == ["0", "2"]
    assert made.coverage["near_duplicates"] == 2
    assert made.coverage["duplicates"] == 0


def test_texts_that_share_less_than_four_fifths_both_stay() -> None:
    words = [f"word{i}" for i in range(60)]
    seen = NearDuplicates()
    assert seen.first_like(" ".join(words)) is None
    other = " ".join([*words[:50], *(f"other{i}" for i in range(10))])
    assert 0.6 < jaccard(shingles(" ".join(words)), shingles(other)) < 0.8
    assert seen.first_like(other) is None
    assert seen.first_like(" ".join(words[:58])) == 0


@given(st.integers(0, 2**32), st.integers(0, 10))
def test_every_pair_above_the_limit_is_found(seed: int, changed: int) -> None:
    words = [f"w{seed}x{i}" for i in range(120)]
    other = [*words[: 120 - changed], *(f"z{i}" for i in range(changed))]
    similar = jaccard(shingles(" ".join(words)), shingles(" ".join(other))) >= 0.8
    seen = NearDuplicates()
    seen.first_like(" ".join(words))
    assert (seen.first_like(" ".join(other)) == 0) == similar


def test_personal_data_is_gone_before_tokenizing_and_counted(text: ChatText, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "I am eve@mail.example, call +49 170 1234567"}]}]
    path = _file(tmp_path, rows)
    made = _load(path, text)
    decoded = text.decode(made.samples[0].ids, skip_special=False)
    assert "[EMAIL], call [PHONE]" in decoded
    assert made.coverage["pii"] == {"email": 1, "phone": 1}
    assert "eve" not in json.dumps(made.coverage)
    kept = _load(path, text, scrub_pii=False)
    assert "eve@mail.example" in text.decode(kept.samples[0].ids, skip_special=False)
    assert kept.coverage["pii"] == {}


def test_rows_that_differ_in_personal_data_only_count_once(text: ChatText, tmp_path: Path) -> None:
    rows = [{"text": f"Please send the bill for March to {name}@mail.example"} for name in ("eve", "bob")]
    assert _load(_file(tmp_path, rows), text).coverage["near_duplicates"] == 1


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    rows = 4000
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for i in range(rows):
            file.write(json.dumps({"text": f"{i} " + "long text " * 300, "category": "a", "language": "en"}) + "\n")
    tracemalloc.start()
    pool = fill_pool([path], None, per_cell=20, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (pool.loaded, len(pool.rows)) == (rows, 20)
    assert peak < path.stat().st_size / 20


def test_the_pool_is_an_even_sample_of_the_whole_file(tmp_path: Path) -> None:
    path = _file(tmp_path, [_row("a", "en", i, words=1) for i in range(1000)])
    numbers = [row.number for row in fill_pool([path], None, per_cell=200, seed=3).rows]
    assert numbers == sorted(numbers)
    quarters = Counter((number - 1) // 250 for number in numbers)
    assert all(30 <= quarters[quarter] <= 70 for quarter in range(4)), quarters
    assert numbers != [row.number for row in fill_pool([path], None, per_cell=200, seed=4).rows]


def test_categories_that_must_be_identifiers_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, [_row(f"ticket {i}", "en", i, words=1) for i in range(1001)])
    with pytest.raises(RecipeError, match=r"data\.jsonl row 1001: more than 1000 pairs of category and language"):
        fill_pool([path], None, per_cell=5, seed=0)


def test_rows_of_a_jsonl_file_need_not_have_the_same_keys(tmp_path: Path) -> None:
    path = _file(
        tmp_path, [{"text": "a", "meta": {"x": 1}}, {"text": "b", "meta": [2], "more": None}, {"messages": []}]
    )
    assert [list(row) for row in read_rows(path)] == [["text", "meta"], ["text", "meta", "more"], ["messages"]]


def test_a_json_array_and_a_byte_order_mark_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"},\n {"text": "b"}]')
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert [row["text"] for row in read_rows(tmp_path / "a.json")] == ["a", "b"]
    assert [row["text"] for row in read_rows(tmp_path / "b.jsonl")] == ["a"]
    (tmp_path / "c.json").write_text("[1]")
    with pytest.raises(RecipeError, match=r"c\.json: item 1 of the array is not a JSON object"):
        list(read_rows(tmp_path / "c.json"))


def test_a_hub_data_set_without_a_network_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PreflightError, match=r"r\.yaml:4: dataset org/talks is neither .*give its JSONL, Parquet"):
        hub_files("hub:org/talks/data/*.parquet", "r.yaml:4")
    with pytest.raises(RecipeError, match=r"must read hub:ORG/NAME"):
        hub_files("hub:talks", "r.yaml:4")


def test_hub_files_in_the_cache_are_found_by_glob_or_by_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "datasets--org--held" / "snapshots" / ("0" * 40)
    (snapshot / "data").mkdir(parents=True)
    for name in ("data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl", "README.md"):
        (snapshot / name).write_text('{"text": "a"}\n')
    (tmp_path / "datasets--org--held" / "refs").mkdir()
    (tmp_path / "datasets--org--held" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert [path.name for path in hub_files("hub:org/held")] == ["train-0.jsonl", "train-1.jsonl"]
    assert [path.name for path in hub_files("hub:org/held/data/test-*")] == ["test-0.jsonl"]
    with pytest.raises(RecipeError, match=r"data set org/held holds no data/none\.csv.*Files there: data/test-0"):
        hub_files("hub:org/held/data/none.csv")


def test_two_samples_are_shown_decoded_short_and_harmless(text: ChatText, tmp_path: Path) -> None:
    hostile = {"text": "first\x1b[31m line\n" + "x" * 500 + "\n" * 30 + "end", "language": "en"}
    rows = [hostile, {"text": "第二个样本", "language": "zh"}]
    lines = sample_lines(_load(_file(tmp_path, rows), text), text)
    assert len([line for line in lines if line.startswith("sample ")]) == 2
    assert "\x1b" not in "".join(lines)
    assert all(len(line) < 150 for line in lines)
    assert len(lines) < 14
    assert any("第二个样本" in line for line in lines)


def test_labels_that_no_file_can_hold_are_kept_in_a_form_that_it_can(text: ChatText, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = {"id": "\ud800" + "x" * 500, "category": "a\ud83d", "language": {"en": 1}, "text": "some words"}
    path.write_text(json.dumps(row) + "\n")
    made = _load(path, text)
    write_samples(made, tmp_path)
    assert read_samples(tmp_path) == made
    assert (made.samples[0].category, len(made.samples[0].name)) == ("a?", 200)
