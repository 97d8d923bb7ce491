"""How fast a card can serve a recipe's model, and the same model in FP16, before either exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.build.context import Outline
from quantkit.build.decisions import HEAD, group_bits
from quantkit.compile.buckets import Phase, plan_buckets
from quantkit.compile.cards import Card
from quantkit.compile.roofline import LAUNCH_SECONDS, Step, StepTime, layout_bits, step_time
from quantkit.compile.targets import cache_without_kernels
from quantkit.errors import RecipeError
from quantkit.formats.schemes import SCHEMES
from quantkit.program import lower_precision


@dataclass(frozen=True)
class BucketTime:
    """A bucket's step at best: `size` sequences of decode, or `size` tokens of prompts; as the recipe has it, and with
    weights and cache in FP16."""

    phase: Phase
    size: int
    recipe: StepTime
    fp16: StepTime


@dataclass(frozen=True)
class Prediction:
    """Every bucket's time on a card.

    context: positions of each sequence of a decode step. open_groups: how many groups have no scheme yet; each weight
    of theirs counts `open_bits`, what the budget leaves them (None where all are settled). note: what no kernel serves.
    """

    card: Card
    context: int
    launch_seconds: float
    open_groups: int
    open_bits: float | None
    buckets: tuple[BucketTime, ...]
    note: str


def predict(outline: Outline, schemes: Mapping[str, tuple[str, ...]], card: Card, context: int | None) -> Prediction:
    """The roofline's times of the recipe's buckets; `schemes[group]`: what a group may take, one where settled.

    context: half of the served length where None; RecipeError where it is longer than that length.
    """
    recipe, most = outline.loaded.recipe, outline.max_model_len
    if context is not None and context > most:
        where, following = "--context", "Raise runtime.max_model_len, or ask for fewer positions"
        raise RecipeError(f"{context} positions exceed the {most} of a sequence", where=where, next=following)
    held = context or max(1, most // 2)
    bits, left = _bits(outline, schemes)
    ours = lower_precision(outline.program, {}, recipe.kv_cache.format)
    plain = lower_precision(outline.program, {}, "FP16")
    plan = plan_buckets(recipe.runtime.max_num_seqs, recipe.runtime.max_num_batched_tokens, outline.profile())
    steps: list[tuple[Phase, int, Step]] = [("decode", size, Step.decode(size, held)) for size in plan.decode]
    steps += [("prefill", size, Step.prefill(size, most)) for size in plan.prefill]
    return Prediction(
        card=card,
        context=held,
        launch_seconds=LAUNCH_SECONDS,
        open_groups=sum(len(names) > 1 for names in schemes.values()),
        open_bits=left,
        buckets=tuple(
            BucketTime(phase, size, step_time(ours, step, card, bits), step_time(plain, step, card))
            for phase, size, step in steps
        ),
        note=cache_without_kernels(recipe.kv_cache.format, [card.target]),
    )


def _bits(outline: Outline, schemes: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, float], float | None]:
    """Bits a weight by group, and those of groups still open: an equal share of what settled ones leave of the budget,
    which is no more than the widest scheme that a group may take."""
    units, decisions = outline.program.groups(), outline.decisions
    settled = {group: names[0] for group, names in schemes.items() if len(names) == 1}
    bits = {
        group: layout_bits(SCHEMES[name], units[group].shape[1])
        for group, name in {**settled, HEAD: decisions.head}.items()
    }
    counts = {group: units[group].shape[0] * units[group].shape[1] for group in schemes}
    still = [group for group in schemes if group not in settled]
    if not still:
        return bits, None
    spent = sum(group_bits(units[group], SCHEMES[name], decisions.source_bits) for group, name in settled.items())
    left = (decisions.budget_bits * sum(counts.values()) - spent) / sum(counts[group] for group in still)
    for group in still:
        widest = max(layout_bits(SCHEMES[name], units[group].shape[1]) for name in schemes[group])
        bits[group] = min(left, widest)
    return bits, sum(bits[group] * counts[group] for group in still) / sum(counts[group] for group in still)
