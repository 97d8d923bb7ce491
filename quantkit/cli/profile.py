"""`quantkit profile`: what production traffic looks like, counted from request logs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.errors import RecipeError, RequestError
from quantkit.terminal import printable

if TYPE_CHECKING:
    from quantkit.profile.logs import Tally
    from quantkit.profile.model import Histogram, Profile
    from quantkit.runtime.text import ChatText

_HEADROOM = 1.2
"""Share of P99 that a served length should allow for: the tail that was not seen."""


def profile(
    logs: Annotated[list[Path], typer.Argument(help="Request logs, one JSON object a line.", metavar="LOGS...")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The profile to write, *.yaml or *.json.")] = Path(
        "profile.yaml"
    ),
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model to count with where a log tells no lengths: folder, *.gguf, package:... or hub id."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile and what was counted as JSON.")] = False,
) -> None:
    """Make a traffic profile from request logs: shares of category and language, lengths, requests at once.

    No text of the logs is kept. Lines that are cut off or no requests are counted and left out.
    """
    from quantkit.profile.file import profile_data, write_profile
    from quantkit.profile.logs import profile_of_logs

    if out.exists() and not force:
        raise RecipeError("there already is such a file", where=str(out), next="Choose another -o, or --force")
    if tokenizer is None:
        made, tally = profile_of_logs(logs)
    else:
        with tempfile.TemporaryDirectory(prefix="quantkit-tokenizer-") as scratch:
            text = _open(tokenizer, Path(scratch))
            made, tally = profile_of_logs(
                logs,
                tokenizer=tokenizer,
                count_prompt=lambda prompt: _prompt_tokens(prompt, text),
                count_text=lambda answer: _text_tokens(answer, text),
            )
    write_profile(made, out)
    if as_json:
        typer.echo(json.dumps({"profile": profile_data(made), "lines": vars(tally)}, indent=1, ensure_ascii=False))
    else:
        typer.echo(printable(_text(made, tally, out)))
    _warn(tally, tokenizer)


def _open(tokenizer: str, scratch: Path) -> ChatText:
    from quantkit.runtime.text import ChatText

    if (Path(tokenizer) / "tokenizer.json").is_file():
        return ChatText(Path(tokenizer))
    from quantkit.models import open_source

    return ChatText.of_source(open_source(tokenizer), scratch)


def _prompt_tokens(prompt: Sequence[Mapping[str, Any]] | str, text: ChatText) -> int:
    if isinstance(prompt, str):
        return _text_tokens(prompt, text)
    try:
        return len(text.encode_chat([dict(message) for message in prompt]))
    except RequestError:  # no template, or one that refuses this conversation: what was said still has a length
        contents = [content for message in prompt if isinstance(content := message.get("content"), str)]
        return _text_tokens("\n".join(contents), text)


def _text_tokens(answer: str, text: ChatText) -> int:
    try:
        return len(text.encode(answer))
    except RequestError:  # half of a surrogate pair
        return len(text.encode(answer.encode("utf-8", "replace").decode()))


def _text(made: Profile, tally: Tally, out: Path) -> str:
    width = max(len("category"), *(len(cell.category) for cell in made.cells))
    lines = [f"{'category':<{width}}  language   share  prompt P50/P95/P99  answer P50/P95/P99"]
    for cell in made.cells:
        lines.append(
            f"{printable(cell.category):<{width}}  {printable(cell.language):<8}  {cell.share:>6.1%}"
            f"  {_lengths(cell.prompt_tokens):>18}  {_lengths(cell.output_tokens):>18}"
        )
    if made.concurrency is not None:
        lines.append(f"requests at once: {made.concurrency.mean:g} on average, {made.concurrency.peak} at most")
    prompt, output = made.prompt_tokens, made.output_tokens
    if prompt is not None and output is not None:
        enough = int((prompt.percentile(0.99) + output.percentile(0.99)) * _HEADROOM)
        lines.append(
            f"runtime.max_model_len: {-(-enough // 128) * 128} would hold P99 of prompt and answer and 20 % more"
        )
    lines.append(f"Wrote {out} from {tally.requests:,} requests in {tally.lines:,} lines")
    lines.append(f"Next: set calibration.profile to {out} in the recipe")
    return "\n".join(lines)


def _warn(tally: Tally, tokenizer: str | None) -> None:
    told = []
    if tally.bad:
        told.append(f"{tally.bad:,} lines are no whole JSON objects (the first: {tally.first_bad}) and were left out")
    if tally.failed:
        told.append(f"{tally.failed:,} requests ended in an error and were left out")
    if tally.other:
        told.append(f"{tally.other:,} objects are no requests")
    if tally.unmeasured:
        hint = "" if tokenizer else "; --tokenizer MODEL would count them"
        told.append(f"{tally.unmeasured:,} requests tell no prompt length{hint}")
    for line in told:
        print(f"quantkit: {line}", file=sys.stderr)


def _lengths(histogram: Histogram | None) -> str:
    if histogram is None:
        return "-"
    return "/".join(str(histogram.percentile(share)) for share in (0.5, 0.95, 0.99))
