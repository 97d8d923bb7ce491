"""`quantkit plan`: what a build would do, before any weight is read."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.paths import OutPath, RecipePath, Sets, artifact_folder
from quantkit.cli.roofline import roofline_text
from quantkit.errors import RecipeError
from quantkit.numeric import rounded_up
from quantkit.terminal import printable

if TYPE_CHECKING:
    from quantkit.build.plan import Plan


def plan(
    recipe: RecipePath,
    out: OutPath = None,
    set_: Sets = None,
    target: Annotated[
        str | None, typer.Option("--target", help="A GPU, as in cuda:sm_90: predict how long every step takes there.")
    ] = None,
    card: Annotated[
        str | None, typer.Option("--card", help="The target's card, as in H200.", show_default="one a target")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="Positions of a sequence that decodes.", show_default="half of max_model_len"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show stages, costs, schemes and every static problem of a recipe, reading no weights."""
    from quantkit.build.plan import plan as make
    from quantkit.compile.cards import card_for
    from quantkit.recipe.load import load_recipe

    for name, given in (("--card", card), ("--context", context)):
        if given is not None and target is None:
            raise RecipeError("says nothing without a target", where=name, next="Add one, as in --target cuda:sm_90")
    on = card_for(target, card) if target is not None else None
    loaded = load_recipe(recipe, set_ or ())
    made = make(loaded, artifact_folder(out, loaded.name), on, context)
    if as_json:
        typer.echo(json.dumps({**asdict(made), "out": str(made.out)}, indent=2, ensure_ascii=False))
    else:
        typer.echo(printable(plan_text(made)))


def plan_text(made: Plan) -> str:
    """The plan to be read in a terminal."""
    missing = "" if made.has_weights else " (config.json only: `build` needs the weights too)"
    lines = [
        f"{made.name}: {made.source}{missing}",
        f"  {made.family}, {made.parameters / 1e6:,.1f} M weights, into {made.out}",
        f"  weights  {_mb(made.source_bytes)} now, about {_mb(made.payload_bytes)} after "
        f"({made.payload_bytes / made.source_bytes:.0%})",
        f"  KV cache {made.kv_format}, {made.kv_bytes_per_token:,} bytes a token; {made.max_num_seqs} sequences of "
        f"{made.max_model_len} tokens: {_mb(made.kv_bytes)}",
        *(f"  {note}" for note in made.notes),
        "",
        f"  {'stage':<22}{'':<8}{'time':>9}{'memory':>12}{'disk':>12}",
    ]
    for stage in made.stages:
        state = "cached" if stage.cached else "to run"
        lines.append(f"  {stage.title:<22}{state:<8}" + _costs(stage.seconds, stage.memory_bytes, stage.disk_bytes))
    lines += [
        f"  {'to do, about':<30}{_costs(made.seconds, made.memory_bytes, made.disk_bytes)}"
        f"   ({_mb(made.available_memory_bytes)} of memory available)",
        "",
        f"  budget {made.budget_bits:g} bits a weight over the decoder layers' matrices, "
        f"least feasible {rounded_up(made.least_bits, 3):.3f}; lm_head {made.head}",
        *_schemes(made),
        "",
        *(f"  {line}" for line in _calibration(made)),
    ]
    if made.roofline is not None:
        lines += ["", roofline_text(made.roofline)]
    return "\n".join(lines)


def _calibration(made: Plan) -> list[str]:
    """The coverage table where samples are chosen; else what the data's rows can give, languages side by side."""
    from quantkit.calibration.shown import coverage_lines

    if made.coverage is not None:
        return coverage_lines(made.coverage)
    cells = {(cell.category, cell.language): cell for cell in made.calibration}
    languages = sorted({cell.language for cell in made.calibration})
    width = max(len("samples of rows"), *(len(cell.category) for cell in made.calibration))
    total, by = sum(cell.samples for cell in made.calibration), "calibration: {} conversations by category and language"
    by += ", as the profile has them" if any(cell.wanted_share is not None for cell in made.calibration) else ""
    lines = [by.format(total), f"{'samples of rows':<{width}}" + "".join(f"{name:>14}" for name in languages)]
    for category in sorted({cell.category for cell in made.calibration}):
        row = [cells.get((category, language)) for language in languages]
        texts = ["-" if cell is None else f"{cell.samples} of {cell.rows}" for cell in row]
        lines.append(f"{category:<{width}}" + "".join(f"{text:>14}" for text in texts))
    empty = [f"{cell.category} {cell.language} ({cell.wanted_share:.1%})" for cell in made.calibration if not cell.rows]
    if empty:
        lines.append(f"no conversations of {', '.join(empty)}, which the profile has: other cells take their place")
    return lines


def _schemes(made: Plan) -> list[str]:
    """Groups by layer where settled; else kinds with what they may take."""
    kinds = list(dict.fromkeys(group.rpartition(".")[2] for group in made.schemes))
    if made.settled:
        rows: dict[str, dict[str, str]] = defaultdict(dict)
        for group, (scheme,) in made.schemes.items():
            _, layer, kind = group.split(".")
            rows[layer][kind] = scheme
        widths = {kind: max(len(kind), *(len(row[kind]) for row in rows.values())) + 2 for kind in kinds}
        head = "  layer  " + "".join(kind.ljust(widths[kind]) for kind in kinds)
        body = [f"  {n:<7}" + "".join(row[kind].ljust(widths[kind]) for kind in kinds) for n, row in rows.items()]
        return [head.rstrip(), *(line.rstrip() for line in body)]
    counted: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for group, schemes in made.schemes.items():
        counted[group.rpartition(".")[2], schemes] += 1
    return [f"  {kind:<9}{count:>4} groups  {' | '.join(schemes)}" for (kind, schemes), count in counted.items()]


def _costs(seconds: float, memory_bytes: int, disk_bytes: int) -> str:
    return f"{_time(seconds):>9}{_mb(memory_bytes):>12}{_mb(disk_bytes):>12}"


def _mb(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
