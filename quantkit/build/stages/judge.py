"""gate: the packaged artifact against its source, both through the runtime; evidence beside the payload."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from quantkit.build.context import Context, Outline
from quantkit.build.estimate import Cost, Sizes, kv_bytes_per_token
from quantkit.build.progress import Progress
from quantkit.build.stage import EVIDENCE, PAYLOAD, Facts, Inputs, Stage
from quantkit.gate.generate import SEQUENCES
from quantkit.gate.policy import load_policy
from quantkit.gate.run import MAX_TOKENS, MAX_WINDOW, run_gate

_RUNS = 4
"""Baseline, artifact and the rungs they are compared with."""
_ANSWER_RUNS = 3
"""Both models' answers, and the artifact along the baseline's."""
_PROMPT_TOKENS = 128
"""Of one prompt, about; of answers half the limit is used."""


def _inputs(context: Context) -> Inputs:
    section = context.loaded.recipe.gate
    return {
        "policy": load_policy(context.policy_name(), context.loaded.base).model_dump(mode="json"),
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
        policy=load_policy(context.policy_name(), context.loaded.base),
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
        "rules": [*(rule.text for rule in result.verdict.deciding), result.verdict.tally],
        "notes": list(result.verdict.notes),
    }


def _cost(outline: Outline) -> Cost:
    """Whole models and their caches are mapped from disk; the baseline's boundary between two layers is held."""
    program, section = outline.program, outline.loaded.recipe.gate
    sizes = Sizes.of(program)
    held_out = min(MAX_TOKENS, section.max_samples * MAX_WINDOW)
    answers = section.max_prompts * (_PROMPT_TOKENS + section.max_new_tokens // 2) if section.prompts else 0
    whole = (sizes.units + sizes.head + sizes.table) * sizes.item
    return Cost(
        disk_bytes=whole + kv_bytes_per_token(program, "FP32") * SEQUENCES * (_PROMPT_TOKENS + section.max_new_tokens),
        memory_bytes=(sizes.head + sizes.table + 2 * sizes.layer) * sizes.item
        + 4 * 128 * program.vocab_size * 4
        + 4 * held_out * sizes.hidden * 4,
        multiply_adds=(_RUNS * held_out + _ANSWER_RUNS * answers) * (sizes.units + sizes.head),
    )


STAGE = Stage("gate", "Judge", __name__, ("package",), _inputs, _run, _cost)
