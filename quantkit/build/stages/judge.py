"""gate: the packaged artifact against its source, both through the runtime; evidence beside the payload."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from quantkit.build.context import Context, Outline
from quantkit.build.estimate import Cost, Sizes, kv_bytes_per_token
from quantkit.build.progress import Progress
from quantkit.build.stage import EVIDENCE, PAYLOAD, Facts, Inputs, Stage
from quantkit.gate.policy import load_policy
from quantkit.gate.run import MAX_TOKENS, run_gate

_RUNS = 4
"""Baseline, artifact and the rungs they are compared with."""


def _inputs(context: Context) -> Inputs:
    section = context.loaded.recipe.gate
    return {
        "policy": load_policy(section.policy, context.loaded.base).model_dump(mode="json"),
        "data": context.data_digests("gate"),
        "calibration": context.data_digests("calibration"),
        "prompts": context.data_digests("gate", "prompts"),
        "max_samples": section.max_samples,
        "max_prompts": section.max_prompts,
        "max_new_tokens": section.max_new_tokens,
        "waiver": section.review.waive,
    }


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    section = context.loaded.recipe.gate
    for left in folder.iterdir():  # the evidence of one judgement, never of two
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    result = run_gate(
        needs["package"] / PAYLOAD,
        context.source,
        context.data_files("gate"),
        prompts=context.data_files("gate", "prompts"),
        calibration=context.data_files("calibration"),
        policy=load_policy(section.policy, context.loaded.base),
        review_waiver=section.review.waive,
        evidence=folder / EVIDENCE,
        max_samples=section.max_samples,
        max_prompts=section.max_prompts,
        max_new_tokens=section.max_new_tokens,
        threads=context.threads,
        progress=progress,
    )
    return {
        "verdict": result.verdict.verdict,
        "exit_code": result.exit_code,
        "rules": [rule.text for rule in result.verdict.deciding],
        "notes": list(result.verdict.notes),
    }


def _cost(outline: Outline) -> Cost:
    sizes, section = Sizes.of(outline.program), outline.loaded.recipe.gate
    whole = (sizes.units + sizes.head) * sizes.item + sizes.table * sizes.item
    return Cost(
        memory_bytes=whole
        + 4 * 128 * outline.program.vocab_size * 4
        + kv_bytes_per_token(outline.program, "FP32") * 2560,
        multiply_adds=_RUNS * min(MAX_TOKENS, section.max_samples * 512) * (sizes.units + sizes.head),
    )


STAGE = Stage("gate", "Judge", __name__, ("package",), _inputs, _run, _cost)
