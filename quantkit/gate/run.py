"""`run_gate`: an artifact and its source in, evidence and a verdict out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact.read import Artifact, open_artifact
from quantkit.errors import CheckpointError
from quantkit.gate.data import make_windows, read_conversations, refuse_overlap
from quantkit.gate.evidence import FOLDER, write_evidence
from quantkit.gate.measure import Progress, measure
from quantkit.gate.policy import Policy, load_policy
from quantkit.gate.results import data_table, domain_rows, variant_row, worst_items
from quantkit.gate.verdict import Verdict, decide
from quantkit.models import ModelSource, open_source
from quantkit.runtime.text import ChatText

MAX_TOKENS = 8192
"""Held-out tokens judged on: standard errors of a few percent, about a minute for a 135M model on two cores."""
MAX_WINDOW = 512
SEED = 0

VERDICT = Path("gate") / "verdict.json"
DETAILS = Path("gate") / "gate.json"


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
    calibration: Sequence[Path] = (),
    policy: Policy | str = "standard",
    review_waiver: str | None = None,
    evidence: Path | None = None,
    base: Path = Path("."),
    max_samples: int = 64,
    max_tokens: int = MAX_TOKENS,
    threads: int | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> GateResult:
    """Judge `artifact`, as served, against its unquantized `source` on held-out conversations.

    Args:
        artifact: the packaged artifact; opened with every digest checked.
        source: the model it was built from; refused when its fingerprint is another one.
        data: files of held-out conversations. calibration: files that must share no message with them.
        policy: a policy, the name of a packaged one, or the path of a YAML file relative to `base`.
        review_waiver: why people need not look; without one, an artifact that passes is pending-review.
        evidence: where `gate/verdict.json` and `gate/gate.json` go; the artifact's own evidence folder by default.
        base: what a relative `source` and `policy` are relative to.
        max_samples, max_tokens: conversations and tokens judged on at most.
        threads, backend: of the executor.

    Raises CheckpointError (artifact, source), RecipeError (data, policy, overlap),
    NumericsError (a model that gives NaN).
    """
    began = time.monotonic()
    opened = open_artifact(artifact)
    rules = policy if isinstance(policy, Policy) else load_policy(policy, base)
    model = open_source(source, base=base) if isinstance(source, str) else source
    _require_same_source(opened, model)
    conversations = read_conversations(data)
    refuse_overlap(conversations, read_conversations(calibration, strict=False))
    text = ChatText(opened.folder)
    evaluated = make_windows(
        conversations,
        text,
        max_samples=max_samples,
        max_tokens=max_tokens,
        max_window=min(MAX_WINDOW, opened.program.max_position),
        seed=SEED,
    )
    results = measure(opened, model, evaluated, threads=threads, backend=backend, progress=progress)
    verdict = decide(rules, results.measured, review_waiver)
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
        "worst": worst_items(evaluated.windows, results.compared["artifact"], text),
        "seconds": {**results.seconds, "total": round(time.monotonic() - began, 2)},
    }
    folder_of = evidence if evidence is not None else opened.folder / FOLDER
    write_evidence(folder_of / DETAILS, opened.payload_digest, details)
    write_evidence(folder_of / VERDICT, opened.payload_digest, verdict.as_dict())
    return GateResult(verdict, {"payload_digest": opened.payload_digest, **details}, folder_of)


def _require_same_source(artifact: Artifact, source: ModelSource) -> None:
    if artifact.manifest.source.get("fingerprint") != source.fingerprint():
        raise CheckpointError(
            "is not the model this artifact was built from: its fingerprint differs",
            where=source.location,
            next=f"The artifact names {artifact.manifest.source.get('location')!r} as its source",
        )
