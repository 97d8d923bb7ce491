"""Program <-> JSON. Reading trusts nothing: every field is checked for type, then the whole is verified."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TypeVar, get_args

import numpy as np

from quantkit.errors import CheckpointError
from quantkit.models.rope import cos_sin
from quantkit.models.spec import Part, RopeKind, RopeSpec
from quantkit.program.ir import KVLayer, Node, Program, Value, Weight
from quantkit.program.verify import verify

FORMAT = 1
"""Major version of the JSON form."""

T = TypeVar("T")


def program_to_json(program: Program) -> str:
    """Canonical JSON: one line a node, value and weight, keys sorted, so that equal programs are equal bytes."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "family": program.family,
        "vocab_size": program.vocab_size,
        "hidden_size": program.hidden_size,
        "max_position": program.max_position,
        "source_dtype": program.source_dtype,
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "passes": list(program.passes),
        "ropes": {name: asdict(rope) for name, rope in program.ropes.items()},
    }
    lists = {
        "kv": [asdict(kv) for kv in program.kv],
        "values": [asdict(value) for value in program.values.values()],
        "weights": [asdict(weight) for weight in program.weights.values()],
        "nodes": [asdict(node) for node in program.nodes],
    }
    lines = [f" {json.dumps(key)}: {_compact(value)}" for key, value in body.items()]
    for key, items in lists.items():
        lines.append(f" {json.dumps(key)}: [\n" + ",\n".join("  " + _compact(item) for item in items) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def program_from_json(text: str, where: str = "program.json") -> Program:
    """The program in `text`, verified; CheckpointError names what is wrong and where."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a program of format {FORMAT}")
        program = _program(data)
    except RecursionError:
        raise CheckpointError("nested too deeply", where=where) from None
    except (KeyError, TypeError, ValueError) as error:
        problem = f"missing field {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(problem, where=where) from None
    verify(program, where)
    return program


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key appears twice")
    return made


def _is(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{what} is {str(value)[:40]!r}, not {getattr(kind, '__name__', kind)}")
    return value


def _strings(value: Any, what: str) -> tuple[str, ...]:
    return tuple(_is(item, str, what) for item in _is(value, list, what))


def _maybe_int(value: Any, what: str) -> int | None:
    return None if value is None else _is(value, int, what)


def _program(data: dict[str, Any]) -> Program:
    values = [_value(_is(item, dict, "value")) for item in _is(data["values"], list, "values")]
    weights = [_weight(_is(item, dict, "weight")) for item in _is(data["weights"], list, "weights")]
    if len({v.name for v in values}) != len(values) or len({w.name for w in weights}) != len(weights):
        raise ValueError("a value or weight is declared twice")
    kv = tuple(_kv(_is(item, dict, "kv")) for item in _is(data["kv"], list, "kv"))
    if not kv:
        raise ValueError("the program has no layers")
    return Program(
        family=_is(data["family"], str, "family"),
        vocab_size=_is(data["vocab_size"], int, "vocab_size"),
        hidden_size=_is(data["hidden_size"], int, "hidden_size"),
        max_position=_is(data["max_position"], int, "max_position"),
        inputs=_strings(data["inputs"], "inputs"),
        outputs=_strings(data["outputs"], "outputs"),
        values={value.name: value for value in values},
        weights={weight.name: weight for weight in weights},
        nodes=tuple(_node(_is(item, dict, "node")) for item in _is(data["nodes"], list, "nodes")),
        kv=kv,
        ropes={name: _rope(_is(item, dict, "rope")) for name, item in _is(data["ropes"], dict, "ropes").items()},
        source_dtype=_dtype(data["source_dtype"]),
        passes=_strings(data["passes"], "passes"),
    )


def _dtype(value: Any) -> str:
    if value not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"unknown source dtype {str(value)[:40]!r}")
    return str(value)


def _value(data: dict[str, Any]) -> Value:
    shape = tuple(_is(dim, int | str, "shape") for dim in _is(data["shape"], list, "shape"))  # type: ignore[arg-type]
    buffer = _maybe_int(data["buffer"], "buffer")
    if buffer is not None and not 0 <= buffer < 4096:
        raise ValueError(f"buffer {buffer} is out of range")
    return Value(_is(data["name"], str, "name"), shape, _is(data["dtype"], str, "dtype"), buffer)


def _weight(data: dict[str, Any]) -> Weight:
    parts = tuple(
        Part(_is(p["tensor"], str, "tensor"), _is(p["start"], int, "start"), _is(p["stop"], int, "stop"))
        for p in _is(data["parts"], list, "parts")
    )
    return Weight(
        _is(data["name"], str, "name"),
        _is(data["kind"], str, "kind"),
        tuple(_is(dim, int, "shape") for dim in _is(data["shape"], list, "shape")),
        parts,
        _is(data["scheme"], str, "scheme"),
        None if data["group"] is None else _is(data["group"], str, "group"),
    )


def _node(data: dict[str, Any]) -> Node:
    weights = _is(data["weights"], dict, "weights")
    op = _is(data["op"], str, "op")
    earlier = {"compute": "exact"} if op in ("linear", "logits") else {}  # all there was before there was a choice
    return Node(
        op,
        _is(data["name"], str, "name"),
        _strings(data["inputs"], "inputs"),
        _strings(data["outputs"], "outputs"),
        earlier | _is(data["attrs"], dict, "attrs"),
        {role: _is(name, str, "weight") for role, name in weights.items()},
        _maybe_int(data["layer"], "layer"),
    )


def _kv(data: dict[str, Any]) -> KVLayer:
    return KVLayer(
        _is(data["num_kv_heads"], int, "num_kv_heads"),
        _is(data["head_dim"], int, "head_dim"),
        _is(data["format"], str, "format"),
        _maybe_int(data["window"], "window"),
    )


def _rope(data: dict[str, Any]) -> RopeSpec:
    if data["kind"] not in get_args(RopeKind):
        raise ValueError(f"unknown rope kind {str(data['kind'])[:40]!r}")
    theta = data["theta"]
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < 1e15:
        raise ValueError(f"rope theta {theta!r} is out of range")
    rotary_dim, params = _is(data["rotary_dim"], int, "rotary_dim"), _is(data["params"], dict, "params")
    if not 2 <= rotary_dim <= 1024 or rotary_dim % 2:
        raise ValueError(f"rope dimension {rotary_dim} is out of range")
    spec = RopeSpec(data["kind"], float(theta), rotary_dim, params)
    try:
        finite = all(np.isfinite(table).all() for table in cos_sin(spec, 2))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"rope parameters of kind {spec.kind} do not fit: {error!r}") from None
    if not finite:
        raise ValueError(f"rope parameters of kind {spec.kind} give no finite table")
    return spec
