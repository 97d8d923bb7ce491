"""`quantkit chat`: talk to an artifact in the terminal, in this process."""

from __future__ import annotations

import io
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.terminal import printable

if TYPE_CHECKING:
    from quantkit.runtime.api import Engine
    from quantkit.runtime.sampling import SamplingParams

HELP = "/reset forgets the conversation, /system TEXT sets what comes first in it, /exit leaves."


def chat(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder, or an unquantized source.")],
    prompt: Annotated[str | None, typer.Option(help="Answer this and stop; '-' reads it from stdin.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most; default: what fits.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the engine.")] = None,
    accept_ungated: Annotated[bool, typer.Option("--accept-ungated", help="Run without a covering verdict.")] = False,
) -> None:
    """Talk to an artifact in the terminal."""
    from quantkit.artifact.layout import MANIFEST
    from quantkit.runtime.api import Engine

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?", not a traceback
    options: dict[str, Any] = {"max_num_seqs": 1, "threads": threads, "accept_ungated": accept_ungated}
    is_artifact = (artifact / MANIFEST).is_file()
    engine = Engine(artifact, **options) if is_artifact else Engine.from_source(str(artifact), **options)
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    params = engine.text.default_sampling(**{name: value for name, value in given.items() if value is not None})
    with closing(engine):
        if prompt is not None:
            if judged := _judged(engine):
                typer.echo(f"verdict {judged}", err=True)
            _answer(engine, [*_opening(system), _said("user", _read(prompt))], params)
        else:
            _converse(engine, system, params)


def _judged(engine: Engine) -> str:
    """The verdict that a user should know of, else nothing."""
    verdict = engine.loaded.standing.verdict
    return "" if verdict in ("pass", "none") else verdict


def _converse(engine: Engine, system: str, params: SamplingParams) -> None:
    from quantkit.errors import RequestError

    judged = _judged(engine)
    typer.echo(f"{engine.loaded.executor.backend_name}{judged and f', {judged}'}. {HELP}", err=True)
    messages = _opening(system)
    while (line := _next_line()) is not None:
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command == "/reset":
            messages = _opening(system)
        elif command == "/system":
            system = rest.strip()
            messages = _opening(system)
        elif command.startswith("/"):
            typer.echo(HELP, err=True)
        elif line:
            asked = [*messages, _said("user", line)]
            try:
                messages = [*asked, _said("assistant", _answer(engine, asked, params))]
            except RequestError as error:
                typer.echo(f"{error.line()} (/reset starts over)", err=True)
            except KeyboardInterrupt:
                typer.echo("\n(stopped)", err=True)


def _answer(engine: Engine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to stdout, then its speed to stderr."""
    began, first, completion = time.perf_counter(), None, None
    for piece in engine.stream(messages, params):
        first = first or time.perf_counter()
        completion = piece.completion
        sys.stdout.write(_shown(piece.text) if sys.stdout.isatty() else piece.text)
        sys.stdout.flush()
    ended = time.perf_counter()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if completion is None or first is None:
        return ""
    count = len(completion.token_ids or ())
    speed = f"{(count - 1) / (ended - first):.1f} tokens/s" if count > 1 else "one token"
    typer.echo(f"[{count} tokens, {speed}, first after {1e3 * (first - began):.0f} ms]", err=True)
    return completion.text


def _shown(text: str) -> str:
    """A model's text, which must not command the terminal."""
    return "\t".join(printable(part) for part in text.split("\t"))


def _next_line() -> str | None:
    """What the user types; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _read(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _opening(system: str) -> list[dict[str, str]]:
    return [_said("system", system)] if system else []


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
