"""From admission to the last byte of a generating request, whichever way it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quantkit.server.admission import Admission
from quantkit.server.api_errors import ApiError
from quantkit.server.formats import Answer
from quantkit.server.metrics import Metrics
from quantkit.server.records import Record
from quantkit.server.wire import ClientGone, EventStream, json_response, unless_gone


class Ticket:
    """A request's place in the house; given back once, with the outcome: finished, refused, failed or aborted."""

    def __init__(self, admission: Admission, sequences: int, record: Record, metrics: Metrics) -> None:
        try:
            admission.enter(sequences)
        except ApiError as error:
            metrics.refused.labels(str(error.status)).inc()
            raise
        self._admission, self._sequences, self._record, self._metrics = admission, sequences, record, metrics
        self._open = True
        metrics.accepted.inc()
        metrics.in_flight.inc()

    def close(self, outcome: str) -> None:
        """Give the place back; further calls do nothing."""
        if not self._open:
            return
        self._open = False
        seconds = time.monotonic() - self._record.arrived
        self._admission.leave(self._sequences, seconds)
        self._metrics.in_flight.dec()
        self._metrics.ended.labels(outcome).inc()
        self._metrics.latency.observe(seconds)

    def close_after(self, error: BaseException) -> None:
        """Give the place back after a request that raised `error`."""
        if isinstance(error, ClientGone | asyncio.CancelledError | GeneratorExit):
            self.close("aborted")
        elif isinstance(error, ApiError) and error.status < 500:  # the client's mistake, which alarms nobody
            self.close("refused")
        else:
            self.close("failed")


async def respond(request: Request, answer: Answer, ticket: Ticket, *, stream: bool, include_usage: bool) -> Response:
    """Generate and answer. A streamed answer closes `ticket` at its end, any other before this returns.

    Raises:
        ApiError: the engine refused the request or died before the first token.
        ClientGone: the client did not wait.
    """
    if not stream:
        whole = await unless_gone(request, answer.whole())
        ticket.close("finished")
        return json_response(whole)
    events = _ticketed(answer.chunks(include_usage), ticket)
    return EventStream(await unless_gone(request, anext(events)), events)


async def _ticketed(events: AsyncGenerator[Any, None], ticket: Ticket) -> AsyncGenerator[Any, None]:
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except BaseException as error:
        ticket.close_after(error)
        raise
    ticket.close("finished")
