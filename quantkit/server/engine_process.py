"""The engine core process: loads what it is told, then steps while there is work. Knows nothing of text or HTTP.

python -m quantkit.server.engine_process ADDRESS PARENT_PID
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from quantkit.errors import QuantkitError, RequestError
from quantkit.freed_memory import collect_and_return
from quantkit.parent import die_with
from quantkit.runtime.engine import EngineCore
from quantkit.runtime.request import EngineRequest, RequestOutput
from quantkit.server import messages
from quantkit.server.limits import lift_memory_limit
from quantkit.server.messages import Abort, Failed, LoadOptions, Report, Start, Started, Submit

if TYPE_CHECKING:
    from quantkit.runtime.load import Loaded

_IDLE_MS = 500
"""Between reports while there is nothing to do."""


def main(address: str, parent: int) -> int:
    """Serve the front at `address`, whose `Start` is read from standard input; the exit code."""
    die_with(parent)
    lift_memory_limit()
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(address)
        try:
            loaded, started = _load(messages.decode_start(sys.stdin.buffer.read()))
        except QuantkitError as error:
            socket.send(messages.encode(Failed(error.line(), error.exit_code)))
            return error.exit_code
        except Exception as error:  # noqa: BLE001 (whatever it is, the front must hear of it)
            traceback.print_exc()
            socket.send(messages.encode(Failed(f"internal error while loading: {type(error).__name__}: {error}", 1)))
            return 1
        socket.send(messages.encode(started))
        collect_and_return()
        gc.freeze()
        _serve(loaded.core, socket)
    return 0


def _load(start: Start) -> tuple[Loaded, Started]:
    from quantkit.artifact.layout import MANIFEST
    from quantkit.runtime.load import EngineOptions, load_artifact, load_source

    asked = start.options
    given = {name: value for name in LoadOptions.__struct_fields__ if (value := getattr(asked, name)) is not None}
    del given["model"]
    options, folder = EngineOptions(**given), Path(asked.model)
    if (folder / MANIFEST).is_file():
        loaded, text_folder = load_artifact(folder, options), folder
    else:
        from quantkit.models.source import open_source  # imports torch

        loaded, text_folder = load_source(asked.model, options), Path(start.scratch)
        open_source(asked.model).write_tokenizer(text_folder)
    config = loaded.core.config
    return loaded, Started(
        text_folder=str(text_folder),
        marks=dict(loaded.marks),
        payload_digest=loaded.payload_digest,
        verdict=loaded.standing.verdict,
        coverage=dict(loaded.standing.coverage),
        backend=loaded.executor.backend_name,
        weight_bytes=loaded.executor.weight_bytes,
        kv_bytes=loaded.memory.kv_bytes,
        kv_tokens=loaded.memory.kv_tokens,
        kv_format=loaded.kv_format,
        compute=loaded.executor.program.compute,
        vocab_size=config.vocab_size,
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )


def _serve(core: EngineCore, socket: zmq.Socket[bytes]) -> None:
    """Take what has come, step, report; without work, wait for the socket."""
    while True:
        if not core.has_work():
            socket.poll(_IDLE_MS)
        refused: list[RequestOutput] = []
        with contextlib.suppress(zmq.Again):
            while True:
                message = messages.decode_to_engine(socket.recv(zmq.NOBLOCK))
                if isinstance(message, Submit):
                    refused += _add(core, message.request)
                elif isinstance(message, Abort):
                    for name in message.request_ids:
                        core.abort(name, finished=message.finished)
                else:
                    return
        began = time.perf_counter()
        outputs = core.step() if core.has_work() else []
        seconds = time.perf_counter() - began if outputs else 0.0
        socket.send(messages.encode(Report(refused + outputs, core.stats(), seconds)))


def _add(core: EngineCore, request: EngineRequest) -> list[RequestOutput]:
    """Queue a request; the last output about one that cannot be taken, whose trouble stays its own."""
    try:
        core.add_request(request)
    except RequestError as error:
        return [RequestOutput(request.request_id, [], finish_reason="refused", error=error.line())]
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return [RequestOutput(request.request_id, [], finish_reason="error", error=f"internal error: {error!r}")]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
