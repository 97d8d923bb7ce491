"""`quantkit gate`: judge an artifact as it is served, against the model it was built from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.terminal import printable

if TYPE_CHECKING:
    from quantkit.gate import GateResult


def gate(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder.")],
    source: Annotated[
        str | None, typer.Option(help="The unquantized model; default: the one it was built from.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Held-out conversations; default: the recipe's.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="Prompts both answer; default: the recipe's.")] = None,
    calibration: Annotated[list[str] | None, typer.Option(help="Files the held-out ones must not share.")] = None,
    policy: Annotated[str | None, typer.Option(help="`standard` or a YAML file; default: the recipe's.")] = None,
    waive_review: Annotated[str | None, typer.Option(help="Why people need not look at answers.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=256, help="Held-out tokens at most.")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=0, help="Prompts answered at most; 0: none.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, max=4096, help="Tokens of an answer at most.")] = None,
    metric: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of an `evaluate` module to run on the answers too; may be repeated."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the executor.")] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu or reference.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything measured as JSON.")] = False,
) -> int:
    """Judge an artifact; the new verdict replaces the one it has.

    Exit code: 0 pass, 10 fail, 11 inconclusive, 12 until people have met the review's plan.
    """
    from quantkit.artifact.read import open_artifact
    from quantkit.cli.progress import shown
    from quantkit.gate import run_gate
    from quantkit.gate.asked import asked_of
    from quantkit.gate.run import MAX_TOKENS
    from quantkit.gate.verdict import EXIT_CODES
    from quantkit.review.status import joined, review_status

    asked = asked_of(open_artifact(artifact, check="sizes"), data or [], calibration or [], policy, prompts or [])
    review_status(artifact)  # a review that cannot be read is refused before the long run
    with shown() as progress:
        progress.begin("Judge", 1, 1)
        result = run_gate(
            artifact,
            source or asked.source,
            asked.data,
            prompts=() if max_prompts == 0 else asked.prompts,
            calibration=asked.calibration,
            policy=asked.policy,
            review_waiver=waive_review or asked.waiver,
            base=Path.cwd() if source else asked.base,
            max_samples=asked.max_samples,
            max_tokens=max_tokens or MAX_TOKENS,
            max_prompts=max_prompts or asked.max_prompts,
            max_new_tokens=max_new_tokens or asked.max_new_tokens,
            metrics=metric or (),
            threads=threads,
            backend=backend,
            progress=progress,
        )
    review = review_status(artifact)
    word = joined(result.verdict.verdict, review.verdict)
    if as_json:
        final = {"final": word, "people": review.reason}
        typer.echo(json.dumps({**result.details, **final}, indent=1, ensure_ascii=False))
    else:
        _show(result, artifact, word, review.reason)
    return EXIT_CODES[word]


def _show(result: GateResult, artifact: Path, word: str, people: str) -> None:
    verdict = result.verdict
    cover = verdict.coverage
    typer.echo(printable(f"{word}  (policy {verdict.policy}, class {verdict.policy_class})"))
    for rule in verdict.rules:
        typer.echo(printable(f"  {rule.outcome:<12} {rule.text}"))
    for note in verdict.notes:
        typer.echo(printable(f"  note         {note}"))
    typer.echo(printable(f"{verdict.tally}."))
    isa = f":{cover.isa}" if cover.isa else ""
    typer.echo(printable(f"Covers {cover.backend}{isa}, {cover.compute} compute, {cover.kv_format} KV cache."))
    if verdict.waiver is not None:
        typer.echo(printable(f"Review waived: {verdict.waiver}"))
    typer.echo(
        printable(f"People: {people}" + (f". Next: quantkit review {artifact}" if word == "pending-review" else ""))
    )
    typer.echo(printable(f"Evidence in {result.evidence}. Next: quantkit report {artifact}"))
