"""Does a checkpoint hold exactly the tensors its config promises?

A tensor missing is a clear error, and so is one too many: a bias, a norm or an expert that no op reads would be dropped
silently, and the model would be wrong without a word.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from quantkit.errors import CheckpointError
from quantkit.models.reader import WeightReader
from quantkit.models.spec import DecoderSpec

if TYPE_CHECKING:
    import torch

_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Buffers some old checkpoints store though they follow from the config."""
_NAMES: dict[str, Literal["float32", "float16", "bfloat16"]] = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
}
_ROWS = 4096


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a checkpoint of `spec` must hold (the head's only when untied)."""
    names, hidden, inner = spec.names, spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        names.embed: (spec.vocab_size, hidden),
        names.final_norm: (hidden,),
    }
    if not spec.tied:
        shapes[names.head] = (spec.vocab_size, hidden)

    def linear(templates: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> None:
        sizes = rows if len(templates) == len(rows) else (sum(rows),)
        for template, size in zip(templates, sizes, strict=True):
            name = template.format(i=i)
            shapes[name] = (size, columns)
            if bias:
                shapes[name.removesuffix("weight") + "bias"] = (size,)

    for i in range(spec.num_layers):
        norms = (names.input_norm, names.mlp_norm, names.post_attention_norm, names.post_mlp_norm)
        shapes |= {name.format(i=i): (hidden,) for name in norms if name}
        if spec.qk_norm:
            shapes |= {name.format(i=i): (spec.head_dim,) for name in (names.q_norm, names.k_norm)}
        linear(names.qkv, (q, kv, kv), hidden, spec.qkv_bias)
        linear((names.o,), (hidden,), q, spec.o_bias)
        linear(names.gate_up, (inner, inner), hidden, spec.mlp_bias)
        linear((names.down,), (hidden,), inner, spec.mlp_bias)
    return shapes


def checked_spec(spec: DecoderSpec, reader: WeightReader) -> DecoderSpec:
    """`spec` with the type the matrices are really stored in, once the reader's tensors are known to be its own.

    Raises:
        CheckpointError: a tensor missing, of another shape or type, or one that the family does not have; a head that
            differs from the embedding it is said to be tied to. Names file and tensor.
    """
    where = str(reader.files[0].parent if len(reader.files) > 1 else reader.files[0])
    expected = expected_tensors(spec)
    present = set(reader.names())
    missing = [name for name in expected if name not in present]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "If the head is the embedding, config.json must say tie_word_embeddings: true"
        raise CheckpointError(
            f"tensor {missing[0]}{more} missing", where=where, next=hint if missing == [spec.names.head] else ""
        )
    dtypes: dict[torch.dtype, str] = {}
    for name, shape in expected.items():
        if reader.shape(name) != shape:
            raise CheckpointError(
                f"shape {reader.shape(name)}, but config.json makes it {shape}", where=f"{where}: {name}"
            )
        dtype = reader.dtype(name)
        if len(shape) == 2:
            dtypes.setdefault(dtype, name)
    if len(dtypes) > 1:
        kinds = " and ".join(f"{name} is {_NAMES[str(dtype)]}" for dtype, name in list(dtypes.items())[:2])
        raise CheckpointError(f"matrices differ in type: {kinds}", where=where, next="Save the checkpoint in one type")
    extra = [name for name in sorted(present - set(expected)) if not _DERIVED.search(name)]
    if spec.tied and spec.names.head in extra:
        extra.remove(spec.names.head)
        _check_tied(spec, reader, where)
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"tensor {extra[0]}{more} belongs to no part of a {spec.family} model as config.json describes it",
            where=where,
        )
    return replace(spec, dtype=_NAMES[str(next(iter(dtypes)))])


def _check_tied(spec: DecoderSpec, reader: WeightReader, where: str) -> None:
    """A stored head must equal the embedding when the config ties them (Transformers would leave them untied)."""
    import torch

    embed, head = spec.names.embed, spec.names.head
    same = reader.shape(head) == reader.shape(embed) and reader.dtype(head) == reader.dtype(embed)
    for start in range(0, spec.vocab_size, _ROWS):
        if not same:
            break
        stop = min(start + _ROWS, spec.vocab_size)
        same = torch.equal(reader.read(head, start, stop), reader.read(embed, start, stop))
    if not same:
        raise CheckpointError(
            f"tie_word_embeddings is true, but {head} differs from {embed}",
            where=where,
            next="Set tie_word_embeddings to false in config.json, or remove the stale head",
        )
