"""open_source: a checkpoint on this machine, read into one shape whatever its file format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.models import gguf_config, gguf_tokenizer, hf_tokenizer
from quantkit.models.config import Config
from quantkit.models.families import gemma3, spec_from_config
from quantkit.models.gguf_file import read_gguf
from quantkit.models.gguf_reader import GGUFWeightReader
from quantkit.models.locate import is_license, locate
from quantkit.models.reader import RenamedReader, WeightReader
from quantkit.models.safetensors_reader import inside, load_json, open_safetensors
from quantkit.models.spec import DecoderSpec
from quantkit.models.tensors import checked_spec

_BLOCK = 1 << 22


class ModelSource:
    """A source checkpoint: what it is, its weights, its tokenizer.

    Attributes:
        location: as the recipe names it.
        spec: the architecture; `spec.dtype` is the type the matrices are stored in.
        config: `config.json` in Hugging Face form (of the text model alone, without code references).
        reader: the tensors, lazily, under Hugging Face names.
        license_files: terms that travel with the weights.
    """

    def __init__(
        self,
        location: str,
        spec: DecoderSpec,
        config: dict[str, Any],
        reader: WeightReader,
        license_files: Sequence[Path],
        *,
        root: Path,
        files: Sequence[Path],
        tokenizer: Callable[[Path], None],
    ) -> None:
        self.location = location
        self.spec = spec
        self.config = config
        self.reader = reader
        self.license_files = list(license_files)
        self._root, self._files, self._tokenizer = root, tuple(files), tokenizer
        self._fingerprint: str | None = None

    def fingerprint(self) -> str:
        """sha256 (hex) over name, size and content of every file the model is made of; computed once."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for path in sorted(self._files):
                name = path.relative_to(self._root).as_posix()
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                with path.open("rb") as file:
                    while block := file.read(_BLOCK):
                        digest.update(block)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer, chat template (if any), generation_config.json and config.json into `folder`.

        Raises:
            CheckpointError, RecipeError: a tokenizer that is missing or cannot be converted.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def open_source(location: str, *, base: Path = Path(".")) -> ModelSource:
    """Open the model at `location`; headers are read and checked, weights are not.

    Args:
        location: a Hugging Face folder, a `.gguf` file, `package:NAME/path` or a hub id; relative to `base`.
        base: where relative paths start (a recipe's folder).

    Raises:
        RecipeError: no such model, or one of an unsupported family or feature; named.
        PreflightError: a package not installed, a hub that cannot be reached; names the next step.
        CheckpointError: damaged, incomplete or untrustworthy files; names file and tensor.
    """
    place = locate(location, base)
    if place.path.is_dir():
        return _open_folder(location, place.path, place.license_files)
    if place.path.suffix == ".gguf":
        return _open_gguf(location, place.path, place.license_files)
    raise CheckpointError(
        "is neither a model folder nor a .gguf file",
        where=str(place.path),
        next="Give the folder that holds config.json",
    )


def _licenses(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and is_license(path.name))


def _open_folder(location: str, folder: Path, licenses: Sequence[Path]) -> ModelSource:
    config_path = folder / "config.json"
    if not config_path.exists():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"Give the file itself: {folder / ggufs[0]}" if ggufs else "Give the folder that holds config.json"
        raise CheckpointError("holds no config.json", where=str(folder), next=hint)
    config = load_json(inside(folder, "config.json"))
    spec = spec_from_config(config, str(config_path))
    reader: WeightReader = open_safetensors(folder)
    if config.get("model_type") == "gemma3":
        config = gemma3.text_config(Config(config, str(config_path)))
        reader = RenamedReader(reader, gemma3.text_name)
    config = {key: value for key, value in config.items() if key != "auto_map"}
    tokenizer_files = hf_tokenizer.tokenizer_files(folder)
    return ModelSource(
        location,
        checked_spec(spec, reader),
        config,
        reader,
        [*_licenses(folder), *licenses],
        root=folder,
        files=[config_path, *reader.files, *tokenizer_files],
        tokenizer=lambda target: hf_tokenizer.write_tokenizer_files(folder, config, target),
    )


def _open_gguf(location: str, path: Path, licenses: Sequence[Path]) -> ModelSource:
    file = read_gguf(path)
    config = gguf_config.hf_config(file)
    spec = spec_from_config(config, str(path))
    reader = RenamedReader(
        GGUFWeightReader(file, (spec.num_heads, spec.num_kv_heads)),
        lambda name: None if name in gguf_config.ROPE_TENSORS else name,
    )
    spec = checked_spec(spec, reader)
    return ModelSource(
        location,
        spec,
        config | {"dtype": spec.dtype},
        reader,
        [*_licenses(path.parent), *licenses],
        root=path.parent,
        files=[path],
        tokenizer=lambda target: gguf_tokenizer.write_tokenizer_files(file, target),
    )
