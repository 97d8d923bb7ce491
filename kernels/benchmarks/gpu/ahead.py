"""Kernels for this check: compiled ahead of time by processes of their own and launched through the driver.

Triton builds its launcher with a C compiler, which a GPU machine need not have; machine code from `ptxas` and our own
launcher need none. A dry run launches through the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from quantkit.compile.aot import specialisation, versions
from quantkit.compile.cache import cache_folder, key_of, read_kernel
from quantkit.compile.crew import Job, compile_all
from quantkit_kernels.cuda.driver import Driver, load_library
from quantkit_kernels.cuda.jit import JitLaunch
from quantkit_kernels.cuda.kernel import Launch, LaunchPlan, LoadedKernel
from quantkit_kernels.triton import Fact, KernelSpec

FOLDER = "GPU_CHECK_KERNELS"
"""Environment variable: where the sections of one check share compiled kernels."""


DRY_TARGET = "sm_90"
"""Whose kernels a dry run interprets: it has one for every cache format."""


class Launchable(Protocol):
    """A prepared launch, on torch's current stream."""

    def launch(self) -> None: ...


class OnCurrentStream:
    """A launch of the driver's on the stream that torch would use, a capturing one included."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def launch(self) -> None:
        self._launch.launch(torch.cuda.current_stream().cuda_stream)


class Ahead:
    """Compiles and loads; one a process.

    driver, folder: of the device and of compiled kernels; torch's current device and this check's folder if absent.
    """

    def __init__(self, dry: bool, driver: Driver | None = None, folder: Path | None = None) -> None:
        self._dry = dry
        self._loaded: dict[str, LoadedKernel] = {}
        if dry:
            self.target = DRY_TARGET
            return
        self.driver = driver or _driver()
        self.target = f"sm_{self.driver.capability}"
        self._folder = folder or Path(os.environ.get(FOLDER, "") or cache_folder())
        self._made_by = versions(self.target)

    def key(self, spec: KernelSpec, facts: Mapping[str, Fact]) -> str:
        """The kernel's name in the cache."""
        return key_of(specialisation(spec, facts), self.target, self._made_by)

    def compile(self, wanted: Iterable[tuple[KernelSpec, Mapping[str, Fact]]]) -> int:
        """Compile what is not there yet; the number of kernels compiled. PreflightError where one does not."""
        if self._dry:
            return 0
        jobs = {key: Job(key, spec.function.__module__, spec.name, facts)
                for spec, facts in wanted for key in [self.key(spec, facts)]}  # fmt: skip
        absent = [job for key, job in jobs.items() if read_kernel(self._folder, key) is None]
        compile_all({self.target: absent}, self._folder, os.cpu_count() or 1, lambda *_: None)
        return len(absent)

    def load(self, spec: KernelSpec, facts: Mapping[str, Fact]) -> LoadedKernel:
        """The kernel on the device."""
        key = self.key(spec, facts)
        if key not in self._loaded:
            self.compile([(spec, facts)])
            stored = read_kernel(self._folder, key)
            if stored is None:
                raise RuntimeError(f"{spec.name} was compiled and is not there")
            plan = LaunchPlan.from_metadata(stored.metadata)
            self._loaded[key] = LoadedKernel(self.driver, plan, stored.file("cubin").read_bytes())
        return self._loaded[key]

    def launch(
        self, spec: KernelSpec, facts: Mapping[str, Fact], sizes: Mapping[str, int], values: Mapping[str, Any]
    ) -> Launchable:
        """A launch of the kernel; of `values` it takes what it needs. ValueError names what is not there."""
        how = spec.signature(facts)
        absent = sorted(how.arguments.keys() - values.keys())
        if absent:
            raise ValueError(f"{spec.name}: this check fills no argument {', '.join(absent)}")
        given, grid = {name: values[name] for name in how.arguments}, spec.grid(how, sizes)
        if self._dry:
            return JitLaunch(spec, how, grid, given)
        return OnCurrentStream(self.load(spec, facts).prepare(grid, given))


def _driver() -> Driver:
    torch.zeros(1, device="cuda")  # torch makes its context, which the driver then shares
    return Driver(load_library(), torch.cuda.current_device())
