"""Numbers that no double holds, wherever a file or a request may bring one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quantkit.errors import CheckpointError, RecipeError, RequestError
from quantkit.models.config import Config
from quantkit.numeric import is_number
from quantkit.profile import read_profile
from quantkit.profile.logs import profile_of_logs
from quantkit.runtime.sampling import SamplingParams

LARGE = 10**400


@pytest.mark.parametrize("value", [LARGE, -LARGE, math.nan, math.inf, True, "1", None])
def test_what_no_double_holds_is_no_number(value: object) -> None:
    assert not is_number(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, 10**300, 5e-324])
def test_what_a_double_holds_is_a_number(value: object) -> None:
    assert is_number(value)


@pytest.mark.parametrize("line", ["categories: {a: %d}", "categories: {a: 1}\nconcurrency: {mean: %d, peak: 3}"])
def test_a_profile_with_a_number_too_large_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(f"version: 1\nlanguages: {{en: 1}}\n{line % LARGE}\n")
    with pytest.raises(RecipeError, match=rf"profile\.yaml:{3 + line.count(chr(10))}: .*not 1000"):
        read_profile(path)


def test_a_log_with_a_time_too_large_still_counts_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt_tokens": 12, "time": LARGE, "duration_ms": 5}))
    made, tally = profile_of_logs([path])
    assert (tally.requests, made.concurrency) == (1, None)


def test_a_request_with_a_temperature_too_large_is_refused() -> None:
    with pytest.raises(RequestError, match="temperature must be at least 0"):
        SamplingParams(temperature=LARGE)


def test_a_config_with_a_number_too_large_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rms_norm_eps must be a positive number"):
        Config({"rms_norm_eps": LARGE}).number("rms_norm_eps")
