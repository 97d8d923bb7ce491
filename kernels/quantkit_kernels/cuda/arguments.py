"""What a launch of a Triton kernel passes, byte by byte.

Triton 3.6 to 3.9 call a kernel with every argument that is no constant, in the function's order, then two pointers to
scratch memory, null where none is needed. Each lies in memory of its own in its C type; the driver gets their
addresses. `tests/unit/test_launch_bytes.py` holds this against Triton's own launchers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CONVENTION = 1
"""Number of the calling convention described here; in a kernel's metadata."""
TRITON = ((3, 6), (3, 9))
"""Releases of Triton, first and last, whose launchers pass the same bytes."""
SCRATCH = ("global_scratch", "profile_scratch")
"""The two pointers that Triton adds after a kernel's own arguments."""
_INTEGERS: dict[str, Any] = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
}
_FLOATS: dict[str, Any] = {"fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double}
_SLOT = 8
"""Bytes between arguments: the largest has as many, so each is aligned."""


@dataclass(frozen=True)
class Argument:
    """One argument: its name, its type in Triton's spelling, and the 1 or 16 that its value divides by."""

    name: str
    type: str
    divisible_by: int = 1


def passes(type_: str) -> bool:
    """Whether a launch can pass an argument of that type: pointers, integers, FP32 and FP64."""
    return type_.startswith("*") or type_ in _INTEGERS or type_ in _FLOATS


class Arguments:
    """Memory that holds a launch's arguments, and their addresses as `cuLaunchKernel` takes them.

    Scratch pointers are null. ValueError for a type that no launch passes.
    """

    def __init__(self, arguments: Iterable[Argument]) -> None:
        self._arguments = tuple(arguments)
        unknown = [each.type for each in self._arguments if not passes(each.type)]
        if unknown:
            raise ValueError(f"a launch cannot pass an argument of type {unknown[0]}")
        self._memory = (ctypes.c_uint64 * len(self._arguments))()
        base = ctypes.addressof(self._memory)
        self.addresses = (ctypes.c_void_p * len(self._arguments))(
            *(base + _SLOT * index for index in range(len(self._arguments)))
        )
        self._place = {each.name: index for index, each in enumerate(self._arguments)}
        self._unset = set(self._place) - set(SCRATCH)
        self._held: dict[str, Any] = {}

    @property
    def unset(self) -> frozenset[str]:
        """Arguments that have no value yet."""
        return frozenset(self._unset)

    def set(self, name: str, value: Any) -> None:
        """Give an argument its value: a number, or for a pointer None, an address, or a tensor, which is kept alive.

        ValueError where the kernel has no such argument, the type does not hold the value, or the code was compiled
        for values that 16 divides and this is none.
        """
        index = self._place.get(name)
        if index is None:
            raise ValueError(f"there is no argument {name}")
        argument = self._arguments[index]
        kind, number = _as_number(argument, value)
        if argument.divisible_by > 1 and number % argument.divisible_by:
            raise ValueError(f"{name} is {number}, and the code is made for multiples of {argument.divisible_by}")
        self._memory[index] = 0
        kind.from_buffer(self._memory, _SLOT * index).value = number
        self._held[name] = value
        self._unset.discard(name)

    def set_all(self, values: Mapping[str, Any]) -> None:
        """`set` for each."""
        for name, value in values.items():
            self.set(name, value)


def _as_number(argument: Argument, value: Any) -> tuple[Any, int | float]:
    """The C type and the number to store in it."""
    name, type_ = argument.name, argument.type
    if type_.startswith("*"):
        address = 0 if value is None else value if isinstance(value, int) else value.data_ptr()
        return ctypes.c_uint64, _within(name, address, ctypes.c_uint64)
    if type_ in _FLOATS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r} and must be a number")
        return _FLOATS[type_], float(value)
    if not isinstance(value, int):
        raise ValueError(f"{name} is {value!r} and must be an integer")
    return _INTEGERS[type_], _within(name, int(value), _INTEGERS[type_])


def _within(name: str, value: int, kind: Any) -> int:
    held: int = kind(value).value
    if held != value:
        raise ValueError(f"{name} is {value}, which {8 * ctypes.sizeof(kind)} bits do not hold")
    return value
