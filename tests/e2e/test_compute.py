"""Integer products through a whole model: native and reference agree, and differ from exact compute by little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit.runtime.step import StepInputs
from tests.e2e.engine_case import make_executor

PROMPT = 40


def last_logits(folder: Path, family: str, backend: str, compute: str) -> NDArray[np.float32]:
    executor = make_executor(
        folder, family=family, num_blocks=9, max_tokens=64, length=64, backend=backend, compute=compute
    )
    ids = np.random.default_rng(3).integers(0, executor.program.vocab_size, PROMPT).tolist()
    assert executor.program.compute == compute
    step = StepInputs.of_sequences([ids], [[1, 2, 3]])
    return executor.step(step).copy()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_native_and_reference_agree_and_stay_near_exact_compute(tmp_path: Path, family: str) -> None:
    native = last_logits(tmp_path, family, "cpu", "int8")
    exact = last_logits(tmp_path, family, "cpu", "exact")
    spread = float(exact.std())
    # A code that rounds the other way on a last bit is worth 1/127 of a block, here a model of tiny layers.
    np.testing.assert_allclose(native, last_logits(tmp_path, family, "reference", "int8"), atol=0.05 * spread, rtol=0)
    np.testing.assert_allclose(exact, last_logits(tmp_path, family, "reference", "exact"), atol=2e-3 * spread, rtol=0)
    error = float(np.sqrt(np.mean((native - exact) ** 2)))
    assert 0 < error < 0.2 * spread  # random layers of 64 channels; real ones lose a hundredth of that
