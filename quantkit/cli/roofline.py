"""The roofline's times, to be read in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.build.prediction import BucketTime, Prediction

_COLUMNS = 7
_MARKS = {"bytes": " ", "operations": "*", "launch": "."}
_TITLES = {"decode": "decode at {} positions, sequences", "prefill": "prefill, tokens of prompts"}


def roofline_text(made: Prediction) -> str:
    """A table a phase: microseconds of every op, the whole step, the same in FP16, and the gain."""
    lines = [f"  {made.card.line()}"]
    lines += [f"  {line}" for line in _assumptions(made)]
    for phase, title in _TITLES.items():
        buckets = [bucket for bucket in made.buckets if bucket.phase == phase]
        for start in range(0, len(buckets), _COLUMNS):
            lines += ["", *_table(title.format(f"{made.context:,}"), buckets[start : start + _COLUMNS])]
    return "\n".join(lines)


def _assumptions(made: Prediction) -> list[str]:
    lines = [
        "Predicted at these published peaks, in us: an op's bytes or its products in FP16 (*), whichever takes longer,",
        f"and {made.launch_seconds * 1e6:g} us assumed to launch it (. where that is most). Measured times are longer.",
    ]
    if made.open_bits is not None:
        lines.append(
            f"{made.open_groups} groups have no scheme yet: each counts {made.open_bits:.2f} bits a weight, "
            "their share of the budget."
        )
    return [*lines, made.note] if made.note else lines


def _table(title: str, buckets: list[BucketTime]) -> list[str]:
    width = max(len(title), *(len(op.op) for bucket in buckets for op in bucket.recipe.ops)) + 2
    lines = [f"  {title:<{width}}" + "".join(f"{bucket.size:>10,} " for bucket in buckets)]
    for row in zip(*(bucket.recipe.ops for bucket in buckets), strict=True):
        cells = "".join(f"{op.seconds * 1e6:>10,.1f}{_MARKS[op.bound]}" for op in row)
        lines.append(f"  {row[0].op:<{width}}{cells}")
    rows = {
        "together": [f"{bucket.recipe.seconds * 1e6:,.1f}" for bucket in buckets],
        "the same in FP16": [f"{bucket.fp16.seconds * 1e6:,.1f}" for bucket in buckets],
        "gain": [f"{bucket.fp16.seconds / bucket.recipe.seconds:.2f} x" for bucket in buckets],
        "tokens/s": [f"{bucket.size / bucket.recipe.seconds:,.0f}" for bucket in buckets],
    }
    lines += [f"  {name:<{width}}" + "".join(f"{cell:>10} " for cell in cells) for name, cells in rows.items()]
    return [line.rstrip() for line in lines]
