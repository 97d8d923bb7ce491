"""The architecture of the model that an artifact holds, as its config.json has it."""

from __future__ import annotations

from quantkit.artifact.read import Artifact
from quantkit.models import DecoderSpec, spec_from_config
from quantkit.models.safetensors_reader import load_json


def architecture(artifact: Artifact) -> DecoderSpec:
    """What the program was built from. Raises as `spec_from_config` does, and CheckpointError for no JSON object."""
    path = artifact.folder / "config.json"
    config = load_json(path)
    config.pop("quantization_config", None)  # of what is stored; no matter of architecture
    return spec_from_config(config, str(path))
