"""Token ids of one answer become the text to show: whole characters, cut exactly at stop strings."""

from __future__ import annotations

from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.stops import StopScanner
from quantkit.runtime.text import ChatText


class ShownText:
    """The text of one answer as it grows. Stop strings count once the request's `min_tokens` are out.

    `tokens`: how many were pushed. `produced`: characters so far, those that a stop string may yet swallow included.
    """

    def __init__(self, text: ChatText, params: SamplingParams) -> None:
        self.tokens = self.produced = 0
        self._min_tokens = params.min_tokens
        self._detokenizer, self._scanner = text.detokenizer(), StopScanner(params.stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer, which the engine does not know of."""
        return self._scanner.stopped is not None

    def push(self, token_id: int) -> str:
        """What may be shown once this token is there."""
        self.tokens += 1
        return self._scan(self._detokenizer.push((token_id,)))

    def flush(self) -> str:
        """What was held back, at the end."""
        piece = self._scan(self._detokenizer.flush())
        return piece if self.stopped else piece + self._scanner.flush()

    def _scan(self, text: str) -> str:
        self.produced += len(text)
        return self._scanner.feed(text) if self.tokens > self._min_tokens else text
