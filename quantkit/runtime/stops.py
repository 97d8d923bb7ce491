"""Stop strings over streamed text: cut exactly before the first, and never a beginning of one shown by mistake."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Lets text through until one of `stops` is complete; holds back an end with which a stop might begin."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """What may be shown after `text` has come; sets `stopped` when a stop string is complete."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.stopped = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        cut = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text still held back, when no more will come."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
