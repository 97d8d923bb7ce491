"""What every stage is given: the recipe, the source model, its program, and the facts of this machine."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from quantkit.build.decisions import Decisions, decide
from quantkit.calibration.hub import HUB, hub_files
from quantkit.compile.targets import cache_without_kernels
from quantkit.errors import RecipeError
from quantkit.models import DecoderSpec, ModelSource, open_source, spec_from_config
from quantkit.models.safetensors_reader import load_json
from quantkit.profile import Profile, read_profile
from quantkit.program import build_program, fuse, program_from_json, program_to_json
from quantkit.program.ir import Program
from quantkit.recipe.load import LoadedRecipe
from quantkit.resources import resource
from quantkit.runtime.isa import instruction_set
from quantkit.userpath import user_path
from quantkit_kernels.cache_formats import CACHE_FORMATS

T = TypeVar("T")
_LIBRARIES = ("torch", "numpy", "scipy", "transformers", "tokenizers", "safetensors", "gguf")
_DEFAULT_LENGTH = 2048
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Outline:
    """What recipe and config.json say, before any weight is read. `program` is fused and unquantized."""

    loaded: LoadedRecipe
    spec: DecoderSpec
    program: Program
    decisions: Decisions
    max_model_len: int

    def data_files(self, section: str, key: str = "data") -> list[Path]:
        """The files that `calibration` or `gate` lists, all there; RecipeError names the line of one that is not."""
        texts: list[str] = getattr(getattr(self.loaded.recipe, section), key)
        files: list[Path] = []
        for i, text in enumerate(texts):
            if text.startswith(HUB):
                files += hub_files(text, self.loaded.where(section, key, i))
            else:
                files.append(self.loaded.file(text, section, key, i))
        return files

    def profile(self) -> Profile | None:
        """The traffic profile that calibration follows; RecipeError names its line that is wrong."""
        path = self._profile_file()
        return None if path is None else read_profile(path)

    def notes(self) -> tuple[str, ...]:
        """What the artifact will lack, a line each."""
        recipe = self.loaded.recipe
        gap = cache_without_kernels(recipe.kv_cache.format, recipe.compile.targets)
        return (gap,) if gap else ()

    def policy_name(self) -> str:
        """The gate's policy, which ships or is a file; RecipeError names the recipe's line where it is neither."""
        name = self.loaded.recipe.gate.policy
        packaged = sorted(path.stem for path in resource("evals/policies").glob("*.yaml"))
        if not Path(name).suffix and name not in packaged:
            where, known = self.loaded.where("gate", "policy"), " or ".join(packaged)
            raise RecipeError(
                f"there is no policy {name!r}", where=where, next=f"Use {known}, or the path of a YAML file"
            )
        return name

    def profile_digest(self) -> str | None:
        """sha256 of the profile's file."""
        path = self._profile_file()
        return None if path is None else _digest(path)

    def _profile_file(self) -> Path | None:
        text = self.loaded.recipe.calibration.profile
        return None if text is None else self.loaded.file(text, "calibration", "profile")


@dataclass(frozen=True)
class Context(Outline):
    """One build's givens: the outline, the opened source, and the threads that numerics run on."""

    source: ModelSource
    threads: int

    @cached_property
    def environment(self) -> dict[str, str | int]:
        """What the bytes of a build depend on beside recipe, source and our own code."""
        versions = {name: _version(name) for name in _LIBRARIES}
        facts = {"python": platform.python_version(), "machine": platform.machine(), "isa": instruction_set()}
        return {**facts, **versions, "threads": self.threads}

    @cached_property
    def source_fingerprint(self) -> str:
        """sha256 over the source's files."""
        return self.source.fingerprint()

    def data_digests(self, section: str, key: str = "data") -> list[str]:
        """sha256 of each data file."""
        return [_digest(path) for path in self.data_files(section, key)]


def open_context(loaded: LoadedRecipe) -> Context:
    """Open the source and settle everything that needs no weights; all static problems are raised here."""
    try:
        source = open_source(loaded.recipe.model.source, base=loaded.base)
    except RecipeError as error:
        where = f"{loaded.where('model', 'source')}: {error.where}"
        raise RecipeError(error.what, where=where, next=error.next) from None
    return Context(**vars(outline(loaded, source.spec)), source=source, threads=thread_count())


def outline(loaded: LoadedRecipe, spec: DecoderSpec) -> Outline:
    """The recipe laid over an architecture; raises every static problem, with the recipe's line."""
    program = fuse(build_program(spec))
    program_from_json(program_to_json(program), f"{loaded.recipe.model.source}: config.json")  # what readers refuse
    problems: list[RecipeError] = []

    def settled(what: Callable[[], T]) -> T | None:
        try:
            return what()
        except RecipeError as problem:
            problems.append(problem)
            return None

    decisions = settled(lambda: decide(loaded, program))
    length = settled(lambda: _served_length(loaded, program))
    made = Outline(loaded, spec, program, decisions or Decisions({}, "", 0.0), length or 0)
    settled(lambda: _check_cache(loaded, program))
    settled(lambda: made.data_files("calibration"))
    settled(made.profile)
    settled(lambda: made.data_files("gate"))
    settled(lambda: made.data_files("gate", "prompts"))
    settled(made.policy_name)
    if problems:
        raise RecipeError.of(problems)
    return made


def outline_without_weights(loaded: LoadedRecipe) -> Outline | None:
    """The outline from a folder that holds config.json and no weights; None for any other source."""
    folder = user_path(loaded.recipe.model.source, loaded.base, where=loaded.where("model", "source"))
    config = folder / "config.json"
    if not config.is_file() or any(path.suffix in _WEIGHT_SUFFIXES for path in folder.iterdir()):
        return None
    return outline(loaded, spec_from_config(load_json(config), str(config)))


def _served_length(loaded: LoadedRecipe, program: Program) -> int:
    """Tokens of prompt and answer together that the artifact is made for; RecipeError beyond the model's limit."""
    wanted = loaded.recipe.runtime.max_model_len
    if wanted is not None and wanted > program.max_position:
        raise RecipeError(
            f"max_model_len {wanted} exceeds the model's {program.max_position} positions",
            where=loaded.where("runtime", "max_model_len"),
        )
    return wanted or min(_DEFAULT_LENGTH, program.max_position)


def _check_cache(loaded: LoadedRecipe, program: Program) -> None:
    """RecipeError where the cache's format cannot hold the model's heads."""
    kind = CACHE_FORMATS[loaded.recipe.kv_cache.format]
    for size in sorted({kv.head_dim for kv in program.kv}):
        try:
            kind.cell(size)
        except ValueError as error:
            where = loaded.where("kv_cache", "format")
            raise RecipeError(str(error), where=where, next="Use INT8, FP8 or a float format") from None


def _digest(path: Path) -> str:
    """sha256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def thread_count() -> int:
    """OMP_NUM_THREADS when set, else the CPUs this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else len(os.sched_getaffinity(0))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
