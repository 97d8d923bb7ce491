"""Where things lie in an artifact, and which tensors its checkpoint holds for a Program.

Writer and reader share this plan, so that what is written and what is demanded cannot drift apart. A quantized matrix
is stored per source tensor under compressed-tensors' `pack-quantized` names: `X.weight_packed`, `X.weight_scale`,
`X.weight_shape` and, for asymmetric schemes, `X.weight_zero_point` (packed down the rows).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantkit.errors import CheckpointError
from quantkit.formats.integer import group_count
from quantkit.formats.packing import words
from quantkit.formats.schemes import Scheme, scheme
from quantkit.models.safetensors_header import ARRAY_TYPES
from quantkit.models.spec import Part
from quantkit.program.ir import Program, Weight

MANIFEST = "quantkit/manifest.json"
PROGRAM = "quantkit/program.json"
KV_SCALES = "quantkit/kv_scales.safetensors"
BUCKETS = "quantkit/buckets.json"
KERNELS = "quantkit/kernels"
"""A folder a target, of kernels compiled ahead of time."""
CHECKPOINT = "model.safetensors"
INDEX = "model.safetensors.index.json"
EVIDENCE = "evidence"
"""The folder outside the seal."""

_KERNEL_FILE = re.compile(
    rf"{KERNELS}/sm_[1-9][0-9]{{1,2}}/(index\.json|[a-z0-9_]{{1,80}}-[0-9a-f]{{16}}\.(cubin|ptx|json))"
)

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def is_own_file(name: str) -> bool:
    """Whether an artifact may hold a file of that relative path under `quantkit/`."""
    return name in (MANIFEST, PROGRAM, KV_SCALES, BUCKETS) or _KERNEL_FILE.fullmatch(name) is not None


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the checkpoint: `dtype` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        count = ARRAY_TYPES[self.dtype].itemsize
        for dim in self.shape:
            count *= dim
        return count


def module_of(tensor: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> the module's name; CheckpointError for another suffix."""
    if not tensor.endswith(".weight"):
        raise CheckpointError("only a `.weight` tensor can be stored quantized", where=tensor)
    return tensor.removesuffix(".weight")


def tied_tables(program: Program) -> frozenset[str]:
    """Source tensors stored as an embedding table."""
    return frozenset(p.tensor for weight in program.weights.values() if weight.kind == "table" for p in weight.parts)


def is_derived(weight: Weight, tables: frozenset[str]) -> bool:
    """Whether the weight is made from an embedding table at load instead of being stored (a tied head)."""
    return weight.kind == "matrix" and all(part.tensor in tables for part in weight.parts)


def packed_plan(part: Part, columns: int, how: Scheme, scale_dtype: str) -> list[TensorPlan]:
    """The tensors that hold rows 0..part.stop of one quantized source tensor `[N, columns]`."""
    if part.start != 0:
        raise CheckpointError("a quantized group must hold whole tensors", where=part.tensor, next="Store it as FP16")
    module, rows, groups = module_of(part.tensor), part.stop, group_count(columns, how.group_size, where=part.tensor)
    plans = [
        TensorPlan(f"{module}.weight_packed", "I32", (rows, words(columns, how.bits))),
        TensorPlan(f"{module}.weight_scale", scale_dtype, (rows, groups)),
        TensorPlan(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not how.symmetric:
        plans.append(TensorPlan(f"{module}.weight_zero_point", "I32", (words(rows, how.bits), groups)))
    return plans


def plan_checkpoint(program: Program, dtype_of: Callable[[str], str]) -> dict[str, TensorPlan]:
    """Every tensor of the checkpoint by name, in program order; `dtype_of(tensor)` is a float tensor's stored type.

    Scales are stored in the source's 16-bit type (BF16 for a float32 source).
    """
    tables = tied_tables(program)
    scale_dtype = scale_type(program)
    plans: dict[str, TensorPlan] = {}
    for weight in program.weights.values():
        if weight.kind == "scales" or is_derived(weight, tables):
            continue
        how = scheme(weight.scheme)
        for part in weight.parts:
            if how.quantized:
                planned = packed_plan(part, weight.shape[1], how, scale_dtype)
            else:
                known = plans.get(part.tensor)
                rows = max(part.stop, known.shape[0] if known else 0)
                planned = [TensorPlan(part.tensor, dtype_of(part.tensor), (rows, *weight.shape[1:]))]
            for plan in planned:
                if how.quantized and plan.name in plans:
                    raise CheckpointError("two groups hold this tensor", where=plan.name)
                plans[plan.name] = plan
    _check_derived(program, tables, plans)
    return plans


def _check_derived(program: Program, tables: frozenset[str], plans: Mapping[str, TensorPlan]) -> None:
    """A derived weight must lie within its table."""
    for weight in program.weights.values():
        if is_derived(weight, tables):
            for part in weight.parts:
                rows, columns = plans[part.tensor].shape
                if part.stop > rows or weight.shape[1] != columns:
                    raise CheckpointError(
                        f"does not fit the table {[rows, columns]} it is made from", where=weight.name
                    )


def plan_kv_scales(program: Program) -> dict[str, TensorPlan]:
    """The KV scales by weight name, float32 `[Hkv, D]`; empty when the cache has none."""
    return {w.name: TensorPlan(w.name, "F32", w.shape) for w in program.weights.values() if w.kind == "scales"}


def scale_type(program: Program) -> str:
    """safetensors type of weight scales."""
    return "F16" if program.source_dtype == "float16" else "BF16"


def quantization_config(program: Program) -> dict[str, object] | None:
    """config.json's `quantization_config`: compressed-tensors, one config group a scheme, exact module names.

    None when nothing in the checkpoint is quantized. A quantized KV cache is not mentioned: other engines would
    refuse or ignore ours (ARCHITECTURE, the artifact). A tied head is listed under `ignore`: it is stored as the table.

    Transformers 5.24 with compressed-tensors 0.20 opens symmetric schemes, mixed or not, as they are; with
    `dequantize=True` it applies the first group's scheme to every module, so only uniform artifacts open that way, and
    asymmetric groups (whose packed zero points it sizes wrongly otherwise) only so.
    """
    tables = tied_tables(program)
    targets: dict[str, list[str]] = {}
    ignore: list[str] = []
    for weight in program.weights.values():
        if weight.kind != "matrix":
            continue
        if is_derived(weight, tables):
            ignore.append("lm_head")
        elif scheme(weight.scheme).quantized:
            targets.setdefault(weight.scheme, []).extend(module_of(part.tensor) for part in weight.parts)
        else:
            ignore.extend(part.tensor.removesuffix(".weight") for part in weight.parts)
    if not targets:
        return None
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": sorted(set(ignore)),
        "config_groups": {
            f"group_{index}": {
                "targets": targets[name],
                "weights": _arguments(scheme(name)),
                "format": "pack-quantized",
            }
            for index, name in enumerate(sorted(targets))
        },
    }


def _arguments(how: Scheme) -> Mapping[str, object]:
    """compressed-tensors' QuantizationArgs."""
    return {
        "num_bits": how.bits,
        "type": "int",
        "symmetric": how.symmetric,
        "strategy": "group" if how.group_size else "channel",
        "group_size": how.group_size or None,
        "dynamic": False,
    }
