"""A server's life: socket, engine, ready, drain, exit. Runs in the front process and never imports torch.

The engine's process is started before the API's own modules are read: the two take their time side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.server.binding import check_keys, listen
from quantkit.server.limits import allow_connections, limit_memory
from quantkit.server.link import EngineLink
from quantkit.server.messages import LoadOptions, Started
from quantkit.server.metrics import Metrics
from quantkit.server.records import AccessLog
from quantkit.server.supervisor import Patience, Supervisor

if TYPE_CHECKING:
    from quantkit.server.http import HttpServer

_INTERRUPTED = 130
_THREADS = 2
"""Beside the loop's: each that has tokenized keeps up to 10,000 words' tokens, 3 to 4 MB, and a heap of its own."""
_FRONT_BYTES = 4 << 30
"""Address space of the front, which holds no weights: one request that asks for more fails, not the machine."""


@dataclass(frozen=True)
class ServeConfig:
    """How to serve. Sizes in bytes, times in seconds; `port` 0 takes any free one."""

    engine: LoadOptions
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    insecure: bool = False
    served_model_name: str = ""
    queue_limit: int = 256
    body_limit: int = 4 << 20
    request_seconds: float = 60.0
    """Time a client has to send its request."""
    drain_seconds: float = 30.0
    patience: Patience = field(default_factory=Patience)

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.engine.model).resolve().name


def serve(config: ServeConfig, announce: Callable[[Started, str], None]) -> int:
    """Serve until told to stop; the process's exit code.

    Args:
        announce: called once the model is loaded, with what was loaded and the server's URL.

    Raises:
        QuantkitError: the address, the artifact or the model could not be had, or the engine died too often.
    """
    check_keys(config.keys)
    listening = listen(config.host, config.port, keyless=not config.keys, insecure=config.insecure)
    limit_memory(_FRONT_BYTES)
    allow_connections()
    with contextlib.closing(listening):
        return asyncio.run(_Server(config, listening).run(announce))


class _Server:
    def __init__(self, config: ServeConfig, listening: socket.socket) -> None:
        self._config, self._listening = config, listening
        self._metrics, self._log = Metrics(), AccessLog()
        self._supervisor = Supervisor(
            config.engine, config.patience, self._metrics.engine_started, self._metrics.engine_report, self._engine_died
        )
        self._stop = asyncio.Event()

    async def run(self, announce: Callable[[Started, str], None]) -> int:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)
        loading = asyncio.ensure_future(self._supervisor.start())
        tasks: list[asyncio.Future[Any]] = [loading]
        http = None
        try:
            http = await asyncio.to_thread(self._http)
            serving = asyncio.ensure_future(http.serve(sockets=[self._listening]))
            engine = asyncio.ensure_future(self._engine(loading, http, announce))
            stopping = asyncio.ensure_future(self._stop.wait())
            tasks += [engine, stopping]
            await asyncio.wait((serving, engine, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            if engine.done():
                engine.result()
            if http.service.started is not None:
                await self._drain(http)
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._supervisor.stop(2.0)
            if http is not None:
                http.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)
            self._log.close()

    def _http(self) -> HttpServer:
        from quantkit.server.app import Service
        from quantkit.server.http import HttpServer

        config = self._config
        return HttpServer(
            Service(
                config.name,
                self._supervisor,
                self._metrics,
                self._log,
                config.keys,
                config.queue_limit,
                config.body_limit,
                config.request_seconds,
            )
        )

    async def _engine(
        self, loading: asyncio.Future[EngineLink], http: HttpServer, announce: Callable[[Started, str], None]
    ) -> None:
        link = await loading
        http.service.loaded(link.started, link.text)
        host, port = self._listening.getsockname()[:2]
        announce(link.started, f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await self._supervisor.run()

    async def _drain(self, http: HttpServer) -> None:
        """Finish what was accepted, within the deadline."""
        http.service.admission.drain()
        self._log.event("draining", seconds=self._config.drain_seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(http.service.admission.empty(), self._config.drain_seconds)

    def _signal(self) -> None:
        if self._stop.is_set():
            self._supervisor.kill()
            os._exit(_INTERRUPTED)
        self._stop.set()

    def _engine_died(self, words: str) -> None:
        self._metrics.restarts.inc()
        self._log.event("engine_died", reason=words)
