"""Passes, Program -> Program. `fuse` runs the structural ones in order and verifies after each."""

from collections.abc import Iterator

from quantkit.program.ir import Program
from quantkit.program.passes.fuse_add_norm import fuse_add_norm
from quantkit.program.passes.fuse_gated_act import fuse_gated_act
from quantkit.program.passes.fuse_linears import fuse_gate_up, fuse_qkv
from quantkit.program.passes.fuse_rope_kv_write import fuse_rope_kv_write
from quantkit.program.passes.lower_precision import lower_precision
from quantkit.program.passes.plan_buffers import buffer_widths, plan_buffers
from quantkit.program.verify import verify

STRUCTURAL = (fuse_qkv, fuse_gate_up, fuse_add_norm, fuse_rope_kv_write, fuse_gated_act)


def fuse(program: Program) -> Program:
    """The program with every structural pass applied, verified after each."""
    *_, (_, fused) = fuse_steps(program)
    return fused


def fuse_steps(program: Program) -> Iterator[tuple[str, Program]]:
    """(name of a structural pass, the program after it), in order; verified after each."""
    for run in STRUCTURAL:
        program = run(program)
        verify(program, f"program after {run.__name__}")
        yield run.__name__, program


__all__ = [
    "STRUCTURAL",
    "buffer_widths",
    "fuse",
    "fuse_add_norm",
    "fuse_gate_up",
    "fuse_gated_act",
    "fuse_qkv",
    "fuse_rope_kv_write",
    "fuse_steps",
    "lower_precision",
    "plan_buffers",
]
