"""Assembles the commands and turns what they raise into one line and an exit code (ARCHITECTURE, conventions)."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from quantkit import __version__
from quantkit.cli.bench import bench
from quantkit.cli.build import build
from quantkit.cli.chat import chat
from quantkit.cli.gate import gate
from quantkit.cli.init import init
from quantkit.cli.inspect import inspect
from quantkit.cli.kernels import kernels
from quantkit.cli.plan import plan
from quantkit.cli.profile import profile
from quantkit.cli.report import report
from quantkit.cli.review import review
from quantkit.cli.schema import schema
from quantkit.cli.search import search
from quantkit.cli.serve import serve
from quantkit.cli.verify import verify
from quantkit.errors import PreflightError, QuantkitError
from quantkit.freed_memory import map_large_blocks
from quantkit.terminal import printable

INTERRUPTED = 130
_LONGEST = 1000
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a machine, not of this program, wherever they come up."""
_ELSEWHERE = "Make room or ask for access there, or work on a copy in a place of yours"

app = typer.Typer(
    name="quantkit",
    help="One recipe in, one verified and servable artifact out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (init, profile, plan, search, build, inspect, verify, gate, report, serve, chat, schema):
    app.command()(command)
app.add_typer(review, name="review")
app.add_typer(kernels, name="kernels")
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quantkit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere on the line.")] = False,
) -> None:
    """One recipe in, one verified and servable artifact out."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: `sys.argv`) and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Every failure is one line on stderr."""
    debug = "--debug" in arguments
    # torch's OpenMP threads spin at barriers by default, which on a busy machine makes one product 50 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    map_large_blocks()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("quantkit").setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        code = app([a for a in arguments if a != "--debug"], prog_name="quantkit", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except QuantkitError as error:
        code = _fail(str(error), error.exit_code, debug)
        for other in error.others:
            print(f"quantkit: {_one_line(str(other))}", file=sys.stderr)
        return code
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted; run the same command to go on", INTERRUPTED, debug)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the last resort of a command line
        if type(error).__name__ == "NoArgsIsHelpError":  # the library's; its message is the help itself
            print(printable(str(error)), file=sys.stderr)
            return 2
        if hasattr(error, "format_message"):  # a usage error of the command-line library
            return _fail(f"{error.format_message()} See `quantkit --help`", 2, debug)
        if isinstance(error, OSError) and error.errno in _NOT_OURS:
            denied = PreflightError(str(error.strerror), where=str(error.filename or ""), next=_ELSEWHERE)
            return _fail(str(denied), denied.exit_code, debug)
        return _fail(f"internal error: {type(error).__name__}: {error}; rerun with --debug for the traceback", 1, debug)


def _fail(line: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"quantkit: {_one_line(line)}", file=sys.stderr)
    return code


def _one_line(text: str) -> str:
    """`text` as one line that fits a screen and cannot steer a terminal: names in files are other people's words."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
