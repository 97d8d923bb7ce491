"""numpy arrays as torch tensors and back, over the same memory: for who computes in torch. Nothing here copies."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quantkit_kernels.arrays import BFLOAT16, Array


def as_array(tensor: Tensor) -> Array:
    """The CPU tensor's memory as an array of the same type and strides."""
    held = tensor.detach()
    return held.view(torch.int16).numpy().view(BFLOAT16) if held.dtype == torch.bfloat16 else held.numpy()


def as_tensor(array: Array) -> Tensor:
    """The array's memory as a tensor of the same type and strides."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
