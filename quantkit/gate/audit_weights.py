"""Weight audit: what the artifact stores, held against the source matrix by matrix, so that damage has an address.

Errors are in steps: (stored - source) / scale. Rounding to nearest gives a mean near 0 and an rms near 0.29 in every
group; GPTQ moves single weights by several steps but no whole matrix. A zero point off by one shifts its group by one
step; a wrong scale stretches its group; rows in another order leave nothing of the source. Decision 12 has the figures
behind the limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.artifact.layout import is_derived, tied_tables
from quantkit.artifact.read import Artifact
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES
from quantkit.models import ModelSource
from quantkit.models.source_weights import SourceWeights
from quantkit.program.ir import Weight
from quantkit_kernels.tensors import as_tensor

CHUNK = 1 << 21
"""Weights compared at a time."""

MATRIX_SHIFT = 0.25
"""Steps of mean error over a whole matrix; sound ones stay below 0.01, a zero point off by one gives 1."""
MATRIX_RMS = 2.0
"""Steps of rms error over a matrix; the hardest GPTQ stays below 1, rows in another order give 4 and more."""
GROUP_SHIFT, GROUP_REST = 0.75, 0.5
"""A group is displaced when it lies this many steps off while what is left has at most this rms."""
GROUP_GAIN, GROUP_COSINE = 1.4, 0.97
"""A group is stretched when its best gain is this factor off 1, either way, while its direction is the source's: with
its largest weight and without it. Where one weight dwarfs the rest, GPTQ may move it by a step or two and it alone is
the gain; the rest is then a few codes of 0 and 1, whose gain says as little."""


@dataclass(frozen=True)
class PartAudit:
    """One stored matrix (a part of a fused group) against its source. Errors in steps.

    displaced, stretched: groups shifted by about a step, or scaled wrongly; the first of each in `where`.
    """

    tensor: str
    group: str
    scheme: str
    rms: float
    shift: float
    groups: int
    displaced: int
    stretched: int
    where: str = ""

    @property
    def problem(self) -> str:
        """What is wrong in words; empty when nothing."""
        if abs(self.shift) > MATRIX_SHIFT and self.displaced >= self.stretched:
            return f"its weights lie {self.shift:+.2f} steps off on average: a zero point or code offset is wrong"
        if self.displaced:
            return f"{self.displaced} of {self.groups} groups lie about a step off, {self.where}: a zero point is wrong"
        if self.stretched:
            return f"{self.stretched} of {self.groups} groups are scaled wrongly, {self.where}: a scale is wrong"
        if self.rms > MATRIX_RMS:
            return f"its weights lie {self.rms:.1f} steps off in rms: they are not the source's"
        return ""


@dataclass(frozen=True)
class PlainAudit:
    """An unquantized tensor that isn't the source's: the rows that differ, of how many."""

    name: str
    kind: str
    rows: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class WeightAudit:
    """Every stored weight: `parts` are the quantized matrices, `changed` the unquantized tensors that differ."""

    parts: tuple[PartAudit, ...]
    changed: tuple[PlainAudit, ...]
    plain: int
    """Unquantized tensors compared."""


def audit_weights(artifact: Artifact, source: ModelSource) -> WeightAudit:
    """Compare all stored weights with the source's, a few rows of one matrix at a time."""
    weights = SourceWeights(source)
    tables = tied_tables(artifact.program)
    parts: list[PartAudit] = []
    changed: list[PlainAudit] = []
    plain = 0
    for weight in artifact.program.weights.values():
        if weight.kind == "scales" or is_derived(weight, tables):
            continue
        if SCHEMES[weight.scheme].quantized:
            stored = artifact.load(weight)
            if isinstance(stored, QuantizedMatrix):
                parts += _audit_matrix(weight, stored, weights)
            continue
        plain += 1
        rows = _changed_rows(artifact, source, weight)
        if rows:
            changed.append(PlainAudit(weight.name, weight.kind, tuple(rows), weight.shape[0]))
    return WeightAudit(tuple(parts), tuple(changed), plain)


