"""What Triton's own launcher hands to the CUDA driver, byte by byte, and what ours does.

    gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o FOLDER/libcuda.so.1 tests/launch/fake_libcuda.c
    LD_LIBRARY_PATH=FOLDER TRITON_LIBCUDA_PATH=FOLDER python -m tests.launch.launcher_bytes

Both launch the same arguments through the stand-in for libcuda. The first line of JSON states Triton's release, every
other one is a launch, `triton` beside `ours`. Triton compiles its launcher on the spot, so this runs under any release:
put another one's folder first on PYTHONPATH.
With `--record` only Triton's bytes are printed, as `triton_*.jsonl` hold them.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import struct
import sys
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from quantkit_kernels.cuda.arguments import SCRATCH, Argument
from quantkit_kernels.cuda.driver import Driver, load_library
from quantkit_kernels.cuda.kernel import LaunchPlan, LoadedKernel

SIZES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8,
         "fp32": 4, "f32": 4, "fp64": 8, "*i8": 8}  # fmt: skip
"""Bytes of a kernel's parameter of each type, as PTX declares it."""
_EDGES: dict[str, list[Any]] = {
    "i1": [0, 1], "u1": [0, 1],
    "i8": [0, -1, 127, -128], "u8": [0, 1, 255], "i16": [0, -2, 32767, -32768], "u16": [0, 65535],
    "i32": [0, -3, 2**31 - 1, -(2**31)], "u32": [5, 2**32 - 1], "i64": [0, -1, 2**63 - 1, -(2**63)],
    "u64": [7, 2**64 - 1],
    "fp32": [0.0, -0.0, 1.0, 0.1, 1e-40, -3.4e38, 1e300, float("inf"), float("-inf"), 1 + 2**-24],
    "f32": [0.3], "fp64": [0.1, -1e300, float("inf")],
    "*i8": [0, None, 0x7F00_0000_0010, 2**64 - 16],
}  # fmt: skip
_MIXED = _EDGES | {"i8": [0, 127]}
"""Triton 3.6 refuses a negative i8; alone is enough of it."""


class Recorded(ctypes.Structure):
    """`Launch` of fake_libcuda.c."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("attribute_count", ctypes.c_uint), ("count", ctypes.c_uint),
        ("stream", ctypes.c_uint64), ("function", ctypes.c_uint64), ("bytes", ctypes.c_ubyte * 8 * 64),
    )  # fmt: skip

    def as_data(self) -> dict[str, Any]:
        return {
            "grid": [*self.grid], "block": [*self.block], "shared": self.shared, "attributes": self.attribute_count,
            "stream": self.stream, "function": self.function,
            "bytes": [bytes(each).hex() for each in self.bytes[: self.count]],
        }  # fmt: skip


def cases() -> Iterator[tuple[list[str], list[Any]]]:
    """Types and values of launches: every type alone at its edges, then mixtures, constants among them."""
    for type_, values in _EDGES.items():
        for value in values:
            yield [type_], [value]
    chance = random.Random(5)
    for length in (0, 2, 5, 9, 14, 20):
        for _ in range(8):
            types = [chance.choice([*_EDGES, "constexpr"]) for _ in range(length)]
            yield types, [chance.choice(_MIXED.get(type_, [1])) for type_ in types]


def main(recording: bool) -> None:
    print(json.dumps({"release": version("triton")}))
    library = load_library()
    library.fake_last.argtypes = (ctypes.POINTER(Recorded),)
    triton_launch = _triton_launcher()
    driver = Driver(library)
    chance = random.Random(7)
    for (types, values), warps in zip(cases(), itertools.cycle([1, 2, 4, 8, 16]), strict=False):
        passed = [type_ for type_ in types if type_ != "constexpr"]
        expected = (ctypes.c_uint * (len(passed) + 2))(*(SIZES[type_] for type_ in passed), 8, 8)
        grid = (chance.randint(1, 9), chance.randint(1, 9), chance.randint(1, 9))
        shared, stream = chance.choice([0, 4096, 70000]), chance.choice([0, 0x5EED0])
        library.fake_expect(expected, len(expected))
        try:
            triton_launch(types, values, grid, warps, shared, stream)
            theirs = _last(library)
        except OverflowError as error:  # Triton 3.6 reads an i8 as an unsigned byte
            theirs = {"refused": str(error)}
        case = {"types": types, "values": [repr(value) for value in values], "triton": theirs}
        if not recording:
            _launch(driver, types, values, grid, warps, shared, stream)
            case["ours"] = _last(library)
        print(json.dumps(case))


def _last(library: Any) -> dict[str, Any]:
    recorded = Recorded()
    library.fake_last(ctypes.pointer(recorded))
    return recorded.as_data()


def _triton_launcher() -> Any:
    """Launches through the `CudaLauncher` of the Triton that is installed."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver

    driver.set_active(SimpleNamespace(utils=CudaUtils()))

    def launch(
        types: list[str], values: list[Any], grid: tuple[int, int, int], warps: int, shared: int, stream: int
    ) -> None:
        names = [f"a{index}" for index in range(len(types))]
        source = SimpleNamespace(
            signature=dict(zip(names, types, strict=True)), constants={}, fn=SimpleNamespace(arg_names=names)
        )
        about = SimpleNamespace(
            num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=False, launch_pdl=False, instrumentation_mode="", tensordesc_meta=None,
        )  # fmt: skip
        CudaLauncher(source, about)(*grid, stream, 0xF00D, (warps, 1, shared), None, None, None, *values)

    return launch


def _launch(
    driver: Driver, types: list[str], values: list[Any], grid: tuple[int, int, int], warps: int, shared: int,
    stream: int,
) -> None:  # fmt: skip
    passed = {f"a{index}": type_ for index, type_ in enumerate(types) if type_ != "constexpr"}
    arguments = (*(Argument(*each) for each in passed.items()), *(Argument(name, "*i8") for name in SCRATCH))
    plan = LaunchPlan("case", "case", "sm_90", arguments, {}, warps, 1, shared, (0, 0), 1, "", "3.9.0")
    given = {name: values[int(name[1:])] for name in passed}
    LoadedKernel(driver, plan, smallest_cubin()).prepare(grid, given).launch(stream)


def smallest_cubin(symbol: str = "case") -> bytes:
    """An ELF file for CUDA with one kernel's section, of no code."""
    names = b"\0.shstrtab\0" + f".text.{symbol}".encode() + b"\0"
    at = 64 + len(names)
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, 3, 1)
    )
    section = struct.Struct("<IIQQQQIIQQ")
    return (
        header + names + section.pack(*(0,) * 10) + section.pack(1, 3, 0, 0, 64, len(names), 0, 0, 1, 0)
        + section.pack(11, 1, 6, 0, at, 0, 0, 0, 128, 0)
    )  # fmt: skip


if __name__ == "__main__":
    main("--record" in sys.argv)
