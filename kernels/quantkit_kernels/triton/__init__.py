"""Triton kernels, one file each; every file exports its `SPECS`.

Importing this package imports no Triton: `kernels()` does.
"""

from __future__ import annotations

from quantkit_kernels.triton.spec import Fact, Facts, KernelSpec, Signature


def kernels() -> dict[str, KernelSpec]:
    """Every kernel by name, in the order in which their specs are asked; ModuleNotFoundError without triton."""
    from quantkit_kernels.triton import linear_w4a16, linear_w8a16  # by name, so that a build sees what it depends on

    return {spec.name: spec for file in (linear_w4a16, linear_w8a16) for spec in file.SPECS}


__all__ = ["Fact", "Facts", "KernelSpec", "Signature", "kernels"]
