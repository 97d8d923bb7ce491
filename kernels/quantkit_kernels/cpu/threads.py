"""How many threads the process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def _quota_cores(root: Path) -> float | None:
    """Cores' worth of time a cgroup (v2, else v1) grants at `root`, None where it sets no limit or cannot be read."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None


def usable_threads(cgroup: Path = _CGROUP) -> int:
    """The cores in the process's affinity mask, no more than its cgroup's CPU quota (rounded up), at least one."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota_cores(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
