"""The stage store never shows half a stage, whatever happens to the build that writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.build.files import disk_full_explained, exchange_folders
from quantkit.build.store import Store, stage_cost, stage_facts
from quantkit.errors import PreflightError

KEY = "a" * 64


def keep(store: Store, key: str = KEY, text: str = "whole") -> Path:
    (store.begin("demo", key) / "file").write_text(text)
    return store.keep("demo", key, {"x": 1}, {"found": 2}, seconds=1.0)


def test_a_stage_is_found_only_once_it_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.begin("demo", KEY) / "file").write_text("half")
    assert store.find("demo", KEY) is None
    folder = keep(store)
    assert store.find("demo", KEY) == folder
    assert stage_facts(folder) == {"found": 2}
    assert stage_cost(folder) == {"seconds": 1.0}


def test_another_key_is_another_stage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keep(store)
    assert store.find("demo", "b" * 64) is None
    assert store.find("demo", KEY[:-1] + "b") is None, "the whole key counts, not the part in the folder's name"


@pytest.mark.parametrize("damage", ["cut", "gone", "record"])
def test_a_damaged_stage_does_not_count_and_can_be_made_again(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    folder = keep(store)
    if damage == "cut":
        (folder / "file").write_text("who")
    elif damage == "gone":
        (folder / "file").unlink()
    else:
        (folder / "stage.json").write_text("{")
    assert store.find("demo", KEY) is None
    assert (keep(store) / "file").read_text() == "whole"
    assert store.find("demo", KEY) is not None


def test_cleaning_keeps_what_is_live_and_one_generation_more(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keys = [letter * 64 for letter in "abcd"]
    for age, key in enumerate(keys):
        os.utime(keep(store, key), (1000 + age, 1000 + age))
    (store.begin("demo", "e" * 64) / "left").write_text("by a killed build")
    (store.begin("demo", "f" * 64) / "left").write_text("by a killed build")
    store.clean([("demo", keys[0]), ("demo", "e" * 64)])
    assert [store.find("demo", key) is not None for key in keys] == [True, False, False, True]
    assert (store.begin("demo", "e" * 64) / "left").exists(), "the live unfinished stage goes on from what it has"
    assert not (store.begin("demo", "f" * 64) / "left").exists()


HOLD = "import sys, time; from pathlib import Path; from quantkit.build.store import Store\n"
HOLD += "with Store(Path(sys.argv[1])).locked(): print('held', flush=True); time.sleep(60)"


def test_a_second_build_is_refused_with_the_first_ones_process_id(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(PreflightError, match=rf"another build \(process {holder.pid}\)") as caught,
            Store(tmp_path).locked(wait_s=0.1),
        ):
            raise AssertionError("entered a folder that another build holds")
        assert caught.value.exit_code == 3
    finally:
        holder.kill()
        holder.wait()
    with Store(tmp_path).locked(wait_s=0.1):
        pass  # the lock of a killed build is free


def test_a_second_build_goes_on_when_the_first_ends_in_time(tmp_path: Path) -> None:
    code = HOLD.replace("60", "0.5")
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    with Store(tmp_path).locked(wait_s=20):
        pass
    assert holder.wait() == 0


def test_exchanged_folders_swap_whole(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    exchange_folders(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert (tmp_path / "new" / "file").read_text() == "old"


KILLED = """
import sys, time
from pathlib import Path
from quantkit.build.files import finish_file
from quantkit.build.store import Store
store = Store(Path(sys.argv[1]))
with store.locked():
    part = store.begin("demo", "a" * 64)
    for i in range(5):
        if not (part / f"{i}").exists():
            (part / f".part-{i}").write_text(f"layer {i}")
            finish_file(part / f".part-{i}", part / f"{i}")
            print(i, flush=True)
            time.sleep(0.2)
    store.keep("demo", "a" * 64, {}, {})
"""


def test_a_killed_stage_goes_on_from_its_last_whole_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    while first.stdout.readline() != "2\n":
        pass
    first.kill()
    first.wait()
    assert Store(tmp_path).find("demo", KEY) is None
    second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert second.stdout.split() == ["3", "4"]
    folder = Store(tmp_path).find("demo", KEY)
    assert folder is not None
    assert sorted(p.name for p in folder.iterdir()) == ["0", "1", "2", "3", "4", "stage.json"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB (needs root, as CI and containers have)."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_is_told_with_what_is_needed_and_leaves_the_store_intact(small_disk: Path) -> None:
    store = Store(small_disk)
    folder = keep(store, "b" * 64)
    with (
        pytest.raises(PreflightError, match=r"disk full: quantizing needs about 2 MB, \d+ MB are free in ") as caught,
        disk_full_explained("quantizing", store.folder, 2_000_000),
    ):
        (store.begin("demo", KEY) / "file").write_bytes(bytes(2_000_000))
    assert caught.value.exit_code == 3
    assert store.find("demo", KEY) is None
    assert store.find("demo", "b" * 64) == folder
    store.clean([("demo", "b" * 64)])
    assert json.loads((keep(store) / "stage.json").read_text())["files"] == {"file": 5}


def test_any_other_failure_passes_through(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_full_explained("quantizing", tmp_path, 1):
        raise PermissionError(13, "no")


def test_waiting_for_a_lock_ends_at_its_limit(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    begun = time.monotonic()
    try:
        with pytest.raises(PreflightError), Store(tmp_path).locked(wait_s=0.3):
            pass
        assert 0.3 <= time.monotonic() - begun < 5
    finally:
        holder.kill()
        holder.wait()
