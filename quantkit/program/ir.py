"""The Program: a model as a list of ops over named values. Plain data, JSON, printable, verifiable.

Shapes are tuples of integers and symbols: `T` tokens of the step (all sequences flattened), `B` sequences,
`R` rows whose logits are wanted. Activations are float32 on the reference and CPU backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.models.spec import Part, RopeSpec
from quantkit_kernels.cache_formats import CACHE_FORMATS

Dim = int | str
Attr = int | float | str | bool | None


@dataclass(frozen=True)
class Value:
    """An activation or a step input: shape in symbols, dtype `float32` or `int32`."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str = "float32"
    buffer: int | None = None
    """Index of the reusable buffer it lives in, set by the buffer plan."""


@dataclass(frozen=True)
class Weight:
    """A constant a node reads: rows of source tensors, concatenated in order.

    kind: `matrix` `[N, K]` (may be quantized), `table` `[V, H]` (embedding, source type), `vector` `[N]`
    (norms, biases; float32 when bound), `scales` (KV scales, float32, made by the build, no parts).
    `group` names the decision unit (`layers.0.qkv`) for matrices.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    scheme: str = "FP16"
    group: str | None = None


@dataclass(frozen=True)
class Node:
    """One op: `outputs = op(inputs) {attrs, weights}`; `weights` maps the op's roles to weight names."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    layer: int | None = None


@dataclass(frozen=True)
class KVLayer:
    """One layer's share of the paged cache. `format`: a name of `quantkit_kernels.cache_formats.CACHE_FORMATS`."""

    num_kv_heads: int
    head_dim: int
    format: str = "FP32"
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in the layer."""
        return 2 * self.num_kv_heads * CACHE_FORMATS[self.format].cell_bytes(self.head_dim)


@dataclass(frozen=True)
class Program:
    """A model ready to verify, transform, store and execute. Passes are functions Program -> Program."""

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    weights: Mapping[str, Weight]
    nodes: tuple[Node, ...]
    kv: tuple[KVLayer, ...]
    ropes: Mapping[str, RopeSpec]
    source_dtype: str = "float16"
    passes: tuple[str, ...] = ()

    def with_(self, **changes: Any) -> Program:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.kv)

    @property
    def compute(self) -> str:
        """`int8` where any product is taken in integers, else `exact`."""
        return "int8" if any(node.attrs.get("compute") == "int8" for node in self.nodes) else "exact"

    def groups(self) -> dict[str, Weight]:
        """The decision units: group name -> its matrix, in program order."""
        used = [name for node in self.nodes for name in node.weights.values()]
        return {w.group: w for w in (self.weights[n] for n in used) if w.kind == "matrix" and w.group is not None}
