"""EngineThread: one thread that owns an EngineCore and steps it while there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from quantkit.runtime.engine import EngineCore, EngineStats
from quantkit.runtime.request import EngineRequest, RequestOutput

Sink = Callable[[list[RequestOutput] | Exception], None]
"""Gets a step's outputs for the requests submitted with it, or the one exception that ends them all."""


class EngineThread:
    """Runs the core's loop. `submit` and `abort` may be called from any thread and do not wait for the step."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._sinks: dict[str, Sink] = {}
        self._closing = False
        self._dead: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="quantkit-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[EngineRequest], sink: Sink) -> None:
        """Add requests together. If one is refused, all are taken back and `sink` gets its error."""
        with self._wake:
            if self._over:
                raise RuntimeError("the engine is closed") from self._dead
            self._inbox.append(lambda: self._add(requests, sink))
            self._wake.notify()

    def abort(self, request_ids: list[str], *, finished: bool = False) -> None:
        """Forget requests; unknown ids and a closed engine are no error."""
        with self._wake:
            if request_ids and not self._over:
                self._inbox.append(lambda: self._drop(request_ids, finished))
                self._wake.notify()

    def stats(self) -> EngineStats:
        """The core's state, as of some moment between two steps or within one."""
        return self._core.stats()

    def close(self) -> None:
        """Stop after the current step; whoever still waits gets an exception."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    @property
    def _over(self) -> bool:
        return self._closing or self._dead is not None

    def _run(self) -> None:
        try:
            while self._await_work():
                while self._inbox:
                    self._inbox.popleft()()
                if self._core.has_work():
                    self._deliver(self._core.step())
            self._fail(RuntimeError("the engine was closed"))
        except Exception as error:  # noqa: BLE001 (whatever killed the loop is handed to everyone waiting on it)
            self._fail(error)

    def _await_work(self) -> bool:
        with self._wake:
            while not (self._inbox or self._closing or self._core.has_work()):
                self._wake.wait()
            return not self._closing

    def _add(self, requests: list[EngineRequest], sink: Sink) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self._core.add_request(request)
                added.append(request.request_id)
        except Exception as error:  # noqa: BLE001 (whatever is wrong with these requests is theirs, not the thread's)
            for request_id in added:
                self._core.abort(request_id)
            sink(error)
            return
        self._sinks |= dict.fromkeys(added, sink)

    def _drop(self, request_ids: list[str], finished: bool) -> None:
        for request_id in request_ids:
            self._core.abort(request_id, finished=finished)
            self._sinks.pop(request_id, None)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        parcels: dict[int, tuple[Sink, list[RequestOutput]]] = {}
        for output in outputs:
            sink = self._sinks[output.request_id]
            parcels.setdefault(id(sink), (sink, []))[1].append(output)
            if output.finish_reason is not None:
                del self._sinks[output.request_id]
        for sink, parcel in parcels.values():
            sink(parcel)

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._dead = error
        for sink in {id(sink): sink for sink in self._sinks.values()}.values():
            sink(error)
        self._sinks.clear()
