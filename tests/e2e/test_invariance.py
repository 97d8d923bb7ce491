"""Logits rows, bit for bit: alone, batched, chunked, on prefix hits and after preemption, INT8 cache on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.engine_case import make_executor, prompts
from tests.e2e.invariance import differing, digests, main

REAL = os.environ.get("QUANTKIT_TEST_ARTIFACT", "")
"""An artifact to prove it on as well."""


@pytest.mark.parametrize(("family", "threads"), [("llama", 1), ("llama", 2), ("gemma3_text", 2)])
def test_logits_rows_are_the_same_however_they_are_served(tmp_path: Path, family: str, threads: int):
    executor = make_executor(tmp_path, family=family, length=512, num_blocks=601, max_tokens=256, threads=threads)
    found = digests(executor, prompts(16, low=20, high=100), steps=256)
    assert differing(found) == []
    assert len(set(found["alone"].values())) == 16


if REAL:

    def test_logits_rows_of_the_real_artifact_are_the_same_however_they_are_served(monkeypatch):
        monkeypatch.setattr("sys.argv", ["invariance", REAL, "--steps", "256"])
        assert main() == 0
