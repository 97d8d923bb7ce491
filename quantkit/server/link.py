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
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from quantkit.errors import PreflightError, QuantkitError
from quantkit.server import messages
from quantkit.server.channel import Channel
from quantkit.server.messages import Failed, FromEngine, LoadOptions, Report, Start, Started, ToEngine

if TYPE_CHECKING:
    from quantkit.runtime.text import ChatText


class EngineLink:
    """A started engine process, the channel to it, what it loaded, and that model's text side."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, started: Started, text: ChatText) -> None:
        self._process, self._channel, self.started, self.text = process, channel, started, text

    @classmethod
    async def open(cls, context: zmq.Context[zmq.Socket[bytes]], options: LoadOptions) -> EngineLink:
        """Start an engine process and wait until it has loaded `options.model`.

        Raises:
            QuantkitError: what the engine itself reported, with its exit code; or that it died without a word.
        """
        folder = tempfile.mkdtemp(prefix="quantkit-")
        address = f"ipc://{folder}/engine"
        channel = Channel(context, address)
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "quantkit.server.engine_process",
                address,
                str(os.getpid()),
                process_group=0,
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr,
            )
            answer = await _first_answer(process, channel, Start(options, folder))
            if isinstance(answer, Failed):
                error = QuantkitError(answer.message)
                error.exit_code = answer.exit_code
                raise error
            return cls(process, channel, answer, await asyncio.to_thread(_read_text, answer))
        except BaseException:
            channel.close()
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
        self._channel.send(message)

    async def reports(self, deliver: Callable[[Report], None]) -> str:
        """Pass every report to `deliver` until the process ends; how it ended, in words."""

        def receive(message: FromEngine) -> None:
            if isinstance(message, Report):
                deliver(message)

        self._channel.receive = receive
        self._channel.drain()
        return _ending(await self._process.wait())

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
        """Let go of the channel."""
        self._channel.close()


async def _first_answer(process: asyncio.subprocess.Process, channel: Channel, start: Start) -> Started | Failed:
    """The engine's answer to `start`, or the error of a process that ended before giving one."""
    answer: asyncio.Future[FromEngine] = asyncio.get_running_loop().create_future()
    channel.receive = lambda message: None if answer.done() else answer.set_result(message)
    if process.stdin is not None:
        process.stdin.write(messages.encode(start))
        process.stdin.close()
    ending = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait((answer, ending), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():  # its last words may still be on their way
            await asyncio.wait((answer,), timeout=0.2)
        if answer.done() and isinstance(found := answer.result(), Started | Failed):
            return found
        raise PreflightError(
            f"the engine process {_ending(await ending)} while loading",
            where=start.options.model,
            next="Its log is above.",
        )
    finally:
        ending.cancel()


def _read_text(started: Started) -> ChatText:
    from quantkit.artifact.marks import check_unchanged
    from quantkit.runtime.text import ChatText  # its modules are read while the engine loads

    text = ChatText(started.text_folder)
    check_unchanged(Path(started.text_folder), started.marks)
    return text


def _ending(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"exited with code {returncode}"
