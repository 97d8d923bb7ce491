"""What every stage is given: the recipe, the source model, its program, and the facts of this machine."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.build.decisions import Decisions, decide
from quantkit.models import open_source
from quantkit.program import build_program, fuse
from quantkit.program.ir import Program
from quantkit.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from quantkit.models import ModelSource

_LIBRARIES = ("torch", "numpy", "scipy", "transformers", "tokenizers", "safetensors", "gguf")


@dataclass(frozen=True)
class Context:
    """One build's givens. `program` is fused and unquantized; `threads` is what numerics run on."""

    loaded: LoadedRecipe
    source: ModelSource
    program: Program
    decisions: Decisions
    threads: int

    @cached_property
    def environment(self) -> dict[str, str | int]:
        """What the bytes of a build depend on beside recipe, source and our own code."""
        from quantkit_kernels import cpu

        versions = {name: _version(name) for name in _LIBRARIES}
        facts = {"python": platform.python_version(), "machine": platform.machine(), "isa": cpu.isa()}
        return {**facts, **versions, "threads": self.threads}

    @cached_property
    def source_fingerprint(self) -> str:
        """sha256 over the source's files."""
        return self.source.fingerprint()

    def data_files(self, section: str) -> list[Path]:
        """The JSONL files of `calibration` or `gate`, all there; RecipeError names the line of one that is not."""
        texts = self.loaded.recipe.calibration.data if section == "calibration" else self.loaded.recipe.gate.data
        return [self.loaded.file(text, section, "data", i) for i, text in enumerate(texts)]

    def data_digests(self, section: str) -> list[str]:
        """sha256 of each data file."""
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.data_files(section)]


def open_context(loaded: LoadedRecipe) -> Context:
    """Open the source and settle everything that needs no weights; all static problems are raised here."""
    source = open_source(loaded.recipe.model.source, base=loaded.base)
    program = fuse(build_program(source.spec))
    return Context(loaded, source, program, decide(loaded, program), thread_count())


def thread_count() -> int:
    """OMP_NUM_THREADS when set, else the CPUs this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else len(os.sched_getaffinity(0))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
