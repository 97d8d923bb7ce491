"""The calls of the CUDA driver API that loading and launching a kernel takes, through ctypes.

The primary context of a device is retained, never a context made: torch uses the primary one, so memory and streams
are shared with it (CUDA Driver API, "Primary Context Management").
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR, _SHARED_OPT_IN = 75, 76, 97
_MAX_DYNAMIC_SHARED = 8
_HANDLE = POINTER(c_void_p)
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_HANDLE, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (_HANDLE,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (_HANDLE, c_void_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (_HANDLE, c_void_p, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class DriverError(RuntimeError):
    """A call of the driver that failed. call: its name; code: its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class Driver:
    """One device by its ordinal, in its primary context. DriverError where a call fails.

    library: libcuda as ctypes loads it (`load_library`). The context is current in the thread that makes this;
    another thread calls `make_current` before it loads or launches.
    """

    def __init__(self, library: Any, ordinal: int = 0) -> None:
        self._library = library
        self._call("cuInit", 0)
        self._device = self._number("cuDeviceGet", ordinal)
        self._context = self._handle("cuDevicePrimaryCtxRetain", self._device)
        self.make_current()

    @property
    def version(self) -> int:
        """The newest CUDA that the driver knows: 13020 is 13.2."""
        return self._number("cuDriverGetVersion")

    @property
    def capability(self) -> int:
        """The device's compute capability: 90 for sm_90."""
        major, minor = (self._number("cuDeviceGetAttribute", which, self._device) for which in (_MAJOR, _MINOR))
        return 10 * major + minor

    @property
    def shared_bytes(self) -> int:
        """Most shared memory of one block, opted in to."""
        return self._number("cuDeviceGetAttribute", _SHARED_OPT_IN, self._device)

    def make_current(self) -> None:
        """Make the device's context that of this thread, where it is not yet."""
        if self._handle("cuCtxGetCurrent") != self._context:
            self._call("cuCtxSetCurrent", self._context)

    def load_module(self, image: bytes) -> int:
        """Load machine code. `image` must be a whole ELF file: the driver takes its length from its headers."""
        return self._handle("cuModuleLoadData", ctypes.cast(ctypes.c_char_p(image), c_void_p))

    def unload_module(self, module: int) -> None:
        """Let a module's code go; no launch of it may be running."""
        self._call("cuModuleUnload", module)

    def function(self, module: int, symbol: str) -> int:
        """A kernel of a module."""
        return self._handle("cuModuleGetFunction", module, symbol.encode())

    def function_attribute(self, function: int, which: int) -> int:
        """3: bytes of local memory a thread (spills); 4: registers a thread."""
        return self._number("cuFuncGetAttribute", which, function)

    def allow_shared(self, function: int, size: int) -> None:
        """Let a kernel be launched with `size` bytes of dynamic shared memory: above 48 KB it must be asked for."""
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, size)

    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, parameters: Any
    ) -> None:
        """Start a kernel on a stream. parameters: an array of the addresses of its arguments, as ctypes has it."""
        self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared, stream, parameters, None)

    def close(self) -> None:
        """Give the context back; it lives on while torch holds it."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _number(self, call: str, *arguments: Any) -> int:
        out = c_int()
        self._call(call, ctypes.pointer(out), *arguments)
        return out.value

    def _handle(self, call: str, *arguments: Any) -> int:
        out = c_void_p()
        self._call(call, ctypes.pointer(out), *arguments)
        return out.value or 0

    def _call(self, call: str, *arguments: Any) -> None:
        code = getattr(self._library, call)(*arguments)
        if code:
            name = c_char_p()
            self._library.cuGetErrorName(code, ctypes.pointer(name))
            raise DriverError(call, code, (name.value or b"unknown error").decode())


def load_library(path: str = LIBRARY) -> Any:
    """libcuda with its calls' types declared; OSError where there is none."""
    library = ctypes.CDLL(path)
    for name, types in _CALLS.items():
        getattr(library, name).argtypes = types
    return library
