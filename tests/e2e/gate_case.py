"""A tiny checkpoint, conversations and artifacts made of it, sound or damaged on purpose, for the gate to judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.artifact.manifest import Manifest
from quantkit.artifact.write import write_payload
from quantkit.calibration.dataset import load_samples
from quantkit.calibration.statistics import collect
from quantkit.formats import QuantizedMatrix
from quantkit.models import ModelSource, open_source
from quantkit.program import Weight, build_program, fuse, lower_precision, plan_buffers
from quantkit.quantize.kv import kv_scales
from quantkit.quantize.weights import RtnWeights
from quantkit.runtime.text import ChatText
from quantkit_kernels.arrays import Array
from tests.tiny import make_checkpoint

WORDS = ("invoice", "river", "Friday", "customer", "model", "price", "blue", "small", "reply", "sea", "tags", "stock")
ZH = "请把附件中的发票总结一下并在星期五之前回复客户谢谢模型输出应当稳定可靠"

Damage = Callable[[Weight, "Array | QuantizedMatrix"], "Array | QuantizedMatrix"]


@dataclass(frozen=True)
class Case:
    """The source and its data; `policy` is a file with limits for a model this small. `samples`, `tokens`: of
    calibration, at most."""

    folder: Path
    source: ModelSource
    held_out: Path
    calibration: Path
    policy: Path
    prompts: Path
    samples: int = 8
    tokens: int = 256

    @cached_property
    def kv_range(self) -> dict[str, Tensor]:
        """The largest keys and values that calibration sees."""
        self.source.write_tokenizer(self.folder / "tokenizer")
        samples = load_samples(
            [self.calibration],
            ChatText(self.folder / "tokenizer"),
            max_samples=self.samples,
            max_tokens=self.tokens,
            seed=0,
        )
        return collect(self.source, fuse(build_program(self.source.spec)), samples).kv_range()

    def artifact(
        self,
        name: str,
        scheme: str = "W8A16",
        damage: Damage | None = None,
        down: str | None = None,
        kv_format: str = "INT8",
    ) -> Path:
        """Package the source in `scheme` (down projections in `down`) with a calibrated cache in `kv_format`; `damage`
        may change what is stored."""
        program = fuse(build_program(self.source.spec))
        schemes = {
            group: down if down and group.endswith(".down") else scheme
            for group in program.groups()
            if group != "lm_head"
        }
        lowered = plan_buffers(lower_precision(program, schemes, kv_format))
        scales = {f"{name}_scale": kv_scales(seen, kv_format, where=name) for name, seen in self.kv_range.items()}
        weights = RtnWeights(self.source, kv_scales=scales)
        kept = damage or (lambda weight, value: value)
        out = self.folder / name
        write_payload(
            out,
            source=self.source,
            program=lowered,
            weights=((w, kept(w, weights.load(w))) for w in lowered.weights.values()),
            manifest=Manifest(
                quantkit_version=__version__,
                source={"location": self.source.location, "fingerprint": self.source.fingerprint()},
                recipe={"calibration": {"data": [str(self.calibration)]}},
                schemes=schemes,
                kv_format=kv_format,
            ),
        )
        return out


def make_case(folder: Path, family: str = "llama", *, json_too: bool = False) -> Case:
    """A random checkpoint, 16 held-out and 8 calibration conversations in two languages, prompts, and a policy.

    `json_too`: eight more of each, whose answers are JSON.
    """
    source = open_source(str(make_checkpoint(folder / "source", family, dtype="float16")))
    held_out = _conversations(folder / "heldout.jsonl", "held", 16, seed=1, objects=8 if json_too else 0)
    calibration = _conversations(folder / "calib.jsonl", "calib", 8, seed=2, objects=8 if json_too else 0)
    policy = folder / "policy.yaml"
    policy.write_text(
        "version: 1\nname: tiny\nbootstrap: {samples: 200, seed: 0}\nneed: {conversations: 4, tokens: 100}\n"
        "classes:\n- name: any\n  limits:\n  - {metric: mean_kl, upper: 0.6, share_of: RTN-INT4}\n"
        "  - {metric: lost_top1, upper: 0.8, share_of: RTN-INT4}\n"
        "domains: {share_of: RTN-INT4, fail_above: 1.0, name_above: 0.8}\n"
    )
    return Case(folder, source, held_out, calibration, policy, _prompts(folder / "prompts.jsonl"))


def _prompts(path: Path) -> Path:
    """A few prompts of several kinds of check, in both languages."""
    rows = [
        ("en", "reply to the customer", [{"kind": "contains_any", "values": ["a", "e", "i"]}]),
        ("zh", "请总结发票", [{"kind": "language", "value": "zh"}]),
        ("en", "model price of small tags as JSON", [{"kind": "json", "schema": {"type": "object"}}]),
        ("en", "stock of the river", [{"kind": "number", "value": 3}, {"kind": "max_words", "value": 60}]),
    ]
    with path.open("w", encoding="utf-8") as file:
        for i, (language, asked, checks) in enumerate(rows):
            row = {"id": f"p{i}", "category": "support", "language": language, "max_tokens": 8 + i, "checks": checks}
            row["messages"] = [{"role": "user", "content": asked}]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def _conversations(path: Path, prefix: str, count: int, seed: int, objects: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)

    def pick(of: str | tuple[str, ...], n: int) -> list[str]:
        return [of[int(i)] for i in torch.randint(len(of), (n,), generator=generator)]

    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            language = "zh" if i % 2 else "en"
            said = ["".join(pick(ZH, 14)) if i % 2 else " ".join(pick(WORDS, 9)) for _ in range(2)]
            row = {
                "id": f"{prefix}-{i}",
                "category": "support" if i % 4 < 2 else "sql",
                "language": language,
                "messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        for i in range(objects):
            value = {one: " ".join(pick(WORDS, 2)) for one in pick(WORDS, 5)}
            row = {"id": f"{prefix}-json-{i}", "category": "extraction", "language": "en"}
            said = [" ".join(pick(WORDS, 5)), json.dumps(value)]
            row["messages"] = [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]
            file.write(json.dumps(row) + "\n")
    return path
