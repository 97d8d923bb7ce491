"""Bodies on the wire: JSON, server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quantkit.server.api_errors import ApiError
from quantkit.server.records import Record

encode = msgspec.json.Encoder().encode
GONE = 499
"""Status in the log of a request whose client did not wait."""
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as a JSON response."""
    return Response(encode(body), status, headers, media_type="application/json")


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away first.

    Raises:
        ClientGone: it did.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancel(working, leaving)


class EventStream(Response):
    """Server-sent events: each item of `events` as one `data:` line, then `[DONE]`.

    The status line waits for the first item, so that a request the engine refuses gets its proper status. An error
    after that becomes the last event. When the client goes away, `events` is cancelled and closed.
    """

    def __init__(self, first: Any, events: AsyncGenerator[Any, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send_all(send, scope["record"]))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                scope["record"].status = GONE
        finally:
            await _cancel(sending, leaving)
            await self._events.aclose()

    async def _send_all(self, send: Send, record: Record) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})

        await put(encode(self._first))
        try:
            async for event in self._events:
                await put(encode(event))
        except ApiError as error:
            record.error = error.message
            await put(encode(error.body()))
        await put(b"[DONE]", more=False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
