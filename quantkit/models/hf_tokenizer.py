"""Carry a Hugging Face folder's tokenizer over into another folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.models.safetensors_reader import inside, load_json

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_SLOW = ("tokenizer.model", "vocab.json", "merges.txt", "chat_template.json")
"""Files of tokenizers that have no tokenizer.json yet, and an older home of the chat template."""


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in `folder`, each checked to lie inside it."""
    return [inside(folder, name) for name in (*_COPIED, *_SLOW) if (folder / name).exists()]


def write_tokenizer_files(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    """Copy the tokenizer of `folder` into `target`; make tokenizer.json, chat_template.jinja and generation_config.json
    where the folder keeps them in an older form.

    Raises:
        CheckpointError: the folder holds no tokenizer.
    """
    for path in tokenizer_files(folder):
        if path.name in _COPIED:
            shutil.copyfile(path, target / path.name)
    if not (target / "tokenizer.json").exists():
        _convert(folder, target)
    if not (target / "chat_template.jinja").exists():
        template = _older_template(folder)
        if template is not None:
            (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    if not (target / "generation_config.json").exists():
        ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        stated = {key: value for key, value in ids.items() if value is not None}
        (target / "generation_config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")


def _convert(folder: Path, target: Path) -> None:
    """Let Transformers build tokenizer.json from SentencePiece or vocab/merges files."""
    if not any((folder / name).exists() for name in ("tokenizer.model", "vocab.json")):
        raise CheckpointError(
            "holds no tokenizer.json", where=str(folder), next="Fetch the model's tokenizer files too"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        tokenizer.save_pretrained(str(target))
    except (ValueError, OSError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"its tokenizer cannot be converted: {reason}", where=str(folder)) from error
    if not (target / "tokenizer.json").exists():
        raise CheckpointError("its tokenizer cannot be converted to tokenizer.json", where=str(folder))


def _older_template(folder: Path) -> str | None:
    """The chat template from tokenizer_config.json or chat_template.json; of several named ones, "default"."""
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        if not path.exists():
            continue
        template = load_json(path).get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None