def _audit_matrix(weight: Weight, stored: QuantizedMatrix, source: SourceWeights) -> list[PartAudit]:
    whole = source.tensor(weight)
    found, start = [], 0
    for part in weight.parts:
        stop = start + part.stop - part.start
        found.append(audit_part(whole[start:stop], stored.rows(start, stop), part.tensor, weight.group or weight.name))
        start = stop
    return found


def audit_part(source: Tensor, stored: QuantizedMatrix, tensor: str, group: str) -> PartAudit:
    """The statistics of one matrix: source `[N, K]` of any float type, stored in any integer scheme."""
    rows = max(1, CHUNK // source.shape[1])
    squares = total = 0.0
    displaced = stretched = 0
    where = ""
    for start in range(0, source.shape[0], rows):
        piece = stored.rows(start, min(start + rows, source.shape[0]))
        seen = _groups(source[start : start + rows].float(), piece)
        squares += float(seen.squares.sum())
        total += float(seen.sums.sum())
        displaced += int(seen.displaced.sum())
        stretched += int(seen.stretched.sum())
        wrong = seen.displaced | seen.stretched
        if not where and bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            where = f"the first in row {start + row}, group {column}"
    count = source.numel()
    groups = stored.scale.size
    rms, shift = (squares / count) ** 0.5, total / count
    return PartAudit(tensor, group, stored.scheme.name, rms, shift, groups, displaced, stretched, where)


@dataclass(frozen=True)
class _Groups:
    """Per group `[n, G]`: Σ error², Σ error in steps, and what is wrong with it."""

    squares: Tensor
    sums: Tensor
    displaced: Tensor
    stretched: Tensor


def _groups(source: Tensor, stored: QuantizedMatrix) -> _Groups:
    count = stored.scale.shape[1]
    scale = as_tensor(stored.scale).unsqueeze(-1)
    ours, theirs = (x.unflatten(-1, (count, -1)) / scale for x in (as_tensor(stored.dequantize()), source))
    error = ours - theirs
    squares, sums = error.pow(2).sum(-1), error.sum(-1)
    size = error.shape[-1]
    mean = sums / size
    rest = (squares / size - mean.pow(2)).clamp_min(0).sqrt()
    displaced = (mean.abs() >= GROUP_SHIFT) & (rest <= GROUP_REST)
    largest = theirs.abs().argmax(-1, keepdim=True)
    rest_ours, rest_theirs = ours.scatter(-1, largest, 0.0), theirs.scatter(-1, largest, 0.0)
    whole, without = _scaled_wrongly(ours, theirs), _scaled_wrongly(rest_ours, rest_theirs)
    stretched = (whole != 0) & (whole == without) & ~displaced
    return _Groups(squares, sums, displaced, stretched)


def _scaled_wrongly(ours: Tensor, theirs: Tensor) -> Tensor:
    """Per group of `[n, G, K]`: 1 where the source is larger than what is stored by GROUP_GAIN, -1 smaller, else 0."""
    own, across, other = ours.pow(2).sum(-1), (ours * theirs).sum(-1), theirs.pow(2).sum(-1)
    gain = across / own.clamp_min(1e-30)
    cosine = across / (own * other).sqrt().clamp_min(1e-30)
    side = (gain > GROUP_GAIN).int() - (gain < 1 / GROUP_GAIN).int()
    return side * (cosine >= GROUP_COSINE)


def _changed_rows(artifact: Artifact, source: ModelSource, weight: Weight) -> list[int]:
    """Rows of an unquantized weight that aren't the source's, in the type they are stored in."""
    width = weight.shape[1] if len(weight.shape) == 2 else 1
    step = max(1, CHUNK // width)
    rows: list[int] = []
    done = 0
    for part in weight.parts:
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            ours = as_tensor(artifact.read_tensor(part.tensor, start, stop))
            theirs = source.reader.read(part.tensor, start, stop).to(ours.dtype)
            differ = (ours != theirs).reshape(stop - start, -1).any(-1)
            rows += (differ.nonzero()[:, 0] + done + start - part.start).tolist()
        done += part.stop - part.start
    return rows
