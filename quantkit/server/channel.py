"""The front's end of the ZeroMQ pair, driven by the event loop without a future for every message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq

from quantkit.server import messages
from quantkit.server.messages import FromEngine, ToEngine

_AT_A_TIME = 256
"""Messages after which other work of the event loop gets a turn."""


class Channel:
    """Bound to `address`; every message that comes is given to `receive`, which may be replaced at any time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.receive: Callable[[FromEngine], None] = lambda message: None
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._loop.add_reader(self._socket.fileno(), self.drain)

    def send(self, message: ToEngine) -> None:
        """Hand over a message; never blocks, and is lost if nobody is connected."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self.drain)  # sending may have swallowed the descriptor's one signal of an arrival

    def drain(self) -> None:
        """Take what has come."""
        for _ in range(_AT_A_TIME):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing more, or closed meanwhile
                return
            self.receive(messages.decode_from_engine(data))
        self._loop.call_soon(self.drain)

    def close(self) -> None:
        """Let go of the socket; further calls do nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
