"""A build killed without a chance to clean up leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

CHILD = """
import sys, time
from quantkit.parent import die_with
die_with(int(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _runs(child)
        parent.kill()
    until = time.monotonic() + 10
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(child)


def test_a_compiler_whose_parent_is_gone_compiles_nothing() -> None:
    request = {"parent": os.getppid(), "target": "sm_80", "cache": "/nonexistent", "jobs": [{"key": "never reached"}]}
    done = subprocess.run(
        [sys.executable, "-m", "quantkit.compile.worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
