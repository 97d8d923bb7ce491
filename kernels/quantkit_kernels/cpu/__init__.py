"""Native CPU kernels: a shared library behind a plain C ABI (src/), loaded with ctypes.

A step is a `CallList` over preallocated numpy arrays and packed weights, run by one native call; a `Sampler` draws its
tokens by another.
"""

from quantkit_kernels.cpu.calls import CallList
from quantkit_kernels.cpu.library import available, isa, supported_isas
from quantkit_kernels.cpu.memory import Allocate, Spill, streamed, zeroed
from quantkit_kernels.cpu.packing import PackedMatrix, pack_matrix, placed
from quantkit_kernels.cpu.sampling import Sampler
from quantkit_kernels.cpu.threads import usable_threads

__all__ = [
    "Allocate",
    "CallList",
    "PackedMatrix",
    "Sampler",
    "Spill",
    "available",
    "isa",
    "pack_matrix",
    "placed",
    "streamed",
    "supported_isas",
    "usable_threads",
    "zeroed",
]
