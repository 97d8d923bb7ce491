"""`quantkit build`: a recipe to a verified, judged artifact."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quantkit.cli.paths import OutPath, RecipePath, Sets, artifact_folder
from quantkit.terminal import printable


def build(
    recipe: RecipePath,
    out: OutPath = None,
    set_: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Build the artifact a recipe describes, going on from the stages that are whole.

    Exits 0 when the gate passes, 10 when it fails, 11 when it cannot tell, 12 when people still have to look.
    """
    from quantkit.build.run import build as run
    from quantkit.cli.progress import shown
    from quantkit.recipe.load import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    with shown() as progress:
        built = run(loaded, artifact_folder(out, loaded.name), progress)
    result: dict[str, Any] = {
        "artifact": str(built.folder),
        "payload_digest": built.payload_digest,
        "verdict": built.verdict,
        "rules": built.rules,
        "report": str(built.report),
        "source_bytes": built.source_bytes,
        "weight_bytes": built.weight_bytes,
        "seconds": built.run["seconds"],
        "peak_anon_bytes": built.run["peak_anon_bytes"],
    }
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        typer.echo(printable(_text(result)))
    return built.exit_code


def _text(result: dict[str, Any]) -> str:
    before, after = result["source_bytes"], result["weight_bytes"]
    lines = [
        f"artifact   {result['artifact']}",
        f"payload    {result['payload_digest']}",
        f"weights    {before / 1e6:,.1f} MB in 16 bits, {after / 1e6:,.1f} MB now ({after / before:.1%})",
        f"built in   {result['seconds']:,.0f} s, peak anonymous memory {result['peak_anon_bytes'] / 2**30:.2f} GiB",
        f"verdict    {result['verdict']}",
        *(f"           {rule}" for rule in result["rules"]),
    ]
    if result["verdict"] == "pending-review":
        lines.append(f"           the figures pass; people look next: quantkit review {result['artifact']}")
    lines.append(f"report     {result['report']}")
    return "\n".join(lines)
