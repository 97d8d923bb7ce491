"""Chat templates, rendered as Transformers renders them, in Jinja's immutable sandbox and within a work limit.

A template comes with the checkpoint and is not trusted: no attribute of a Python object is reachable, nothing passed in
can be changed, every turn of a loop and every call is counted, and what grows by adding or multiplying is bounded.
Whatever goes wrong is a RequestError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from quantkit.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

MAX_ITERATIONS = 200_000
"""Steps that one rendering's ranges may make in all."""
MAX_STEPS = 2_000_000
"""Turns of loops and calls in one rendering."""
MAX_SECONDS = 2.0
"""Processor time that one rendering may take, looked at every so many steps."""
_LOOK = 16
MAX_BITS = 4096
"""Of a product of integers."""
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
        _WORK.set(_Work())
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
            reason = str(error) or type(error).__name__
            raise RequestError(f"the chat template refused the conversation: {reason}") from error
        return "".join(pieces)


class _Work:
    """What one rendering has done, and may."""

    def __init__(self) -> None:
        self._left, self._end = MAX_STEPS, time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """One more; SecurityError when it is too much."""
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if self._left % _LOOK == 0 and time.thread_time() > self._end:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} s")


_WORK: ContextVar[_Work] = ContextVar("work")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        for name in ("batch", "slice", "urlize", "wordwrap"):  # no chat needs them, and a number makes them endless
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def turn(self) -> None:
        """What every turn of a loop calls, so that it is counted."""

    def concatenate(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        if sum(map(len, texts)) > MAX_LENGTH:
            raise SecurityError("a text too long for a chat template")
        return "".join(texts)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Any call a template makes, counted."""
        _WORK.get().step()
        if function == self.turn:
            return None
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str) and len(result) > MAX_LENGTH:
            raise SecurityError("a text too long for a chat template")
        return result

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Sums, products and powers, refused where they would build something huge."""
        if operator == "**" and not (abs(left) <= MAX_LENGTH and abs(right) <= 64):
            raise SecurityError("a power too large for a chat template")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * count > MAX_LENGTH:
                    raise SecurityError("a repetition too long for a chat template")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("a product too large for a chat template")
        sequences = isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple)
        if operator == "+" and sequences and len(left) + len(right) > MAX_LENGTH:
            raise SecurityError("a sum too long for a chat template")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree


class _Counted(jinja2.visitor.NodeTransformer):
    """Has loops call `turn` at every turn, and `~` be a call: calls are what the environment sees."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        """A loop."""
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_called("turn", []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        """A concatenation."""
        self.generic_visit(node)
        return _called("concatenate", node.nodes)


def _called(method: str, args: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(method), args, [], None, None)


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
