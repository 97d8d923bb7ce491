"""A packaged tiny artifact with answers as the gate writes them, for reviewing."""

from __future__ import annotations

import json
import random
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.artifact.manifest import Manifest
from quantkit.artifact.read import open_artifact
from quantkit.artifact.write import write_payload
from quantkit.models import open_source
from quantkit.program import build_program, fuse, lower_precision, plan_buffers
from quantkit.quantize.weights import RtnWeights
from quantkit.review.plan import Plan, Stage
from quantkit.review.record import Judgement, Said, judge, sides
from quantkit.review.sample import Sample
from tests.tiny import make_checkpoint

CATEGORIES = ("support", "sales", "rag", "extraction", "summarizing", "sql", "policy", "multi_turn")
QUICK = Plan((Stage(6, 0, 2), Stage(6, 2, 3)), worst=2, critical=2)
"""A plan that a test can rate by hand."""
T0 = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)

_EN = (
    "The parcel left our warehouse on Tuesday and should reach you within two working days.",
    "You can return the lamp within 30 days; the label is in the box.",
    "Our premium plan costs 49 euros a month and includes phone support.",
    "Restart the router, wait two minutes, then try again.",
)
_ZH = (
    "您的包裹已于周二发出,预计两个工作日内送达。",
    "您可以在三十天内退货,退货标签在包装盒里。",
    "高级套餐每月四十九欧元,包含电话支持。",
    "请重启路由器,等待两分钟后再试一次。",
)


def answer(number: int, *, identical: bool = False, critical: bool = False, **changes: Any) -> dict[str, Any]:
    """One line of `answers.jsonl`; texts follow from the number."""
    chooser = random.Random(number)
    language = "zh" if number % 2 else "en"
    texts = _ZH if language == "zh" else _EN
    baseline = " ".join(chooser.sample(texts, 2))
    candidate = baseline if identical else f"{baseline[: len(baseline) // 2]} {chooser.choice(texts)}!"
    asked = f"第 {number} 位客户:我的订单到哪里了?" if language == "zh" else f"Customer {number}: where is my order?"
    side = {"tokens": 40, "finish": "stop"}
    return {
        "id": f"p{number:03d}",
        "category": CATEGORIES[number // 2 % len(CATEGORIES)],
        "language": language,
        "critical": critical,
        "messages": [{"role": "system", "content": "You help customers."}, {"role": "user", "content": asked}],
        "criteria": "It says when the parcel arrives." if number % 3 == 0 else None,
        "baseline": {"text": baseline, **side},
        "candidate": {"text": candidate, **side},
        "first_divergence": None if identical else 12,
        "divergence": 0.0 if identical else round(chooser.random(), 6),
        "checks": [],
        **changes,
    }


def answers(count: int, *, identical: int = 0, critical: int = 0) -> list[dict[str, Any]]:
    """`count` lines, every so manyth of them identical on both sides, the last ones critical."""
    step = count // identical if identical else count + 1
    return [answer(i, identical=i % step == step - 1, critical=i >= count - critical) for i in range(count)]


def write_answers(artifact: Path, lines: list[dict[str, Any]], digest: str | None = None) -> None:
    """`evidence/gate/answers.jsonl` of the artifact."""
    digest = digest or open_artifact(artifact, check="sizes").payload_digest
    path = artifact / "evidence" / "gate" / "answers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"payload_digest": digest, "kind": "answers", "version": 1}, *lines]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_artifact(folder: Path, family: str = "llama") -> Path:
    """A tiny artifact, packaged; no evidence yet."""
    source = open_source(str(make_checkpoint(folder / "source", family, dtype="float16")))
    program = plan_buffers(lower_precision(fuse(build_program(source.spec)), {}, "FP16"))
    weights = RtnWeights(source, kv_scales={})
    write_payload(
        folder / "artifact",
        source=source,
        program=program,
        weights=((weight, weights.load(weight)) for weight in program.weights.values()),
        manifest=Manifest(
            quantkit_version=__version__,
            source={"location": source.location, "fingerprint": source.fingerprint()},
            recipe={},
            schemes={},
            kv_format="FP16",
        ),
    )
    return folder / "artifact"


def copy_of(artifact: Path, to: Path) -> Path:
    """The artifact again, for a test that writes."""
    shutil.copytree(artifact, to)
    return to


def write_run(artifact: Path, plan: Plan, seed: int = 0) -> None:
    """A run record whose recipe asks for `plan`."""
    digest = open_artifact(artifact, check="sizes").payload_digest
    path = artifact / "evidence" / "run" / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe = {"gate": {"review": {"plan": plan.as_dict(), "seed": seed}}}
    path.write_text(json.dumps({"payload_digest": digest, "recipe": recipe}), encoding="utf-8")


def write_verdict(artifact: Path, verdict: str = "pending-review") -> None:
    """The gate's verdict on the artifact."""
    digest = open_artifact(artifact, check="sizes").payload_digest
    path = artifact / "evidence" / "gate" / "verdict.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    coverage = {"backend": "cpu", "isa": "avx2", "compute": "exact", "kv_format": "FP16"}
    content = {"payload_digest": digest, "verdict": verdict, "policy": "tiny", "coverage": coverage, "rules": []}
    path.write_text(json.dumps(content), encoding="utf-8")


def say(sample: Sample, number: int, outcome: str, severity: str = "none", reviewer: str = "Ann") -> Said:
    """What a reviewer presses at showing `number` to mean `outcome` of the candidate."""
    showing = sample.showings[number]
    if outcome in ("tie", "both-bad"):
        return Said(showing.id, outcome, severity)  # type: ignore[arg-type]
    _, order = sides(sample, showing, reviewer)
    wanted = "candidate" if outcome == "better" else "baseline"
    return Said(showing.id, "first" if order[0] == wanted else "second", severity)  # type: ignore[arg-type]


def rate(
    folder: Path, sample: Sample, outcomes: dict[str, tuple[str, str]] | None = None, *, stages: int = 1,
    reviewer: str = "Ann", most: int = 10_000,
) -> list[Judgement]:  # fmt: skip
    """Judge every showing of the first `stages` passes: a tie, or what `outcomes` says by item."""
    made = []
    for number, showing in enumerate(sample.showings[:most]):
        if showing.stage < stages:
            word = (outcomes or {}).get(showing.item, ("tie", "none")) if showing.kind != "catch" else ("tie", "none")
            shown = T0 + timedelta(minutes=number)
            said = say(sample, number, *word, reviewer=reviewer)
            made.append(judge(folder, sample, reviewer, said, shown, now=shown + timedelta(seconds=9))[0])
    return made
