"""A kernel that Triton compiles on the spot, launched like a compiled one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from quantkit_kernels.triton.spec import KernelSpec, Signature


class JitLaunch:
    """A launch that can be repeated, as `kernel.Launch`, through Triton.

    values: by argument, tensors for pointers. ValueError where they are not those of the signature.
    """

    def __init__(
        self, spec: KernelSpec, signature: Signature, grid: tuple[int, int, int], values: Mapping[str, Any]
    ) -> None:
        differing = sorted(values.keys() ^ signature.arguments.keys())
        if differing:
            raise ValueError(f"{spec.name}: values and signature disagree about {', '.join(differing)}")
        self._spec, self._signature, self.grid = spec, signature, grid
        self._values = dict(values)

    def set(self, name: str, value: Any) -> None:
        """Change an argument for the launches to come."""
        if name not in self._values:
            raise ValueError(f"{self._spec.name}: there is no argument {name}")
        self._values[name] = value

    def launch(self, stream: int | None = None) -> None:
        """Start it on a stream, torch's current one if absent; the first launch compiles. An empty grid starts none."""
        if 0 in self.grid:
            return
        with nullcontext() if stream is None else torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            self._spec.function[self.grid](
                **self._values,
                **self._signature.constants,
                num_warps=self._signature.num_warps,
                num_stages=self._signature.num_stages,
            )
