"""`quantkit review`: people compare answers, blind; status, verify, sign, waive."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from quantkit.errors import RecipeError
from quantkit.terminal import printable

if TYPE_CHECKING:
    from quantkit.review.status import Status

_OPEN = "open"


class _Group(TyperGroup):
    """`quantkit review ARTIFACT` is `quantkit review open ARTIFACT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [_OPEN, *args]
        return super().parse_args(ctx, args)


review = typer.Typer(
    help="Let people compare answers, blind: quantkit review ARTIFACT.", cls=_Group, no_args_is_help=True
)

ArtifactPath = Annotated[Path, typer.Argument(help="The artifact's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@review.command(_OPEN)
def open_page(
    artifact: ArtifactPath,
    reviewer: Annotated[str, typer.Option(help="Who judges; the page asks when left out.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the link.")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Set what was judged aside and draw a new sample.")] = False,
) -> int:
    """Open the page on this machine, until it's signed there or Ctrl-C. Exit code as of `status`."""
    from quantkit.review.server import ReviewServer
    from quantkit.review.session import Session
    from quantkit.review.status import open_sample, review_status

    sample = open_sample(artifact, redraw=redraw)
    review_status(artifact)  # a damaged record is refused before anybody judges
    with ReviewServer(Session(artifact, sample, reviewer), port) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        typer.echo(server.url)
        typer.echo("Open this link on this machine. Ctrl-C stops; what was judged is kept.", err=True)
        if not no_browser:
            typer.launch(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            while not server.signed.wait(timeout=1):
                pass
            time.sleep(1)  # the page fetches its last state
        server.shutdown()
    found = review_status(artifact)
    typer.echo(printable(_text(found, artifact)))
    return found.exit_code


@review.command()
def status(artifact: ArtifactPath, as_json: AsJson = False) -> int:
    """Show where the review stands. Exit code: 0 passed, 10 rejected, 12 pending."""
    from quantkit.review.status import review_status

    found = review_status(artifact)
    typer.echo(
        json.dumps(found.as_dict(), indent=1, ensure_ascii=False) if as_json else printable(_text(found, artifact))
    )
    return found.exit_code


@review.command()
def verify(artifact: ArtifactPath, as_json: AsJson = False) -> None:
    """Check the record line by line (chain, head, payload, sign-off), and that the sample follows from its seed."""
    from quantkit.review.status import check_draw, review_status

    found = review_status(artifact)
    drawn = found.sample is not None and check_draw(artifact, found.sample)
    lines, head = (len(found.record.chain.lines), found.record.chain.head) if found.record else (0, "")
    result = {
        "payload_digest": found.payload_digest,
        "lines": lines,
        "head": head,
        "signed": found.signoff.decision if found.signoff else None,
        "drawn_by_seed": drawn,
    }
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    signed = f", signed by {found.signoff.reviewer}: {found.signoff.decision}" if found.signoff else ", not signed"
    how = "drawn by its seed" if drawn else "drawn from answers that are gone" if found.sample else "not drawn yet"
    typer.echo(printable(f"{artifact}: whole. {lines} lines{signed}; sample {how}\n{head}"))


@review.command()
def sign(
    artifact: ArtifactPath, reviewer: Annotated[str, typer.Option(help="Who signs.")], as_json: AsJson = False
) -> int:
    """Sign what the plan decided. Exit code: 0 accepted, 10 rejected, 12 not decided yet."""
    from quantkit.review.status import review_status
    from quantkit.review.status import sign as run

    signed = run(artifact, reviewer)
    found = review_status(artifact)
    typer.echo(
        json.dumps(dict(signed.content), indent=1, ensure_ascii=False) if as_json else printable(_text(found, artifact))
    )
    return found.exit_code


@review.command()
def waive(
    artifact: ArtifactPath,
    reason: Annotated[str, typer.Option(help="Why people need not look.")],
    until: Annotated[str, typer.Option(help="Last day it holds, YYYY-MM-DD.")],
) -> None:
    """Let the figures alone decide, until a day."""
    from quantkit.review.status import waive as run

    try:
        day = date.fromisoformat(until)
    except ValueError:
        raise RecipeError(f"{until!r} is no day", next="--until YYYY-MM-DD") from None
    waiver = run(artifact, reason, day)
    typer.echo(printable(f"Review waived until {waiver.until}: {waiver.reason}"))


def _text(found: Status, artifact: Path) -> str:
    """The status for a terminal."""
    lines = [f"{found.verdict}  {found.reason}"]
    if found.sample is None or found.tally is None:
        lines.append(f"Nothing was drawn yet. Next: quantkit review {artifact}")
        return "\n".join(lines)
    tally, plan = found.tally, found.sample.plan
    lines += [
        f"  plan         {plan}",
        f"  odds         accepts {plan.acceptance(0.01):.0%} at 1 % defects, {plan.acceptance(0.05):.0%} at 5 %",
        f"  random       {tally.rated} of {tally.needed} judged ({tally.identical} identical, not shown), "
        f"{tally.defects} defects: {tally.rate:.1%} ({tally.low:.1%} to {tally.high:.1%})",
        f"  others       {tally.others} of {tally.others_needed} worst and critical: {tally.others_defects} defects",
        "  outcomes     " + ", ".join(f"{count} {name}" for name, count in tally.outcomes.items()),
    ]
    for one in tally.reviewers:
        lines.append(
            f"  reviewer     {one.name}: {one.judged} pairs, {one.median_seconds:g} s each; "
            f"fell for {one.catches_failed} of {one.catches} checks; {one.repeats_alike} of {one.repeats} repeats alike"
        )
    if tally.alpha is not None:
        lines.append(f"  agreement    Krippendorff's alpha {tally.alpha:.2f}")
    lines += [f"  note         {note}" for note in tally.notes]
    if found.set_aside:
        lines.append(f"  note         earlier reviews of this payload set aside (--redraw): {found.set_aside}")
    if found.verdict == "pending-review":
        what = f"sign {artifact} --reviewer NAME" if tally.decision == "accept" else str(artifact)
        lines.append(f"Next: quantkit review {what}")
    return "\n".join(lines)
