"""A compiled kernel: how it is launched, loaded onto a device, and its launches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit_kernels.cuda.arguments import CONVENTION, SCRATCH, TRITON, Argument, Arguments, passes
from quantkit_kernels.cuda.driver import Driver
from quantkit_kernels.cuda.elf import check_elf

STATIC_SHARED = 48 << 10
"""Bytes of shared memory beyond which a kernel must ask for them."""
WARP = 32
MOST_ARGUMENTS = 64
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,255}")


@dataclass(frozen=True)
class LaunchPlan:
    """How a compiled kernel is launched: its metadata, checked.

    symbol: its name in the machine code. arguments: what a launch passes, in order, scratch pointers included. folded:
    numbers that were compiled in, so that a launch must give these very values and passes none. scratch_bytes: of the
    two scratch pointers, a program. source: digest of the kernel code it was made from. triton: who compiled it.
    """

    kernel: str
    symbol: str
    target: str
    arguments: tuple[Argument, ...]
    folded: Mapping[str, int]
    num_warps: int
    num_ctas: int
    shared_bytes: int
    scratch_bytes: tuple[int, int]
    convention: int
    source: str
    triton: str

    @classmethod
    def from_metadata(cls, body: Mapping[str, Any]) -> LaunchPlan:
        """ValueError says what of the metadata is not as a build writes it."""
        arguments = body.get("arguments")
        folded, scratch, versions = body.get("folded"), body.get("scratch_bytes"), body.get("versions")
        if not isinstance(arguments, list) or not len(SCRATCH) <= len(arguments) <= MOST_ARGUMENTS:
            raise ValueError("states no list of arguments")
        listed = tuple(_argument(each) for each in arguments)
        names = [each.name for each in listed]
        if len(set(names)) != len(names) or tuple(names[-2:]) != SCRATCH:
            raise ValueError(f"arguments must have names of their own and end with {' and '.join(SCRATCH)}")
        if not isinstance(folded, dict) or not all(type(value) is int for value in folded.values()):
            raise ValueError("folded must be numbers by argument")
        if not isinstance(scratch, list) or len(scratch) != 2 or not all(_natural(size) for size in scratch):
            raise ValueError("scratch_bytes must be two sizes")
        numbers = {name: body.get(name) for name in ("num_warps", "num_ctas", "shared_bytes", "convention")}
        if not all(_natural(value) for value in numbers.values()) or not 1 <= body["num_warps"] <= 32:
            raise ValueError(f"{', '.join(numbers)} must be numbers, and num_warps from 1 to 32")
        texts = {name: body.get(name) for name in ("kernel", "symbol", "target", "source")}
        if not all(isinstance(text, str) for text in texts.values()) or not _SYMBOL.fullmatch(body["symbol"]):
            raise ValueError(f"{', '.join(texts)} must be texts, and symbol a name")
        if not isinstance(versions, dict) or not isinstance(versions.get("triton"), str):
            raise ValueError("does not state the Triton that compiled it")
        return cls(
            **texts,  # type: ignore[arg-type]
            **numbers,  # type: ignore[arg-type]
            arguments=listed,
            folded=folded,
            scratch_bytes=(scratch[0], scratch[1]),
            triton=versions["triton"],
        )

    @property
    def known_convention(self) -> bool:
        """Whether `Arguments` passes what this kernel takes: proven for a range of Triton's releases."""
        release = re.match(r"(\d+)\.(\d+)", self.triton)
        known = release is not None and TRITON[0] <= (int(release[1]), int(release[2])) <= TRITON[1]
        return known and self.convention == CONVENTION

    @property
    def refusal(self) -> str | None:
        """What the launcher does not do for a kernel: clusters of blocks, and memory for scratch pointers."""
        if self.num_ctas != 1:
            return f"it runs in clusters of {self.num_ctas} blocks"
        if any(self.scratch_bytes):
            return f"it needs scratch memory of {sum(self.scratch_bytes)} bytes a program"
        return None


class LoadedKernel:
    """A kernel on a device.

    ValueError where `cubin` is no whole machine code; DriverError where the driver does not take it.
    """

    def __init__(self, driver: Driver, plan: LaunchPlan, cubin: bytes) -> None:
        check_elf(cubin)
        self.plan, self._driver = plan, driver
        self._module = driver.load_module(cubin)
        try:
            self.function = driver.function(self._module, plan.symbol)
            if plan.shared_bytes > STATIC_SHARED:
                driver.allow_shared(self.function, plan.shared_bytes)
        except RuntimeError:
            driver.unload_module(self._module)
            raise

    def prepare(self, grid: tuple[int, int, int], values: Mapping[str, Any]) -> Launch:
        """A launch with its values, by argument; numbers that were compiled in are compared.

        ValueError where a value is missing, unknown, does not fit its type, or is not what the code was made for.
        """
        return Launch(self._driver, self, grid, values)

    def unload(self) -> None:
        """Let the code go."""
        self._driver.unload_module(self._module)


class Launch:
    """A launch that can be repeated: the same arguments at the same addresses each time, but for what `set` changes."""

    def __init__(
        self, driver: Driver, kernel: LoadedKernel, grid: tuple[int, int, int], values: Mapping[str, Any]
    ) -> None:
        self._driver, self._kernel, self.grid = driver, kernel, grid
        self._arguments = Arguments(kernel.plan.arguments)
        for name, value in values.items():
            self.set(name, value)
        missing = sorted(self._arguments.unset | (kernel.plan.folded.keys() - values.keys()))
        if missing:
            raise ValueError(f"{kernel.plan.kernel}: no value for {', '.join(missing)}")

    def set(self, name: str, value: Any) -> None:
        """Change an argument for the launches to come."""
        folded = self._kernel.plan.folded
        try:
            if name not in folded:
                self._arguments.set(name, value)
            elif folded[name] != value:
                raise ValueError(f"{name} is {value}, and the code is made for {folded[name]}")
        except ValueError as error:
            raise ValueError(f"{self._kernel.plan.kernel}: {error}") from None

    def launch(self, stream: int) -> None:
        """Start it on a stream (`torch.cuda.current_stream().cuda_stream`); an empty grid starts nothing."""
        if 0 in self.grid:
            return
        plan = self._kernel.plan
        self._driver.launch(
            self._kernel.function, self.grid, WARP * plan.num_warps, plan.shared_bytes, stream,
            self._arguments.addresses,
        )  # fmt: skip


def _argument(body: Any) -> Argument:
    if not isinstance(body, dict) or not all(isinstance(body.get(key), str) for key in ("name", "type")):
        raise ValueError("an argument must state its name and type")
    if not passes(body["type"]) or body.get("divisible_by") not in (1, 16):
        raise ValueError(f"argument {body['name'][:40]}: its type or divisor is none that a launch passes")
    return Argument(body["name"], body["type"], body["divisible_by"])


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
