"""An executor as those see it who compute in torch: calibration, quantization and the build's parity check."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs
from quantkit_kernels.tensors import as_array, as_tensor


def run_slice(executor: Executor, inputs: StepInputs, activations: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`Executor.run_slice` over tensors."""
    made = executor.run_slice(inputs, {name: as_array(value) for name, value in activations.items()})
    return {name: as_tensor(value) for name, value in made.items()}
