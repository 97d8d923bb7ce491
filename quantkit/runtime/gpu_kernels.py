"""The kernels of one device: the artifact's machine code where it fits the device, else Triton compiles on the spot.

Falling back is never silent: each reason is told once, in a line, and every kernel is counted under it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args

from quantkit.artifact.kernels import StoredKernels
from quantkit_kernels.cuda.driver import Driver, DriverError
from quantkit_kernels.cuda.kernel import LaunchPlan, LoadedKernel
from quantkit_kernels.cuda.source import source_digest
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

log = logging.getLogger(__name__)

Reason = Literal[
    "no_code", "triton_version", "other_source", "other_tiles", "unsupported", "shared_memory", "not_loaded"
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why a kernel is compiled on the spot.

no_code: the artifact holds none for this device, or none of this kernel. triton_version: another Triton compiled it
than the launcher is proven for. other_source: the kernel's source has changed since. other_tiles: it was compiled with
other constants than are chosen now, so that another grid would be launched. unsupported: it needs clusters or scratch
memory. shared_memory: more than the device has. not_loaded: the driver refused it, or it is damaged.
"""


class Launchable(Protocol):
    """A prepared launch: a compiled kernel's, or one of Triton's."""

    def set(self, name: str, value: Any) -> None:
        """Change an argument for the launches to come."""
        ...

    def launch(self, stream: int) -> None:
        """Start it on a stream."""
        ...


class KernelSet:
    """Kernels for a device, loaded as they are asked for.

    driver: of the device. stored: the artifact's kernels for its target, None where it has none. fallbacks: kernels
    that are compiled on the spot, by reason.
    """

    def __init__(self, driver: Driver, stored: StoredKernels | None) -> None:
        self.target = f"sm_{driver.capability}"
        self.fallbacks: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._driver, self._stored = driver, stored
        self._loaded: dict[str, LoadedKernel | None] = {}

    def prepare(
        self, name: str | None, spec: KernelSpec, facts: Facts, sizes: Mapping[str, int], values: Mapping[str, Any]
    ) -> Launchable:
        """A launch of a kernel.

        name: of the artifact's file (`linear_w4a16_few-0123456789abcdef`), None where it has none. facts, sizes: as
        `KernelSpec.signature` and `.grid` take them. values: by argument. ValueError where values do not fit.
        """
        signature = spec.signature(facts)
        grid = spec.grid(signature, sizes)
        kernel = self._kernel(name, spec, signature)
        if kernel is not None:
            return kernel.prepare(grid, values)
        from quantkit_kernels.cuda.jit import JitLaunch

        return JitLaunch(spec, signature, grid, values)

    def close(self) -> None:
        """Let the machine code go."""
        for kernel in self._loaded.values():
            if kernel is not None:
                kernel.unload()
        self._loaded.clear()

    def _kernel(self, name: str | None, spec: KernelSpec, signature: Signature) -> LoadedKernel | None:
        key = name or f"{spec.name} (not in the artifact)"
        if key not in self._loaded:
            try:
                self._loaded[key] = self._load(name, spec, signature)
            except _Unfit as found:
                self._loaded[key] = None
                self._count(spec.name, found.reason, str(found))
        return self._loaded[key]

    def _load(self, name: str | None, spec: KernelSpec, signature: Signature) -> LoadedKernel:
        if self._stored is None:
            raise _Unfit("no_code", f"the artifact holds no code for {self.target}")
        if name is None:
            raise _Unfit("no_code", "the artifact does not hold it")
        try:
            metadata, cubin = self._stored.read(name)
            plan = LaunchPlan.from_metadata(metadata)
            self._compare(plan, spec)
            if (metadata.get("constants"), plan.num_warps) != (dict(signature.constants), signature.num_warps):
                raise _Unfit("other_tiles", "it was compiled with other constants than are chosen now")
            return LoadedKernel(self._driver, plan, cubin)
        except (ValueError, DriverError) as error:
            raise _Unfit("not_loaded", str(error)) from None

    def _compare(self, plan: LaunchPlan, spec: KernelSpec) -> None:
        if plan.target != self.target or plan.kernel != spec.name:
            raise _Unfit("no_code", f"the artifact's is {plan.kernel} for {plan.target}")
        if not plan.known_convention:
            raise _Unfit("triton_version", f"it was compiled by Triton {plan.triton}")
        if plan.source != source_digest(spec.function.__module__):
            raise _Unfit("other_source", "its source has changed since the artifact was built")
        if plan.refusal is not None:
            raise _Unfit("unsupported", plan.refusal)
        room = self._driver.shared_bytes
        if plan.shared_bytes > room:
            raise _Unfit("shared_memory", f"it needs {plan.shared_bytes} bytes, the device has {room}")

    def _count(self, kernel: str, reason: Reason, text: str) -> None:
        if not self.fallbacks[reason]:
            log.warning("%s is compiled on the spot (%s): %s; more of this reason are counted", kernel, reason, text)
        self.fallbacks[reason] += 1


class _Unfit(Exception):
    """Why machine code is not used."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason
