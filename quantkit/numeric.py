"""Numbers as files and requests bring them."""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is an int or float, no bool, that a double holds: not NaN, Inf or a number of 400 digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def rounded_up(value: float, digits: int) -> float:
    """The least number of so many decimals that is not below `value`: what may be advised as a lower limit."""
    return math.ceil(value * 10**digits) / 10**digits
