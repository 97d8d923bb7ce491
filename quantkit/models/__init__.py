"""Models: where they come from (`open_source`), what they are (`DecoderSpec`), how their weights are read lazily.

Nothing heavy is imported until asked for: `quantkit.models.spec` must stay importable without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.models.families import spec_from_config
    from quantkit.models.reader import WeightReader
    from quantkit.models.source import ModelSource, open_source
    from quantkit.models.source_weights import SourceWeights
    from quantkit.models.spec import DecoderSpec

__all__ = ["DecoderSpec", "ModelSource", "SourceWeights", "WeightReader", "open_source", "spec_from_config"]

_HOMES = {
    "DecoderSpec": "quantkit.models.spec",
    "ModelSource": "quantkit.models.source",
    "SourceWeights": "quantkit.models.source_weights",
    "WeightReader": "quantkit.models.reader",
    "open_source": "quantkit.models.source",
    "spec_from_config": "quantkit.models.families",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quantkit.models' has no attribute {name!r}")
