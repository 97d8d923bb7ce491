"""The API behind uvicorn. Reading these modules takes most of a second, so only what serves HTTP imports this one."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import uvicorn

from quantkit.server.app import Service, build_app
from quantkit.server.connection import patient


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: draining comes before closing."""

    def __init__(self, service: Service) -> None:
        self.service = service
        super().__init__(
            uvicorn.Config(
                build_app(service),
                http=patient(service.request_seconds),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=5,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Nothing: `lifecycle` listens to signals."""
        yield
