"""Verify a Program: names, shapes, dtypes, order of definition. Run after every pass and on every loaded file."""

from __future__ import annotations

import math

from quantkit.errors import CheckpointError
from quantkit.formats.schemes import SCHEMES
from quantkit.program.build import STEP_INPUTS
from quantkit.program.ir import Node, Program, Weight
from quantkit.program.memory_check import check_buffers
from quantkit.program.ops import OPS, ShapeError
from quantkit_kernels.cache_formats import CACHE_FORMATS

_KIND_RANK = {"matrix": 2, "table": 2, "vector": 1, "scales": 2}
_MAX_DIM = 1 << 24


def verify(program: Program, where: str = "program") -> None:
    """Raise CheckpointError, naming the node, unless every op gets what its signature asks for.

    A slice of a program (see `slices`) is verified like a whole one: its inputs are then also activations.
    """
    try:
        _sizes(program)
        for weight in program.weights.values():
            _weight(weight)
        defined = _inputs(program)
        for node in program.nodes:
            try:
                _node(node, program, defined)
            except ShapeError as error:
                raise ShapeError(f"node {node.name!r} ({node.op}): {error}") from None
        for name in program.outputs:
            if name not in defined:
                raise ShapeError(f"output {name!r} is never computed")
        check_buffers(program)
    except ShapeError as error:
        raise CheckpointError(str(error), where=where) from None


def _sizes(program: Program) -> None:
    for name, size in (("vocab_size", program.vocab_size), ("hidden_size", program.hidden_size)):
        if not 0 < size <= _MAX_DIM:
            raise ShapeError(f"{name} {size} is out of range")
    if not 0 < program.max_position <= 1 << 31:
        raise ShapeError(f"max_position {program.max_position} is out of range")
    for i, kv in enumerate(program.kv):
        if kv.format not in CACHE_FORMATS:
            raise ShapeError(f"layer {i}: unknown KV format {kv.format!r}")
        if not (0 < kv.num_kv_heads <= _MAX_DIM and 0 < kv.head_dim <= 1024):
            raise ShapeError(f"layer {i}: {kv.num_kv_heads} KV heads of {kv.head_dim} are out of range")
        try:
            CACHE_FORMATS[kv.format].cell(kv.head_dim)
        except ValueError as error:
            raise ShapeError(f"layer {i}: {error}") from None
        if kv.window is not None and kv.window <= 0:
            raise ShapeError(f"layer {i}: window {kv.window} must be positive")
    for name, value in program.values.items():
        if name != value.name:
            raise ShapeError(f"value {value.name!r} is filed under {name!r}")
        if any(isinstance(dim, int) and not 0 < dim <= _MAX_DIM for dim in value.shape):
            raise ShapeError(f"value {name!r} has shape {list(value.shape)}")


def _weight(weight: Weight) -> None:
    if weight.kind not in _KIND_RANK or len(weight.shape) != _KIND_RANK[weight.kind]:
        raise ShapeError(f"weight {weight.name!r}: kind {weight.kind!r} with shape {list(weight.shape)}")
    if any(not 0 < size <= _MAX_DIM for size in weight.shape):
        raise ShapeError(f"weight {weight.name!r}: shape {list(weight.shape)} is out of range")
    if weight.scheme not in SCHEMES:
        raise ShapeError(f"weight {weight.name!r}: unknown scheme {weight.scheme!r}")
    scheme = SCHEMES[weight.scheme]
    if scheme.quantized and weight.kind != "matrix":
        raise ShapeError(f"weight {weight.name!r}: a {weight.kind} cannot be {weight.scheme}")
    if scheme.group_size and weight.shape[1] % scheme.group_size:
        raise ShapeError(f"weight {weight.name!r}: group {scheme.group_size} does not divide {weight.shape[1]}")
    if weight.kind == "scales":
        return
    if any(part.start < 0 or part.stop <= part.start for part in weight.parts):
        raise ShapeError(f"weight {weight.name!r}: a part's rows are out of order")
    if sum(part.stop - part.start for part in weight.parts) != weight.shape[0]:
        raise ShapeError(f"weight {weight.name!r}: its parts do not add up to {weight.shape[0]} rows")


def _inputs(program: Program) -> set[str]:
    for name in program.inputs:
        value = program.values.get(name)
        if value is None:
            raise ShapeError(f"input {name!r} is not declared")
        expected = (STEP_INPUTS[name], "int32") if name in STEP_INPUTS else (value.shape, "float32")
        if (value.shape, value.dtype) != expected:
            raise ShapeError(f"input {name!r} is {value.dtype} {list(value.shape)}")
        if name not in STEP_INPUTS and (len(value.shape) != 2 or value.shape[0] != "T"):
            raise ShapeError(f"input {name!r} is {list(value.shape)}, not [T, n]")
    return set(program.inputs)


def _node(node: Node, program: Program, defined: set[str]) -> None:
    schema = OPS.get(node.op)
    if schema is None:
        raise ShapeError("unknown op")
    if len(node.inputs) != len(schema.inputs):
        raise ShapeError(f"takes {len(schema.inputs)} inputs, has {len(node.inputs)}")
    if set(node.attrs) != set(schema.attrs):
        raise ShapeError(f"attributes {sorted(node.attrs)} instead of {sorted(schema.attrs)}")
    for name, types in schema.attrs.items():
        value = node.attrs[name]
        if not isinstance(value, types) or isinstance(value, bool):
            raise ShapeError(f"{name} is {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ShapeError(f"{name} is not finite")
    missing = {role for role, required in schema.weights.items() if required} - set(node.weights)
    unknown = set(node.weights) - set(schema.weights)
    if missing or unknown:
        raise ShapeError(f"weights {sorted(node.weights)} instead of {sorted(schema.weights)}")
    for name in node.weights.values():
        if name not in program.weights:
            raise ShapeError(f"weight {name!r} is not declared")
    for name in node.inputs:
        if name not in defined:
            raise ShapeError(f"reads {name!r} before it is computed")
    shapes = schema.infer(node, [program.values[name].shape for name in node.inputs], program)
    if len(shapes) != len(node.outputs):
        raise ShapeError(f"computes {len(shapes)} outputs, has {len(node.outputs)}")
    for name, shape in zip(node.outputs, shapes, strict=True):
        if name in defined:
            raise ShapeError(f"computes {name!r} a second time")
        value_ = program.values.get(name)
        expected = "state" if shape == () else "float32"
        if value_ is None or value_.shape != shape or value_.dtype != expected:
            raise ShapeError(f"output {name!r} should be {expected} {list(shape)}")
        defined.add(name)
