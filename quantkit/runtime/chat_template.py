"""Chat templates, rendered as Transformers renders them, in Jinja's immutable sandbox and within a work limit.

A template comes with the checkpoint and is not trusted: no attribute of a Python object is reachable, nothing passed in
can be changed, and loops over ranges, repetition and powers are bounded. Whatever goes wrong is a RequestError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from quantkit.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

MAX_ITERATIONS = 200_000
"""Steps that one rendering's ranges may make in all."""
MAX_LENGTH = 1 << 24
"""Characters of a rendered chat, and items of anything a template builds by repetition."""

_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class ChatTemplate:
    """One compiled template. `variables` (special tokens) are seen by every rendering."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        try:
            self._template = _Environment().from_string(source)
        except _FAILURES as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the model reads it.

        Args:
            messages: {"role", "content", ...} in order; keys whose value is None are dropped.
            add_generation_prompt: end with the header of the assistant's next turn.
            kwargs: whatever else the template takes (`tools`, `documents`, `enable_thinking`).

        Raises:
            RequestError: the template refuses the conversation, fails, or does more than it may.
        """
        values = {"tools": None, "documents": None, **self._variables, **kwargs}
        values |= {"messages": [_message(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        try:
            pieces, length = [], 0
            for piece in self._template.generate(**values, range=_bounded_range()):
                length += len(piece)
                if length > MAX_LENGTH:
                    raise SecurityError(f"it wrote more than {MAX_LENGTH} characters")
                pieces.append(piece)
        except _FAILURES as error:
            raise RequestError(f"the chat template refused the conversation: {error}") from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplication and powers, refused where they would build something huge."""
        if operator == "**" and not (abs(left) <= MAX_LENGTH and abs(right) <= 64):
            raise SecurityError("a power too large for a chat template")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * count > MAX_LENGTH:
                    raise SecurityError("a repetition too long for a chat template")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; rendering shows what it holds."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own protocol)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bounded_range() -> Any:
    left = MAX_ITERATIONS

    def bounded(*args: int) -> Iterator[int] | range:
        nonlocal left
        numbers = range(*args)
        left -= max(1, len(numbers))
        if left < 0:
            raise SecurityError(f"its ranges make more than {MAX_ITERATIONS} steps")
        return numbers

    return bounded


def _message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be an object with a role and content, got {type(message).__name__}")
    return {key: value for key, value in message.items() if value is not None}


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
