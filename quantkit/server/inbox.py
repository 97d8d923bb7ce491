"""Where the answers to one HTTP request arrive: outputs of all its choices, in the order the engine sent them."""

from __future__ import annotations

import asyncio

from quantkit.runtime.request import RequestOutput
from quantkit.server.api_errors import ApiError


class Inbox:
    """A queue with one reader that takes all there is at once, so that a slow reader gets fewer, larger pieces."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: ApiError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Deliver one output."""
        self._outputs.append(output)
        self._arrived.set()

    def fail(self, error: ApiError) -> None:
        """Nothing more will come; the reader gets what was delivered, then the error."""
        self._error = error
        self._arrived.set()

    async def take(self) -> list[RequestOutput]:
        """Everything delivered since the last call, at least one.

        Raises:
            ApiError: what `fail` was given.
        """
        await self._arrived.wait()
        if not self._outputs and self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        if self._error is None:
            self._arrived.clear()
        return outputs
