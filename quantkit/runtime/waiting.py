"""WaitingQueue: who is admitted next. Priority, then nearest deadline, then arrival; who waits too long goes first."""

from __future__ import annotations

import heapq
from typing import Any

from quantkit.runtime.request import Request

_SLACK = 64

Entry = tuple[Any, int, Request]
"""(key, ticket, request); good while the request is still queued on that ticket."""


class WaitingQueue:
    """Holds waiting requests. Cancelling is O(1): entries that have gone stale are skipped when met.

    Args:
        ageing_s: seconds after which the longest waiting request goes first whatever its priority.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._best: list[Entry] = []
        self._oldest: list[Entry] = []
        self._deadlines: list[Entry] = []
        self._ticket = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, request: Request) -> None:
        """Queue a request, for the first time or again (preempted, or passed over this step)."""
        self._ticket += 1
        self._live += 1
        request.ticket = self._ticket
        heapq.heappush(self._best, (request.order, self._ticket, request))
        heapq.heappush(self._oldest, (request.arrived, self._ticket, request))
        if request.deadline is not None and request.num_output == 0:
            heapq.heappush(self._deadlines, (request.deadline, self._ticket, request))
        if len(self._best) > 2 * self._live + _SLACK:
            self._best = _compacted(self._best)
        if len(self._oldest) > 2 * self._live + _SLACK:
            self._oldest = _compacted(self._oldest)
        if len(self._deadlines) > 2 * self._live + _SLACK:
            self._deadlines = _compacted(self._deadlines)

    def pop(self, now: float) -> Request | None:
        """Take the next request out of the queue; None when it is empty."""
        oldest = _first(self._oldest)
        if oldest is None:
            return None
        if now - oldest.arrived <= self._ageing_s:
            oldest = _first(self._best) or oldest
        self.cancel(oldest)
        return oldest

    def cancel(self, request: Request) -> None:
        """Take a given request out, if it is in."""
        if request.ticket:
            request.ticket = 0
            self._live -= 1

    def pop_expired(self, now: float) -> list[Request]:
        """Take out those whose deadline has passed before they brought a token."""
        expired = []
        while (request := _first(self._deadlines)) is not None and request.deadline is not None:
            if request.deadline > now:
                break
            self.cancel(request)
            expired.append(request)
        return expired


def _first(heap: list[Entry]) -> Request | None:
    """The smallest entry that still holds; stale ones before it are dropped."""
    while heap:
        _, ticket, request = heap[0]
        if request.ticket == ticket:
            return request
        heapq.heappop(heap)
    return None


def _compacted(heap: list[Entry]) -> list[Entry]:
    kept = [entry for entry in heap if entry[2].ticket == entry[1]]
    heapq.heapify(kept)
    return kept
