"""What a user can cause. Every message says what is wrong, where, and what to do next, in one line.

Exit codes (ARCHITECTURE, conventions): 0 pass · 1 internal · 2 recipe or usage · 3 preflight ·
10 gate failed · 11 inconclusive · 12 review pending · 130 interrupted and resumable.
"""

from __future__ import annotations

from collections.abc import Sequence


class QuantkitError(Exception):
    """A mistake or a circumstance the user can act on; printed as one line, never as a traceback.

    Args:
        what: what is wrong.
        where: file, line, key, layer or tensor; empty when there is no place to point at.
        next: what to do about it; empty when nothing helps.
    """

    exit_code = 1
    others: tuple[QuantkitError, ...] = ()
    """What else is wrong, where one look found several problems."""

    def __init__(self, what: str, *, where: str = "", next: str = "") -> None:
        self.what, self.where, self.next = what, where, next
        super().__init__(self.line())

    def line(self) -> str:
        """The message as the user sees it: `where: what. Next: next`."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text.rstrip('.')}. {self.next}" if self.next else text


class RecipeError(QuantkitError):
    """A recipe or a command line that cannot be followed."""

    exit_code = 2

    @classmethod
    def of(cls, problems: Sequence[RecipeError]) -> RecipeError:
        """The first of some problems, with the others."""
        first, *others = problems
        first.others = (*first.others, *(one for other in others for one in (other, *other.others)))
        return first


class PreflightError(QuantkitError):
    """The machine or the inputs cannot carry the work: memory, disk, device, dependency, a damaged file."""

    exit_code = 3


class CheckpointError(PreflightError):
    """A checkpoint or an artifact that cannot be read or trusted; `where` names file and tensor."""


class NumericsError(QuantkitError):
    """NaN, Inf or overflow met while building; `where` names layer and sample."""

    exit_code = 3


class RequestError(QuantkitError):
    """One request to an engine cannot be served (HTTP 400); the engine goes on."""

    exit_code = 2
