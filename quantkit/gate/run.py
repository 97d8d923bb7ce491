"""`run_gate`: an artifact and its source in, evidence and a verdict out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.artifact.read import Artifact, open_artifact
from quantkit.errors import CheckpointError
from quantkit.gate.answering import MAX_NEW_TOKENS, MAX_PROMPTS, answer, questions
from quantkit.gate.answering import cost as answer_cost
from quantkit.gate.answers import write_answers
from quantkit.gate.audit import audit_rules, audit_table
from quantkit.gate.audit_weights import audit_weights
from quantkit.gate.data import each_conversation, make_windows, read_conversations, refuse_overlap
from quantkit.gate.evidence import FOLDER, write_evidence
from quantkit.gate.measure import Models, Progress, Told, measure
from quantkit.gate.measure import cost as token_cost
from quantkit.gate.policy import Policy, load_policy
from quantkit.gate.prompts import choose, read_prompts
from quantkit.gate.results import answers_table, data_table, domain_rows, variant_row, worst_items
from quantkit.gate.structure import structural_rules
from quantkit.gate.verdict import Verdict, decide
from quantkit.models import ModelSource, open_source
from quantkit.runtime.text import ChatText

MAX_TOKENS = 8192
"""Held-out tokens judged on: standard errors of a few percent, about a minute for a 135M model on two cores."""
MAX_WINDOW = 512
SEED = 0

VERDICT = Path("gate") / "verdict.json"
DETAILS = Path("gate") / "gate.json"
ANSWERS = Path("gate") / "answers.jsonl"


@dataclass(frozen=True)
class GateResult:
    """The verdict, its details as plain data (`gate.json`), and the evidence folder they were written to."""

    verdict: Verdict
    details: dict[str, Any]
    evidence: Path

    @property
    def exit_code(self) -> int:
        """0 pass, 10 fail, 11 inconclusive, 12 pending-review."""
        return self.verdict.exit_code


def run_gate(
    artifact: Path | str,
    source: ModelSource | str,
    data: Sequence[Path],
    *,
    prompts: Sequence[Path] = (),
    calibration: Sequence[Path] = (),
    policy: Policy | str = "standard",
    review_waiver: str | None = None,
    evidence: Path | None = None,
    base: Path = Path("."),
    max_samples: int = 64,
    max_tokens: int = MAX_TOKENS,
    max_prompts: int = MAX_PROMPTS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    metrics: Sequence[Path] = (),
    threads: int | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> GateResult:
    """Judge `artifact`, as served, against its unquantized `source` on held-out conversations and on prompts.

    Args:
        artifact: the packaged artifact; opened with every digest checked.
        source: the model it was built from; refused when its fingerprint is another one.
        data: files of held-out conversations. prompts: files of prompts that both models answer; none: no answers are
            judged. calibration: files that must share no message with either.
        policy: a policy, the name of a packaged one, or the path of a YAML file relative to `base`.
        review_waiver: why people need not look; without one, an artifact that passes is pending-review.
        evidence: where `gate/verdict.json`, `gate/gate.json` and `gate/answers.jsonl` go; the artifact's own evidence
            folder by default. Whole models are mapped from nameless files there while they run.
        base: what a relative `source` and `policy` are relative to.
        max_samples, max_tokens: conversations and tokens judged on at most. max_prompts, max_new_tokens: prompts
            answered, and tokens of an answer, at most. metrics: folders of `evaluate` modules, run on both models'
            answers; they are code and decide nothing.
        threads, backend: of the executor.

    Raises CheckpointError (artifact, source), RecipeError (data, policy, overlap),
    NumericsError (a model that gives NaN).
    """
    began = time.monotonic()
    opened = open_artifact(artifact)
    rules = policy if isinstance(policy, Policy) else load_policy(policy, base)
    model = open_source(source, base=base) if isinstance(source, str) else source
    _require_same_source(opened, model)
    conversations, asked = read_conversations(data), read_prompts(prompts)
    calibrated = each_conversation(calibration, strict=False)
    refuse_overlap([*conversations, *(prompt.conversation for prompt in asked)], calibrated)
    folder = evidence if evidence is not None else opened.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    text, source_text = ChatText(opened.folder), ChatText.of_source(model)
    evaluated = make_windows(
        conversations,
        text,
        max_samples=max_samples,
        max_tokens=max_tokens,
        max_window=min(MAX_WINDOW, opened.program.max_position),
        seed=SEED,
    )
    posed = questions(
        choose(asked, max_prompts, seed=SEED),
        source_text,
        text,
        max_new_tokens=max_new_tokens,
        max_length=opened.program.max_position,
    )
    models = Models(opened, model, threads or torch.get_num_threads(), backend, folder)
    told = Told(progress, token_cost(evaluated) + answer_cost(posed.baseline))
    results = measure(models, evaluated, text, told)
    answered = None
    if posed.baseline:
        answered = answer(posed, (models.baseline, source_text), (models.candidate, text), about=told.about)
    pairs = answered.pairs if answered else ()
    weights = audit_weights(opened, model)
    others = [*structural_rules(source_text, text), *audit_rules(weights, results.cache, text)]
    verdict = decide(rules, results.measured, review_waiver, pairs=pairs, others=others)
    details = {
        "verdict": verdict.as_dict(),
        "policy": rules.model_dump(mode="json"),
        "source": {
            "location": model.location,
            "fingerprint": model.fingerprint(),
            "parameters": results.measured.parameters,
        },
        "data": data_table(evaluated) | {"disjoint_from": [str(path) for path in calibration]},
        "variants": {name: variant_row(one) for name, one in results.compared.items()},
        "domains": domain_rows(results.measured, rules),
        "answers": None if answered is None else answers_table(answered, rules, metrics),
        "audit": audit_table(weights, results.cache),
        "worst": worst_items(evaluated.windows, results.compared["artifact"], text),
        "seconds": {
            **results.seconds,
            **(answered.seconds if answered else {}),
            "total": round(time.monotonic() - began, 2),
        },
    }
    digest = opened.payload_digest
    if answered is not None:
        write_answers(folder / ANSWERS, digest, answered.pairs)
    write_evidence(folder / DETAILS, digest, details)
    write_evidence(folder / VERDICT, digest, verdict.as_dict())
    return GateResult(verdict, {"payload_digest": digest, **details}, folder)


def _require_same_source(artifact: Artifact, source: ModelSource) -> None:
    if artifact.manifest.source.get("fingerprint") != source.fingerprint():
        raise CheckpointError(
            "is not the model this artifact was built from: its fingerprint differs",
            where=source.location,
            next=f"The artifact names {artifact.manifest.source.get('location')!r} as its source",
        )
