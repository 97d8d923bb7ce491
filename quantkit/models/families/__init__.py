"""One adapter per Hugging Face family: `config.json` in, DecoderSpec out.

`spec_from_config` dispatches on `model_type`; FAMILIES lists what is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.errors import RecipeError
from quantkit.models.config import Config
from quantkit.models.families import gemma3, llama, mistral, phi3, qwen2, qwen3
from quantkit.models.spec import DecoderSpec

FAMILIES: dict[str, Callable[[Config], DecoderSpec]] = {
    "llama": llama.spec,
    "mistral": mistral.spec,
    "qwen2": qwen2.spec,
    "qwen3": qwen3.spec,
    "gemma3_text": gemma3.spec,
    "phi3": phi3.spec,
}

__all__ = ["FAMILIES", "spec_from_config"]


def spec_from_config(config: Mapping[str, Any], where: str = "config.json") -> DecoderSpec:
    """The architecture a `config.json` describes, in either the Transformers 5 or the older form.

    Args:
        config: the parsed `config.json`; a `gemma3` one gives its text model.
        where: how errors call it.

    Raises:
        RecipeError: an unsupported family or feature, named.
        CheckpointError: a missing or malformed value, named.
    """
    view = Config(config, where)
    family = view.text("model_type")
    if family == "gemma3":
        view, family = Config(gemma3.text_config(view), where), "gemma3_text"
    adapter = FAMILIES.get(family)
    if adapter is None:
        raise RecipeError(
            f"model family {family[:60]!r} is not supported: it has no adapter in quantkit/models/families/",
            where=where,
            next=f"Supported: {', '.join(sorted({*FAMILIES, 'gemma3'}))}",
        )
    return adapter(view)
