"""calibrate: what flows through the unquantized model on conversations like production's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from quantkit.build.context import Context, Outline
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.import_source import TOKENIZER
from quantkit.calibration.dataset import load_samples
from quantkit.calibration.samples import write_samples
from quantkit.calibration.shown import coverage_lines, sample_lines
from quantkit.calibration.statistics import Statistics, collect
from quantkit.calibration.vocabulary import require_known
from quantkit.runtime.text import ChatText

_FILE = "statistics.safetensors"
_WORK = "work"


def statistics(folder: Path) -> Statistics:
    """What was measured, from the stage's folder."""
    return Statistics.load(folder / _FILE)


def _max_tokens(outline: Outline) -> int:
    return min(outline.loaded.recipe.calibration.max_tokens, outline.program.max_position)


def _inputs(context: Context) -> Inputs:
    section = context.loaded.recipe.calibration
    return {
        "data": context.data_digests("calibration"),
        "profile": context.profile_digest(),
        "scrub_pii": section.pii.scrub,
        "max_samples": section.max_samples,
        "max_tokens": _max_tokens(context),
        "seed": section.seed,
    }


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    section = context.loaded.recipe.calibration
    text = ChatText(needs["import"] / TOKENIZER)
    samples = load_samples(
        context.data_files("calibration"),
        text,
        max_samples=section.max_samples,
        max_tokens=section.max_tokens,
        seed=section.seed,
        profile=context.profile(),
        scrub_pii=section.pii.scrub,
        max_position=context.program.max_position,
    )
    for line in (*coverage_lines(samples.coverage), *sample_lines(samples, text)):
        progress.note(line)
    require_known((s.ids for s in samples.samples), context.program.vocab_size, context.source.location)
    write_samples(samples, folder)
    work = folder / _WORK
    work.mkdir(exist_ok=True)  # what a killed run left there is gone on from
    measured = collect(context.source, context.program, samples, progress.step, work=work)
    measured.save(folder / _FILE)
    shutil.rmtree(work)
    return {
        "samples": len(samples.samples),
        "tokens": samples.tokens,
        "fingerprint": samples.fingerprint,
        "coverage": dict(samples.coverage),
    }


def _cost(outline: Outline) -> Cost:
    sizes, section = Sizes.of(outline.program), outline.loaded.recipe.calibration
    tokens = section.max_samples * _max_tokens(outline)
    return Cost(
        disk_bytes=tokens * sizes.hidden * 4 * 3,
        memory_bytes=sizes.layer * (4 + sizes.item) + 2048 * sizes.hidden * 64,
        multiply_adds=tokens * sizes.units,
    )


STAGE = Stage("calibrate", "Measure activations", __name__, ("import",), _inputs, _run, _cost)
