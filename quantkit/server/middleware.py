"""Around every request: its record and log line, the key check, and the limit on the body."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.server.api_errors import ApiError, clipped
from quantkit.server.records import AccessLog, Record
from quantkit.server.wire import ClientGone, json_response

_OPEN = frozenset({"/health", "/ready"})
"""Paths a probe asks without a key."""
_SILENT = _OPEN | {"/metrics"}
"""Paths that probes and scrapers ask all the time: logged only when they neither answer nor say "not now"."""

_LINGER_S = 2.0
"""How long what a client still sends of a refused body is read."""


class Recording:
    """Gives each request a `Record` (`scope["record"]`), an `X-Request-Id`, and a log line at its end."""

    def __init__(self, app: ASGIApp, log: AccessLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        record = scope["record"] = Record(scope["method"], clipped(scope["path"]), client[0] if client else "")

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        finally:
            if record.path not in _SILENT or record.status not in (200, 503):
                self._log.request(record)


class KeyCheck:
    """Lets through who brings one of `keys` as a bearer token; everybody when there are no keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and self._digests and scope["path"] not in _OPEN and not self._known(scope):
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await refusal(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def refusal(error: ApiError) -> Response:
    """The error as a response."""
    return json_response(error.body(), error.status, error.headers)


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The request's body.

    Raises:
        ApiError: 413 as soon as it exceeds `limit` bytes, declared or sent; 408 when it is not there after `seconds`.
        ClientGone: the client left in the middle of it.
    """
    too_large = ApiError(413, f"the body exceeds the limit of {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        await _discard(request)
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_too_slow") from None
    except ClientDisconnect:
        raise ClientGone from None
    if len(body) > limit:
        await _discard(request)
        raise too_large
    return bytes(body)


async def _discard(request: Request) -> None:
    """Read on for a moment without keeping anything: a connection closed on unread bytes loses its answer too."""
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(_LINGER_S):
            async for _ in request.stream():
                pass
