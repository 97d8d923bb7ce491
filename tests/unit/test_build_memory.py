"""Peak memory counts anonymous pages of the whole process tree, of the span since it was last taken."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from pathlib import Path

from quantkit.build.memory import PeakMemory, anonymous_bytes

SIZE = 64 << 20


def test_a_peak_that_is_over_is_still_seen_and_then_forgotten() -> None:
    with PeakMemory(interval_s=0.01) as memory:
        base = memory.take()
        block = bytearray(SIZE)
        time.sleep(0.1)
        del block
        assert memory.take() >= base + SIZE * 0.9
        assert memory.take() < base + SIZE * 0.5


def test_children_count() -> None:
    base = anonymous_bytes()
    code = f"block = bytearray(b'x') * {SIZE}; print('held', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    held = anonymous_bytes()
    child.communicate("\n")
    assert held >= base + SIZE * 0.9


def test_a_child_that_has_only_its_parents_memory_yet_does_not_count_again() -> None:
    code = f"""
import os
block, (gate, opener) = bytearray(b"x") * {SIZE}, os.pipe()
if not os.fork():
    os.read(gate, 1)
    os._exit(0)
print("held", flush=True)
input()
os.write(opener, b"x")
os.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    held = anonymous_bytes(parent.pid)
    parent.communicate("\n")
    assert SIZE * 0.9 <= held < SIZE * 1.5


def test_pages_of_a_file_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * SIZE)
    base = anonymous_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, SIZE, 4096)) == (SIZE // 4096) * ord("x")
        assert anonymous_bytes() < base + SIZE * 0.5
