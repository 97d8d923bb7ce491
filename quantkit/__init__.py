"""quantkit: quantize a language model, judge it as served, and serve it.

The package imports nothing heavy: `Engine` and `SamplingParams` are loaded when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.runtime.api import Engine
    from quantkit.runtime.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

_LAZY = {"Engine": "quantkit.runtime.api", "SamplingParams": "quantkit.runtime.sampling"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
