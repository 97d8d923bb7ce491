"""Triton kernels, one file each; every file exports its `SPECS`.

Importing this package imports no Triton: `kernels()` does, and asks for it by name where it is missing.
"""

from __future__ import annotations

from importlib import import_module

from quantkit_kernels.triton.spec import Fact, Facts, KernelSpec, Signature

FILES = ("linear_w4a16", "linear_w8a16")
"""The kernel files of this package, in the order in which their specs are asked."""


def kernels() -> dict[str, KernelSpec]:
    """Every kernel by name, in order; raises ModuleNotFoundError where triton is not installed."""
    specs = [spec for file in FILES for spec in import_module(f"{__name__}.{file}").SPECS]
    return {spec.name: spec for spec in specs}


__all__ = ["Fact", "Facts", "KernelSpec", "Signature", "kernels"]
