"""Small inputs of a build: a tiny checkpoint, conversations, a recipe."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.tiny import make_checkpoint

_TOPICS = ("invoice", "delivery", "router", "contract", "password", "refund", "meeting", "report")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Builds in here, and in processes started from here, compute on one thread: fastest for tiny models."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


def write_conversations(path: Path, kind: str, count: int = 16) -> Path:
    """`count` short conversations in two languages that share no message with another `kind`."""
    lines = []
    for i in range(count):
        topic, chinese = _TOPICS[i % len(_TOPICS)], i % 2 == 1
        question = (
            f"{kind}: 请说明第 {i} 号{topic}的处理办法。" if chinese else f"{kind}: what about {topic} {i}, please?"
        )
        answer = f"{kind}: 第 {i} 号已经处理,谢谢。" if chinese else f"{kind}: the {topic} {i} is settled, thank you."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        language = "zh" if chinese else "en"
        lines.append(json.dumps({"id": f"{kind}-{i}", "category": topic, "language": language, "messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_recipe(folder: Path, family: str, *, dtype: str = "float16", recipe: dict[str, Any] | None = None) -> Path:
    """A recipe over a tiny checkpoint of `family`, with its data beside it; `recipe` overlays sections."""
    folder.mkdir(parents=True, exist_ok=True)
    make_checkpoint(folder / "source", family, dtype=dtype)
    write_conversations(folder / "calib.jsonl", "calibration")
    write_conversations(folder / "held.jsonl", "heldout")
    content: dict[str, Any] = {
        "version": 1,
        "name": f"tiny-{family}",
        "model": {"source": "source"},
        "calibration": {"data": ["calib.jsonl"], "max_samples": 8, "max_tokens": 256},
        "quantization": {"schemes": ["W8A16", "W4A16_G64"], "budget_bits": 8.0, "scale_search": "minmax"},
        "gate": {"data": ["held.jsonl"], "max_samples": 8},
    }
    for section, values in (recipe or {}).items():
        content[section] = {**content.get(section, {}), **values} if isinstance(values, dict) else values
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
