"""A client that sends a server of the OpenAI API everything it may be sent, and some that it may not.

Prompts are passages of calib/conversations.jsonl, lengths for a model length of 2,048 tokens.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CONVERSATIONS = Path(__file__).parents[1] / "calib" / "conversations.jsonl"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Client:
    """Sends one request after the other, each of a kind drawn at random."""

    url: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    """What came of the requests."""
    trouble: list[str] = field(default_factory=list)
    """What should not have."""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._http = httpx.Client(base_url=self.url, timeout=120)
        said = map(json.loads, CONVERSATIONS.read_text().splitlines())
        english = (conversation["messages"] for conversation in said if conversation["language"] == "en")
        self._text = " ".join(message["content"] for messages in english for message in messages)
        self._kinds: list[tuple[int, Callable[[], str]]] = [
            (4, self.whole),
            (4, self.stream),
            (2, self.long_prompt),
            (4, self.shared_prefix),
            (2, self.choices),
            (2, self.texts),
            (3, self.leave_reading),
            (3, self.leave_waiting),
            (1, self.deadline),
            (3, self.refused),
            (1, self.tokens),
        ]

    def many(self, over: threading.Event) -> None:
        """Requests until `over`."""
        while not over.is_set():
            [kind] = self._draw.choices([kind for _, kind in self._kinds], [weight for weight, _ in self._kinds])
            try:
                self.counts[kind()] += 1
            except Exception as error:  # noqa: BLE001 (whatever a client meets is a finding)
                self.trouble.append(f"{type(error).__name__}: {error}"[:500])
        self._http.close()

    def begin(self) -> None:
        """What a server remembers from its first time: words, in its tokenizer's caches, and each kind of request.

        Each thread that tokenizes has a cache of its own; bare prompts and conversations may go through different ones.
        """
        for start in range(0, len(self._text), 8000):
            part = self._text[start : start + 8000]
            self._post("/tokenize", prompt=part)
            for _ in range(4):
                self._post("/tokenize", messages=self._said(part))
        for _, kind in self._kinds:
            self.counts[kind()] += 1
        self._http.close()

    def whole(self) -> str:
        """A short prompt with parameters of all sorts, answered in one piece."""
        answer = self._post(CHAT, messages=self._said(self._words(5, 60)), **self._sampling(64))
        [choice] = answer["choices"]
        self._expect(choice["finish_reason"] in ("stop", "length") and choice["message"]["role"] == "assistant", answer)
        return "whole"

    def stream(self) -> str:
        """The same as a stream."""
        events = list(self._events(messages=self._said(self._words(5, 60)), **self._sampling(64)))
        self._expect(events[-1] == "[DONE]" and '"finish_reason":"' in events[-2], events)
        return "streamed"

    def long_prompt(self) -> str:
        """Prompts of several chunks."""
        answer = self._post(TEXT, prompt=self._words(400, 900), max_tokens=self._draw.randint(1, 24), ignore_eos=True)
        self._expect(answer["usage"]["prompt_tokens"] > 300, answer)
        return "long prompt"

    def shared_prefix(self) -> str:
        """One of a few long instructions, then a question of its own."""
        system = self._text[(start := 5000 * self._draw.randrange(4)) : start + 2000]
        messages = [{"role": "system", "content": system}, *self._said(self._words(3, 12))]
        self._post(CHAT, messages=messages, **self._sampling(24))
        return "shared prefix"

    def choices(self) -> str:
        """Several choices with log probabilities and stop strings."""
        n, top = self._draw.randint(2, 5), self._draw.randint(0, 8)
        body = {
            "n": n,
            "logprobs": True,
            "top_logprobs": top,
            "stop": [". ", "\n"],
            "max_tokens": 32,
            "temperature": 1.0,
        }
        answer = self._post(CHAT, messages=self._said(self._words(5, 40)), **body)
        shown = [
            choice["logprobs"] for choice in answer["choices"] if choice["logprobs"]
        ]  # null where nothing is shown
        tops = {len(token["top_logprobs"]) for logprobs in shown for token in logprobs["content"]}
        self._expect(len(answer["choices"]) == n and tops <= {top}, answer)
        return "several choices"

    def texts(self) -> str:
        """Several prompts in one request, as ids, with their text and log probabilities."""
        prompts = [[self._draw.randrange(100, 1000) for _ in range(self._draw.randint(1, 40))] for _ in range(3)]
        answer = self._post(TEXT, prompt=prompts, max_tokens=8, logprobs=3, seed=self._draw.randrange(1 << 30))
        self._expect([choice["index"] for choice in answer["choices"]] == [0, 1, 2], answer)
        return "several texts"

    def leave_reading(self) -> str:
        """Leaves in the middle of a stream."""
        events = self._events(messages=self._said(self._words(5, 200)), max_tokens=400, ignore_eos=True)
        for _ in itertools.islice(events, self._draw.randint(0, 12)):
            pass
        events.close()
        return "left reading"

    def leave_waiting(self) -> str:
        """Leaves before an answer can be there, or just as it comes."""
        body = {"prompt": self._words(5, 300), "max_tokens": 400, "ignore_eos": True, "n": self._draw.randint(1, 4)}
        try:
            answer = self._http.post(TEXT, json=body, timeout=httpx.Timeout(60, read=self._draw.uniform(0.01, 0.5)))
        except httpx.ReadTimeout:
            return "left waiting"
        self._expect(answer.status_code == 200, answer.text)
        return "did not leave"

    def deadline(self) -> str:
        """A request that may not wait."""
        body = {"prompt": self._words(5, 60), "max_tokens": 8, "deadline_ms": self._draw.uniform(1, 200)}
        status = self._http.post(TEXT, json=body).status_code
        self._expect(status in (200, 504), status)
        return "too late" if status == 504 else "in time"

    def refused(self) -> str:
        """What no server of this API takes."""
        messages = self._said("Hello")
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strange"}}}
        path, body, status = self._draw.choice(
            [
                (CHAT, b'{"messages": [', 400),
                (CHAT, b"\xff\xfe" * self._draw.randint(1, 5000), 400),
                (CHAT, {"messages": "Hello"}, 400),
                (CHAT, {"messages": messages, "temperature": "warm"}, 400),
                (CHAT, {"messages": messages, "max_tokens": -1}, 400),
                (CHAT, {"messages": messages, "n": 10**6}, 400),
                (CHAT, {"messages": messages, "temprature": 1}, 400),
                (CHAT, {"messages": messages, "model": "another"}, 404),
                (CHAT, {"messages": messages, "response_format": schema}, 400),
                (CHAT, {"messages": self._said(self._text[:200_000])}, 400),
                (TEXT, {"prompt": [10**9]}, 400),
                (TEXT, {"prompt": "Hello", "max_tokens": 10**6}, 400),
                (TEXT, {"prompt": "x " * 3_000_000}, 413),
                ("/v1/nothing", {}, 404),
            ]
        )
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self._http.post(path, content=data, headers={"content-type": "application/json"})
        self._expect(answer.status_code == status and answer.json()["error"]["message"], (answer.text, status))
        return "refused"

    def tokens(self) -> str:
        """To ids and back."""
        prompt = self._words(5, 200)
        ids = self._post("/tokenize", prompt=prompt)["tokens"]
        self._expect(prompt in self._post("/detokenize", tokens=ids)["prompt"], prompt)
        return "tokenized"

    def _words(self, least: int, most: int) -> str:
        """A passage of about so many words."""
        size = 6 * self._draw.randint(least, most)
        return self._text[(start := self._draw.randrange(len(self._text) - size)) : start + size]

    @staticmethod
    def _said(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def _sampling(self, tokens: int) -> dict[str, Any]:
        draw = self._draw
        some = {
            "temperature": draw.choice([0, 0.7, 1.3]),
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "seed": draw.randrange(1 << 30),
            "logit_bias": {str(draw.randrange(1000)): 5},
            "priority": draw.randint(-2, 2),
            "cache_salt": draw.choice(["a", "b"]),
            "stop": ["\n\n"],
        }
        return {key: some[key] for key in draw.sample(list(some), 4)} | {"max_tokens": draw.randint(1, tokens)}

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        self._expect(answer.status_code == 200, answer.text)
        return answer.json()

    def _events(self, **body: Any) -> Generator[str]:
        with self._http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
            self._expect(answer.status_code == 200, answer.status_code)
            yield from (line.removeprefix("data: ") for line in answer.iter_lines() if line)

    @staticmethod
    def _expect(holds: object, seen: object) -> None:
        if not holds:
            raise RuntimeError(f"not as asked: {str(seen)[:400]}")
