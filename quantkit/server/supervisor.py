"""Keeps one engine running behind the API: routes its answers, watches its progress, restarts it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import zmq

from quantkit.errors import CheckpointError, QuantkitError
from quantkit.runtime.request import EngineRequest
from quantkit.server.api_errors import unavailable
from quantkit.server.inbox import Inbox
from quantkit.server.link import EngineLink
from quantkit.server.messages import Abort, LoadOptions, Report, Started, Submit

_WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class Patience:
    """When an engine counts as stuck, and how often it may die. Times in seconds."""

    hung: float = 120.0
    """Without a report for this long the engine is ended and restarted."""
    restarts: int = 3
    """More deaths than this within `window` and the server gives up."""
    window: float = 600.0
    backoff: float = 0.5
    """Wait before the first restart; doubles with each further one in the window."""

    @property
    def stale(self) -> float:
        """Without a report for this long the server is not ready."""
        return min(15.0, self.hung / 2)


@dataclass
class Supervisor:
    """The engine as the API sees it. The three callbacks are told everything, for metrics and log."""

    options: LoadOptions
    patience: Patience
    on_start: Callable[[Started], None]
    on_report: Callable[[Report], None]
    on_death: Callable[[str], None]
    _context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    _link: EngineLink | None = None
    _digest: str | None = None
    _inboxes: dict[str, Inbox] = field(default_factory=dict)
    _last_report: float = 0.0
    _last_words: str = "the engine is loading"
    _deaths: deque[float] = field(default_factory=deque)
    _hung: bool = False

    async def start(self) -> EngineLink:
        """Load the model, the one that was served before if there was one; a failure is the caller's.

        Raises:
            QuantkitError: it cannot be loaded, or the folder holds another artifact by now.
        """
        link = await EngineLink.open(self._context, self.options)
        if self._digest not in (None, link.started.payload_digest):
            await link.close(0)
            raise CheckpointError(
                f"holds another artifact than the {self._digest} that was being served",
                where=self.options.model,
                next="Put that one back, or stop this server and start another",
            )
        self._link, self._digest = link, link.started.payload_digest
        self._last_report = time.monotonic()
        self.on_start(self._link.started)
        return self._link

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            QuantkitError: the engine died more often than it may.
        """
        watching = asyncio.ensure_future(self._watch())
        try:
            while True:
                if self._link is not None:
                    ending = await self._link.reports(self._deliver)
                    ending = f"made no progress for {self.patience.hung:g} s and was ended" if self._hung else ending
                    self._bury(f"the engine {ending}")
                await self._restart()
        finally:
            watching.cancel()

    async def stop(self, seconds: float) -> None:
        """End the engine, gently for `seconds`, and fail whatever is still in flight."""
        self._fail_all("the server is shutting down")
        if self._link is not None:
            link, self._link = self._link, None
            await link.close(seconds)
        self._context.destroy(linger=0)

    def kill(self) -> None:
        """End the engine now."""
        if self._link is not None:
            self._link.kill()

    def submit(self, request: EngineRequest, inbox: Inbox) -> None:
        """Send a request; its outputs, or the engine's death, arrive in `inbox`.

        Raises:
            ApiError: 503 when no engine is there.
        """
        if self._link is None:
            raise unavailable(self._last_words)
        self._inboxes[request.request_id] = inbox
        self._link.send(Submit(request))

    def abort(self, request_ids: Iterable[str], *, finished: bool = False) -> None:
        """Forget these requests here and in the engine; `finished` when they got all they wanted."""
        known = [name for name in request_ids if self._inboxes.pop(name, None) is not None]
        if known and self._link is not None:
            self._link.send(Abort(known, finished))

    def dead(self) -> str:
        """Why there is no engine now; empty when there is one."""
        return self._last_words if self._link is None else ""

    def trouble(self) -> str:
        """Why the server is not ready; empty when it is."""
        if self._link is None:
            return self._last_words
        silence = time.monotonic() - self._last_report
        return f"the engine has made no progress for {silence:.0f} s" if silence > self.patience.stale else ""

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id while there is one."""
        return None if self._link is None else self._link.pid

    def _deliver(self, report: Report) -> None:
        self._last_report = time.monotonic()
        for output in report.outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                if output.finish_reason is not None:
                    del self._inboxes[output.request_id]
                inbox.put(output)
        self.on_report(report)

    def _bury(self, words: str) -> None:
        if self._link is not None:
            self._link.disconnect()
        self._link, self._hung, self._last_words = None, False, f"{words}; it is being restarted"
        self._fail_all(words)
        self.on_death(words)

    async def _restart(self) -> None:
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > self.patience.window:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self.patience.restarts:
            raise QuantkitError(
                f"the engine died {len(self._deaths)} times within {self.patience.window:g} s",
                next="Its log is above; the server gives up.",
            )
        await asyncio.sleep(self.patience.backoff * 2 ** (len(self._deaths) - 1))
        try:
            await self.start()
        except QuantkitError as error:
            self._bury(f"the engine could not be restarted: {error.line()}")

    async def _watch(self) -> None:
        """End an engine that has not reported for too long, unless it was this process that did not listen."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            listened = now - before < 2 * _WATCH_SECONDS
            if self._link is not None and listened and now - self._last_report > self.patience.hung:
                self._hung = True
                with contextlib.suppress(ProcessLookupError):
                    self._link.kill()

    def _fail_all(self, words: str) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in set(inboxes.values()):
            inbox.fail(unavailable(words))
