"""The model as plain data: built from a DecoderSpec, transformed by passes, verified, stored, printed.

Executing it is the runtime's work.
"""

from quantkit.program.build import STEP_INPUTS, build_program
from quantkit.program.ir import KVLayer, Node, Program, Value, Weight
from quantkit.program.passes import fuse, fuse_steps, lower_precision, plan_buffers
from quantkit.program.serial import program_from_json, program_to_json
from quantkit.program.slices import slices
from quantkit.program.text import format_program
from quantkit.program.verify import verify
from quantkit.program.weights import WeightProvider

__all__ = [
    "STEP_INPUTS",
    "KVLayer",
    "Node",
    "Program",
    "Value",
    "Weight",
    "WeightProvider",
    "build_program",
    "format_program",
    "fuse",
    "fuse_steps",
    "lower_precision",
    "plan_buffers",
    "program_from_json",
    "program_to_json",
    "slices",
    "verify",
]
