"""Verify an artifact: everything opening checks, and that every number in it can be computed with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.artifact.kernels import read_buckets, read_kernels
from quantkit.artifact.read import Artifact, open_artifact
from quantkit.errors import CheckpointError
from quantkit.formats.matrix import QuantizedMatrix
from quantkit_kernels.arrays import cast


@dataclass(frozen=True)
class VerifyReport:
    """What was verified: counts, bytes and the digest that names the artifact."""

    payload_digest: str
    files: int
    payload_bytes: int
    tensors: int
    weights: int


def verify(path: Path | str) -> VerifyReport:
    """Check the whole artifact at `path`; CheckpointError names the first thing that is wrong.

    Beyond `open_artifact(check="full")` every weight of the program is loaded once: shapes stored beside packed
    weights agree, floats are finite, scales are positive. Kernels are held against their descriptions.
    """
    artifact = open_artifact(path, check="full")
    for weight in artifact.program.weights.values():
        where = f"{artifact.folder}: {weight.name}"
        value = artifact.load(weight)
        floats = value.scale if isinstance(value, QuantizedMatrix) else cast(value, np.float32)
        if not np.isfinite(floats).all():
            raise CheckpointError("holds NaN or Inf", where=where, next="Build the artifact again")
        if (isinstance(value, QuantizedMatrix) or weight.kind == "scales") and not (floats > 0).all():
            raise CheckpointError("has a scale that is not positive", where=where, next="Build the artifact again")
    _check_shapes(artifact)
    read_buckets(artifact)
    read_kernels(artifact)
    files = artifact.manifest.files
    return VerifyReport(
        payload_digest=artifact.payload_digest,
        files=len(files) + 1,
        payload_bytes=sum(entry.size for entry in files.values()),
        tensors=len(artifact.tensors),
        weights=len(artifact.program.weights),
    )


def _check_shapes(artifact: Artifact) -> None:
    """`X.weight_shape`, which other engines trust, says what `X.weight_packed` was planned for."""
    for weight in artifact.program.weights.values():
        for part in weight.parts:
            name = part.tensor.removesuffix(".weight") + ".weight_shape"
            if name in artifact.tensors:
                stated = artifact.read_tensor(name).tolist()
                if stated != [part.stop, weight.shape[1]]:
                    raise CheckpointError(f"states {stated}", where=f"{artifact.folder}: {name}")
