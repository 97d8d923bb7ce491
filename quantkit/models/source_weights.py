"""SourceWeights: a Program's weights straight from the checkpoint, unquantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.errors import CheckpointError
from quantkit.program.ir import Weight

if TYPE_CHECKING:
    import torch

    from quantkit.models.source import ModelSource
    from quantkit_kernels.arrays import Array


class SourceWeights:
    """Loads weights one at a time from a ModelSource (a WeightProvider for unquantized programs)."""

    def __init__(self, source: ModelSource) -> None:
        self._reader = source.reader

    def load(self, weight: Weight) -> Array:
        """What `tensor` gives, as an array."""
        from quantkit_kernels.tensors import as_array

        return as_array(self.tensor(weight))

    def tensor(self, weight: Weight) -> torch.Tensor:
        """The rows of `weight`'s parts, concatenated in order.

        Returns:
            `weight.shape`; a vector as float32, a matrix or table in the source's own type.

        Raises:
            CheckpointError: a missing tensor, rows outside one, or a shape other than the program's.
        """
        import torch

        if not weight.parts:
            raise CheckpointError(f"weight {weight.name} ({weight.kind}) is made by the build, not read from a source")
        pieces = [self._reader.read(part.tensor, part.start, part.stop) for part in weight.parts]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if tuple(whole.shape) != weight.shape:
            names = ", ".join(part.tensor for part in weight.parts)
            raise CheckpointError(f"shape {tuple(whole.shape)} is not {weight.shape}", where=names)
        return whole.to(torch.float32) if weight.kind == "vector" else whole
