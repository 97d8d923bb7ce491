"""One record a request, and the log line made of it by another thread."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field

import msgspec


@dataclass
class Record:
    """What is known of one HTTP request. Times in seconds of the monotonic clock."""

    method: str
    path: str
    client: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


class AccessLog:
    """Writes records as JSON lines to stderr off the event loop."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def request(self, record: Record) -> None:
        """Log one request that has ended."""
        fields = asdict(record)
        arrived, first = fields.pop("arrived"), fields.pop("first_token")
        fields["ttft_ms"] = None if first is None else round((first - arrived) * 1e3, 2)
        fields["duration_ms"] = round((time.monotonic() - arrived) * 1e3, 2)
        self._put("request", fields)

    def event(self, name: str, **fields: object) -> None:
        """Log something that is not a request."""
        self._put(name, fields)

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout=2)

    def _put(self, name: str, fields: dict[str, object]) -> None:
        known = {key: value for key, value in fields.items() if value is not None}
        self._queue.put({"time": round(time.time(), 3), "event": name, **known})

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            text = msgspec.json.encode(line).decode()
            sys.stderr.write("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text) + "\n")
            sys.stderr.flush()
