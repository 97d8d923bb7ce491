"""An artifact is served, talked to and measured by processes in which torch and transformers cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.models import open_source
from quantkit_kernels import cpu
from tests.e2e.serving import Server
from tests.tiny import make_checkpoint
from tests.unit.test_artifact_payload import _write

COMMAND = (sys.executable, "-c", "from quantkit.cli import main; main()")
BLOCKER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of every kind, an INT8 cache and a head derived from the embedding."""
    assert cpu.available()[0]
    return written(tmp_path_factory.mktemp("artifact"), tied=True, dtype=request.param)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What makes every Python process started with it refuse both."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def written(folder: Path, **options: Any) -> Path:
    source = make_checkpoint(folder / "source", "llama", max_position_embeddings=1024, **options)
    _write(folder / "artifact", open_source(str(source)))
    return folder / "artifact"


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


def test_the_front_and_the_engine_serve_without_torch(artifact: Path, environment: dict[str, str]) -> None:
    options = ("--accept-ungated", "--threads", "1", "--backend", "cpu")
    with Server(artifact, *options, **environment) as server, server.client() as client:
        asked = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, "logprobs": 2}
        answer = client.post("/v1/completions", json=asked).json()
    assert answer["usage"]["completion_tokens"] == 4


def test_chat_answers_without_torch(artifact: Path, environment: dict[str, str]) -> None:
    said = run(
        environment, "chat", str(artifact), "--prompt", "hello", "--max-tokens", "4", "--threads", "1",
        "--accept-ungated",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "tokens/s" in said.stderr


def test_throughput_is_measured_without_torch(environment: dict[str, str], tmp_path: Path) -> None:
    artifact = written(tmp_path, tied=False, dtype="float16")
    said = run(environment, "bench", "throughput", str(artifact), "--threads", "1")
    assert said.returncode == 0, said.stderr
    assert "prefill_512" in said.stdout


def test_the_blocker_blocks(environment: dict[str, str], tmp_path: Path) -> None:
    """An unquantized source is read with torch: there the same processes fail."""
    folder = make_checkpoint(tmp_path / "source", "llama")
    said = run(environment, "chat", str(folder), "--prompt", "hello", "--max-tokens", "4", "--threads", "1")
    assert said.returncode != 0
    assert "torch is blocked" in said.stderr
