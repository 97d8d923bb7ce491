"""A stand-in for libcuda as an object: it keeps the calls in order, and fails those it is told to."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any


class FakeLibrary:
    """The calls of `quantkit_kernels.cuda.driver`. fails: a call's name -> the CUresult it returns."""

    def __init__(
        self, *, capability: tuple[int, int] = (9, 0), shared: int = 232448, current: int = 0xC0,
        fails: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.calls: list[tuple[Any, ...]] = []
        self.fails = dict(fails or {})
        self.current = current
        self._attributes = {75: capability[0], 76: capability[1], 97: shared}
        self._modules = 0xD0

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self._called(name, arguments)

    def _called(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.calls.append((name, *(_plain(each) for each in arguments)))
        if name in self.fails:
            return self.fails[name]
        match name:
            case "cuDriverGetVersion":
                arguments[0].contents.value = 13020
            case "cuDeviceGet":
                arguments[0].contents.value = arguments[1]
            case "cuDeviceGetAttribute":
                arguments[0].contents.value = self._attributes[arguments[1]]
            case "cuDevicePrimaryCtxRetain":
                arguments[0].contents.value = 0xC0
            case "cuCtxGetCurrent":
                arguments[0].contents.value = self.current
            case "cuCtxSetCurrent":
                self.current = arguments[0]
            case "cuModuleLoadData":
                self._modules += 1
                arguments[0].contents.value = self._modules
            case "cuModuleGetFunction":
                arguments[0].contents.value = 0xF00
            case "cuGetErrorName":
                arguments[1].contents.value = b"CUDA_ERROR_" + str(arguments[0]).encode()
            case "cuLaunchKernel":
                words = [ctypes.string_at(address, 8) for address in arguments[9]]
                self.calls[-1] = (*self.calls[-1][:10], words)
        return 0


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | bytes) or value is None else type(value).__name__
