"""Compile one Triton kernel for a GPU that is not there, exactly as it would be compiled on the spot.

`JITFunction.warmup` under a stand-in for the driver specialises the kernel as a launch would; building the compiler's
input by hand does not. Runs in a process of its own (`quantkit.compile.worker`), whose environment `ENVIRONMENT` makes
the bytes independent of the checkout's path and of Triton's changing defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.compile.resources import resource_usage
from quantkit.compile.targets import SHARED_BYTES, capability, ptx_target
from quantkit.errors import PreflightError
from quantkit_kernels.cuda.arguments import CONVENTION, SCRATCH
from quantkit_kernels.cuda.source import source_digest
from quantkit_kernels.triton import Facts, KernelSpec

ENVIRONMENT = {
    "TRITON_DISABLE_LINE_INFO": "1",  # a cubin would hold the path of the kernel's file
    "TRITON_DEFAULT_FP_FUSION": "1",  # the default differs between releases, and is part of Triton's cache key
    "TRITON_INTERPRET": "0",
}
_FLOATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp8e4nv": "float8_e4m3fn"}
_POINTERS = {**_FLOATS, "i8": "int8", "u8": "uint8", "i32": "int32", "i64": "int64"}


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel for one target. `metadata`: what a launch needs to know, plain JSON data."""

    cubin: bytes
    ptx: str
    metadata: dict[str, Any]


class _Pointer:
    """Stands for a tensor in a launch: a type, and an address that is a multiple of 16."""

    def __init__(self, type_: str) -> None:
        self.dtype = f"torch.{_POINTERS[type_.removeprefix('*')]}"

    @staticmethod
    def data_ptr() -> int:
        return 0

    @staticmethod
    def ptr_range() -> int:
        return 0


class _Driver:
    """Stands for the CUDA driver of one target.

    Its device number is the target's own: Triton keeps kernels by device, and would hand a later target the first
    one's code.
    """

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability(target), 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernel(spec: KernelSpec, facts: Facts, target: str) -> Compiled:
    """Compile `spec` as the facts specialise it.

    PreflightError where the kernel needs more shared memory than the target has; RuntimeError where the code is not
    what was asked for.
    """
    from triton.runtime import driver

    how = spec.signature(facts)
    arguments = {name: _Pointer(v) if isinstance(v, str) else v for name, v in how.arguments.items()}
    unnamed = set(spec.function.arg_names) ^ (arguments.keys() | how.constants.keys())
    if unnamed:
        raise RuntimeError(f"{spec.name}: its signature and its function disagree about {sorted(unnamed)}")
    driver.set_active(_Driver(target))
    made = spec.function.warmup(
        **arguments, **how.constants, grid=(1,), num_warps=how.num_warps, num_stages=how.num_stages
    )
    ptx, cubin, facts_of = made.asm["ptx"], made.asm["cubin"], made.metadata
    signature = _arguments(made.src)
    _check_ptx(spec.name, ptx, target, len(signature))
    if facts_of.shared > SHARED_BYTES[target]:
        raise PreflightError(
            f"needs {facts_of.shared} bytes of shared memory and {target} has {SHARED_BYTES[target]}", where=spec.name
        )
    return Compiled(
        cubin,
        ptx,
        {
            "kernel": spec.name,
            "op": spec.op,
            "symbol": facts_of.name,
            "target": target,
            "arguments": signature,
            "folded": _folded(made.src, how.arguments),
            "constants": dict(how.constants),
            "convention": CONVENTION,
            "source": source_digest(spec.function.__module__),
            "num_warps": facts_of.num_warps,
            "num_ctas": facts_of.num_ctas,
            "shared_bytes": facts_of.shared,
            "tensor_memory_columns": getattr(facts_of, "tmem_size", None) or 0,
            "scratch_bytes": [facts_of.global_scratch_size, facts_of.profile_scratch_size],
            "versions": versions(target),
            **resource_usage(cubin),
        },
    )


def _arguments(source: Any) -> list[dict[str, Any]]:
    """What a launch passes, in order: every argument that is no constant, then the scratch pointers."""
    divisible = {path[0] for path, attributes in source.attrs.items() if ["tt.divisibility", 16] in attributes}
    passed = [
        {"name": name, "type": type_, "divisible_by": 16 if index in divisible else 1}
        for index, (name, type_) in enumerate(source.signature.items())
        if type_ != "constexpr"
    ]
    return passed + [{"name": name, "type": "*i8", "divisible_by": 1} for name in SCRATCH]


def _folded(source: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Numbers that Triton compiled in, as it does with an integer 1, by argument."""
    names = list(source.signature)
    constants = {names[path[0]]: value for path, value in source.constants.items()}
    return {name: value for name, value in constants.items() if name in arguments}


def _check_ptx(name: str, ptx: str, target: str, arguments: int) -> None:
    """The code is for that target, and takes as many arguments as the metadata says."""
    said = re.search(r"^\.target\s+([\w]+)", ptx, re.MULTILINE)
    if said is None or said[1] != ptx_target(target):
        raise RuntimeError(f"{name}: compiled for {said and said[1]} instead of {ptx_target(target)}")
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    taken = entry[1].count(".param") if entry else 0
    if taken != arguments:
        raise RuntimeError(f"{name}: takes {taken} arguments, its metadata lists {arguments}")


def versions(target: str) -> dict[str, str]:
    """Triton's version and that of the assembler it uses for the target."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    return {"triton": triton.__version__, "ptxas": get_ptxas(capability(target)).version}


def specialisation(spec: KernelSpec, facts: Facts) -> Mapping[str, Any]:
    """What of the facts decides the code, as JSON data: equal for two places in a model that can share a kernel."""
    how = spec.signature(facts)
    arguments = {name: v if isinstance(v, str) else _kind(v) for name, v in how.arguments.items()}
    return {
        "kernel": spec.name,
        "arguments": dict(sorted(arguments.items())),
        "constants": {name: repr(value) for name, value in sorted(how.constants.items())},
        "num_warps": how.num_warps,
        "num_stages": how.num_stages,
        "source": spec.function.cache_key,
    }


def _kind(value: int | float) -> str:
    """How Triton tells numbers apart: by type, width, being 1, and divisibility by 16."""
    if isinstance(value, float):
        return "float"
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    return f"{width} one" if value == 1 else f"{width} x16" if value % 16 == 0 else width
