"""Finding and loading the shared library, and choosing the instruction set it runs."""

from __future__ import annotations

import ctypes
import functools
import os
from importlib import metadata
from pathlib import Path

ABI_VERSION = 5
LIBRARY_NAME = "libquantkit_cpu.so"
ISA_BITS = {
    "amx": 32,
    "avx512_vnni": 16,
    "avx512": 4,
    "avx_vnni": 8,
    "avx2": 2,
    "neon_i8mm": 256,
    "neon_dotprod": 128,
    "neon": 64,
    "portable": 1,
}
"""Instruction sets, best first, by their bit in the library's mask."""


class Node(ctypes.Structure):
    """One op of a step; mirrors `Node` in src/abi.h."""

    _fields_ = (
        ("op", ctypes.c_int32),
        ("i", ctypes.c_int32 * 15),
        ("f", ctypes.c_float * 8),
        ("p", ctypes.c_void_p * 16),
    )


def checkout_build_folder() -> Path | None:
    """`build/cpu` of the checkout this package runs from, None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    return root / "build" / "cpu" if (root / "pyproject.toml").is_file() else None


def _candidates() -> list[Path]:
    """Libraries that exist: the one the user names, or those of a developer's build, the package and an editable
    install (which does not put it beside `__file__`), the newest first.
    """
    if named := os.environ.get("QUANTKIT_CPU_LIBRARY"):
        return [Path(named)] if Path(named).is_file() else []
    folders = [Path(__file__).resolve().parent, checkout_build_folder()]
    places = [folder / LIBRARY_NAME for folder in folders if folder is not None]
    try:
        files = metadata.files("quantkit") or []
    except metadata.PackageNotFoundError:
        files = []
    places += [Path(str(file.locate())) for file in files if file.name == LIBRARY_NAME]
    return sorted((path for path in places if path.is_file()), key=lambda path: path.stat().st_mtime, reverse=True)


def _declare(library: ctypes.CDLL) -> None:
    i32, i64, f64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    signatures = {
        "qk_isa_mask": (i32, ()),
        "qk_last_error": (ctypes.c_char_p, ()),
        "qk_list_create": (pointer, (pointer, i32, i32, i32)),
        "qk_list_destroy": (None, (pointer,)),
        "qk_list_run": (i32, (pointer, i32, i32, i32)),
        "qk_list_time": (i32, (pointer, i32, i32, i32, pointer)),
        "qk_sampler_create": (pointer, (i32, i32, i32)),
        "qk_sampler_destroy": (None, (pointer,)),
        "qk_sampler_run": (i32, (pointer, pointer, pointer, i32, i32, pointer, pointer, pointer)),
        "qk_packed_bytes": (i64, (i32, i64, i64, i64)),
        "qk_pack": (None, (i32, pointer, i64, i64, i64, pointer)),
        "qk_bench_read": (f64, (i32, i32, i64, i32)),
        "qk_bench_fma": (f64, (i32, i32, i32)),
        "qk_bench_dot": (f64, (i32, i32, i32, i32, i32)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why; the search happens once a process."""
    reason = f"{LIBRARY_NAME} is not built; `python -m quantkit_kernels.cpu.build` or `pip install .` builds it"
    for path in _candidates():
        try:
            library = ctypes.CDLL(str(path))
            version = library.qk_abi_version()
        except (OSError, AttributeError) as error:
            reason = f"{path} cannot be loaded: {error}"
            continue
        if version == ABI_VERSION:
            _declare(library)
            return library, str(path)
        reason = f"{path} has ABI {version}, this package needs {ABI_VERSION}: build it again"
    return None, reason


def available() -> tuple[bool, str]:
    """Whether the native kernels can be used: (True, path of the library) or (False, why not)."""
    library, note = _load()
    return library is not None, note


def library() -> ctypes.CDLL:
    """The loaded library; RuntimeError says why there is none."""
    loaded, note = _load()
    if loaded is None:
        raise RuntimeError(f"no native CPU kernels: {note}")
    return loaded


def supported_isas() -> list[str]:
    """Instruction sets this build holds and this processor and operating system run, best first."""
    mask = library().qk_isa_mask()
    return [name for name, bit in ISA_BITS.items() if mask & bit]


def isa() -> str:
    """The instruction set in use: the best one, or what QUANTKIT_CPU_ISA names.

    Raises ValueError where the variable names one that is unknown or cannot run here.
    """
    here = supported_isas()
    wanted = os.environ.get("QUANTKIT_CPU_ISA")
    if not wanted:
        return here[0]
    if wanted not in here:
        known = "cannot run here" if wanted in ISA_BITS else "is unknown"
        raise ValueError(f"QUANTKIT_CPU_ISA={wanted} {known}; this machine runs {', '.join(here)}")
    return wanted


def last_error() -> str:
    """What the last failed native call on this thread complained of."""
    return str(library().qk_last_error().decode())
