"""Who is let in: a limit on what waits, decided before any prompt is tokenized, and nobody while draining."""

from __future__ import annotations

import asyncio
import math

from quantkit.server.api_errors import ApiError, bad_request, unavailable


class Admission:
    """Counts sequences in the house: at most `running` at work and `queue` waiting for a place."""

    def __init__(self, running: int, queue: int) -> None:
        self._running, self._limit = running, running + queue
        self._inside = 0
        self._seconds = 1.0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def draining(self) -> bool:
        """Whether the server is on its way out."""
        return self._draining

    def enter(self, sequences: int) -> None:
        """Take places for one request.

        Raises:
            ApiError: 503 while draining, 400 when the house would be too small were it empty, 429 with Retry-After
                when the queue is full.
        """
        if self._draining:
            raise unavailable("the server is shutting down")
        if sequences > self._limit:
            raise bad_request(
                f"prompts times n make {sequences} sequences, more than the {self._limit} this server holds at once",
                "n",
            )
        if self._inside + sequences > self._limit:
            rounds = max(1, self._inside - self._running) / self._running
            raise ApiError(
                429,
                f"the queue is full: {self._inside} sequences in flight, {sequences} more exceed {self._limit}",
                code="queue_full",
                retry_after=min(60, max(1, math.ceil(rounds * self._seconds))),
            )
        self._inside += sequences
        self._empty.clear()

    def leave(self, sequences: int, seconds: float) -> None:
        """Give the places back; `seconds` is how long the request took, which sets the next Retry-After."""
        self._inside -= sequences
        self._seconds += 0.1 * (seconds - self._seconds)
        if self._inside == 0:
            self._empty.set()

    def drain(self) -> None:
        """Let nobody in from now on."""
        self._draining = True

    async def empty(self) -> None:
        """Wait until everybody has left."""
        await self._empty.wait()
