"""HTTP/1.1 connections that are closed when no request comes of them."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's, which waits for a request's head for ever, with an end to that.

    A connection without a request at work `patience` seconds after it was made, or after its last answer, is closed:
    idle ones, half-sent heads, and bodies nobody waits for.
    """

    patience = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        if self._waiting is not None:
            self._waiting.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """It has its answer."""
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = self.loop.call_later(self.patience, self._give_up)

    def _give_up(self) -> None:
        at_work = self.cycle is not None and not self.cycle.response_complete
        if not at_work and not self.transport.is_closing():
            self.transport.close()


def patient(seconds: float) -> type[Connection]:
    """The protocol class for uvicorn, with `seconds` of patience."""
    return type("PatientConnection", (Connection,), {"patience": seconds})
