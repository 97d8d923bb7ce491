"""`quantkit inspect`: what an artifact is."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.errors import RecipeError
from quantkit.terminal import printable

if TYPE_CHECKING:
    from quantkit.artifact.read import Artifact


def inspect(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder.")],
    program: Annotated[bool, typer.Option("--program", help="Print its program.")] = False,
    passes: Annotated[bool, typer.Option("--passes", help="Print the op count before and after each pass.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what an artifact is: origin, schemes, sizes, verdict, sampling defaults, stop set; or its program."""
    from quantkit.artifact.read import open_artifact

    if program and passes:
        raise RecipeError("--program and --passes ask for different things", next="Leave one of them out")
    opened = open_artifact(artifact, check="sizes")
    if passes:
        from quantkit.cli.passes import pass_counts, passes_text

        counts = pass_counts(opened)
        typer.echo(json.dumps([asdict(c) for c in counts], indent=2) if as_json else printable(passes_text(counts)))
        return
    if program:
        from quantkit.program import format_program, program_to_json

        typer.echo(program_to_json(opened.program) if as_json else printable(format_program(opened.program)))
        return
    facts = _facts(opened)
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else printable(_text(facts)))


def _facts(opened: Artifact) -> dict[str, Any]:
    from quantkit.review.status import joined, review_status
    from quantkit.runtime.admission import VERDICT, read_standing
    from quantkit.runtime.text import ChatText

    manifest, text = opened.manifest, ChatText(opened.folder)
    runtime = manifest.recipe.get("runtime")
    standing = read_standing(opened.folder, opened.payload_digest)
    judged = None if standing.verdict == "none" else json.loads((opened.folder / VERDICT).read_text(encoding="utf-8"))
    if judged is not None:
        review = review_status(opened.folder)
        final = joined(judged["verdict"], review.verdict)
        judged |= {"gate": judged["verdict"], "verdict": final, "review": review.reason}
    return {
        "artifact": str(opened.folder),
        "payload_digest": opened.payload_digest,
        "quantkit_version": manifest.quantkit_version,
        "source": dict(manifest.source),
        "layers": opened.program.num_layers,
        "weight_bytes": opened.weight_bytes,
        "source_weight_bytes": opened.source_weight_bytes,
        "schemes": dict(manifest.schemes),
        "kv_format": manifest.kv_format,
        "other_engines": _other_engines(opened),
        "runtime": runtime if isinstance(runtime, dict) else {},
        "sampling_defaults": asdict(text.default_sampling()),
        "stop_tokens": {str(token): text.token_text(token) for token in sorted(text.stop_token_ids)},
        "chat_template": text.has_template,
        "calibration": dict(manifest.calibration),
        "checks": dict(manifest.checks),
        "verdict": judged,
    }


def _other_engines(opened: Artifact) -> str:
    """What Transformers or vLLM make of the same folder."""
    note = "a compressed-tensors checkpoint"
    if any(weight.kind == "scales" for weight in opened.program.weights.values()):
        note += "; they run it with an unquantized KV cache"
        note += f" ({opened.manifest.kv_format} scales are kept under quantkit/ for this runtime)"
    return note


def _text(facts: dict[str, Any]) -> str:
    before, after = facts["source_weight_bytes"], facts["weight_bytes"]
    head = facts["schemes"].get("lm_head")
    counts = Counter(scheme for group, scheme in facts["schemes"].items() if group != "lm_head")
    runtime, verdict = facts["runtime"], facts["verdict"]
    sampling = {key: value for key, value in facts["sampling_defaults"].items() if value not in (None, [], (), {})}
    stops = ", ".join(f"{text!r} ({token})" for token, text in facts["stop_tokens"].items())
    rows = [
        ("artifact", facts["artifact"]),
        ("payload", facts["payload_digest"]),
        ("source", "{} ({}, {})".format(*(facts["source"].get(key, "?") for key in ("location", "family", "dtype")))),
        ("weights", f"{before / 1e6:,.1f} MB in 16 bits, {after / 1e6:,.1f} MB here ({after / before:.1%})"),
        ("schemes", ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())) + f"; lm_head {head}"),
        ("KV cache", facts["kv_format"]),
        ("other engines", f"open it as {facts['other_engines']}"),
        ("limits", ", ".join(f"{key} {value}" for key, value in runtime.items())),
        ("sampling", ", ".join(f"{key} {value}" for key, value in sampling.items()) or "greedy"),
        ("stops at", stops or "nothing but the length limit"),
        ("chat", "chat template included" if facts["chat_template"] else "no chat template: plain prompts only"),
        ("verdict", "ungated: no verdict about this payload" if verdict is None else _verdict(verdict)),
    ]
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _verdict(verdict: dict[str, Any]) -> str:
    covers = ", ".join(f"{key} {value}" for key, value in verdict.get("coverage", {}).items())
    return f"{verdict['verdict']} by policy {verdict.get('policy', '?')}, on {covers}; people: {verdict['review']}"
