"""One engine process, seen from the front: start it, talk to it, notice that it died.

The address is a socket in a private folder that exists only until both sides are connected, so that even `kill -9`
of either leaves nothing behind. The engine follows its parent into death by itself (`engine_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable

import zmq
import zmq.asyncio

from quantkit.errors import PreflightError, QuantkitError
from quantkit.runtime.text import ChatText
from quantkit.server import messages
from quantkit.server.messages import Failed, FromEngine, LoadOptions, Report, Start, Started, ToEngine


class EngineLink:
    """A started engine process, the socket to it, what it loaded, and that model's text side."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, started: Started, text: ChatText
    ) -> None:
        self._process, self._socket, self.started, self.text = process, socket, started, text

    @classmethod
    async def open(cls, context: zmq.asyncio.Context, options: LoadOptions) -> EngineLink:
        """Start an engine process and wait until it has loaded `options.model`.

        Raises:
            QuantkitError: what the engine itself reported, with its exit code; or that it died without a word.
        """
        folder = tempfile.mkdtemp(prefix="quantkit-")
        socket = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        process = None
        try:
            address = f"ipc://{folder}/engine"
            socket.bind(address)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "quantkit.server.engine_process",
                address,
                str(os.getpid()),
                process_group=0,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
            )
            answer = await _first_answer(process, socket, Start(options, folder))
            if isinstance(answer, Failed):
                error = QuantkitError(answer.message)
                error.exit_code = answer.exit_code
                raise error
            return cls(process, socket, answer, await asyncio.to_thread(ChatText, answer.text_folder))
        except BaseException:
            socket.close()
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Hand over a message; never blocks, and is lost if the engine is dead."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(messages.encode(message))

    async def reports(self, deliver: Callable[[Report], None]) -> str:
        """Pass every report to `deliver` until the process ends; how it ended, in words."""
        receiving = asyncio.ensure_future(self._receive(deliver))
        try:
            return _ending(await self._process.wait())
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    def kill(self) -> None:
        """End the process now."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, seconds: float) -> None:
        """Ask the engine to leave, and end it if it has not after `seconds`."""
        self.send(messages.Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self.disconnect()

    def disconnect(self) -> None:
        """Let go of the socket."""
        self._socket.close()

    async def _receive(self, deliver: Callable[[Report], None]) -> None:
        while True:
            message = messages.decode_from_engine(await self._socket.recv())
            if isinstance(message, Report):
                deliver(message)


async def _first_answer(
    process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, start: Start
) -> Started | Failed:
    """The engine's answer to `Start`, or the error of a process that ended before giving one."""

    async def ask() -> FromEngine:
        await socket.send(messages.encode(start))
        return messages.decode_from_engine(await socket.recv())

    asking, ending = asyncio.ensure_future(ask()), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait((asking, ending), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asking), 0.2)
        if asking.done():
            answer = asking.result()
            if isinstance(answer, Started | Failed):
                return answer
        raise PreflightError(
            f"the engine process {_ending(await ending)} while loading",
            where=start.options.model,
            next="Its log is above.",
        )
    finally:
        asking.cancel()
        ending.cancel()


def _ending(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"exited with code {returncode}"
