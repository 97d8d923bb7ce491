from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from quantkit_kernels import cpu
from quantkit_kernels.arrays import BFLOAT16, Array

UINT8, INT32 = np.dtype(np.uint8), np.dtype(np.int32)


@pytest.mark.parametrize("allocate", [cpu.streamed, cpu.zeroed])
@pytest.mark.parametrize("dtype", [UINT8, np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), (3000, 4001)])
def test_memory_is_zeroed_aligned_writable_and_of_its_shape(
    allocate: cpu.Allocate, dtype: np.dtype, shape: tuple[int, ...]
) -> None:
    array = allocate(*shape, dtype=dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert not array.size or array.ctypes.data % 64 == 0
    assert not array.view(np.uint8).any()


def filled(array: Array, value: int) -> Array:
    array.fill(value)
    return array


def test_pieces_of_one_chunk_do_not_overlap() -> None:
    pieces = [filled(cpu.streamed(1000 + i, dtype=INT32), i) for i in range(50)]
    assert all((piece == i).all() for i, piece in enumerate(pieces))


@pytest.mark.parametrize("allocate", [cpu.streamed, cpu.zeroed])
def test_memory_goes_with_its_last_view(allocate: cpu.Allocate) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    array = filled(allocate(256 << 20, dtype=UINT8), 1)
    alive = weakref.ref(array)
    part = array[5:9]
    assert resident() - before > 200 << 20
    del array
    gc.collect()
    assert alive() is None
    assert part.tolist() == [1, 1, 1, 1]
    del part
    gc.collect()
    assert resident() - before < 50 << 20


def resident(kind: str) -> int:
    """Bytes this process holds: `RssAnon`, `RssFile` or `RssShmem`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


@pytest.mark.parametrize("allocate", [cpu.streamed, cpu.zeroed])
def test_memory_is_the_process_own(allocate: cpu.Allocate) -> None:
    before, shared = resident("RssAnon"), resident("RssShmem")
    array = filled(allocate(64 << 20, dtype=UINT8), 1)
    assert resident("RssAnon") - before > 60 << 20
    assert resident("RssShmem") == shared
    child = os.fork()
    if child == 0:
        array[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert array[0] == 1


def test_a_spill_is_zeroed_aligned_and_no_anonymous_memory(tmp_path: Path) -> None:
    spill = cpu.Spill(tmp_path)
    before = resident("RssAnon")
    arrays = [spill.array(3000, 4001, dtype=INT32) for _ in range(4)]
    assert all(a.shape == (3000, 4001) and a.ctypes.data % 64 == 0 and not a.any() for a in arrays)
    for i, array in enumerate(arrays):
        array.fill(i)
    assert all((array == i).all() for i, array in enumerate(arrays))
    assert resident("RssAnon") - before < 64 << 20  # of 183 MiB
    assert list(tmp_path.iterdir()) == []  # nothing for a kill to leave behind
    assert spill.array(0, 4, dtype=BFLOAT16).shape == (0, 4)


def test_many_spilled_arrays_share_few_file_descriptors(tmp_path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    spill, before = cpu.Spill(tmp_path), opened()
    arrays = [filled(spill.array(1 << 15, dtype=UINT8), i % 250) for i in range(2000)]
    assert opened() - before < 8
    assert all(a.ctypes.data % 64 == 0 and (a == i % 250).all() for i, a in enumerate(arrays))
    del spill
    assert (arrays[1999] == 249).all()  # an array keeps its memory


def test_a_spilled_matrix_is_packed_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    codes, zero = rng.integers(-8, 8, (70, 128), np.int8), rng.integers(-8, 8, (70, 2), np.int8)
    scale = rng.random((70, 2), np.float32) + np.float32(0.1)
    plain = cpu.pack_matrix(codes, bits=4, scale=scale, zero=zero)
    spilled = cpu.pack_matrix(codes, bits=4, scale=scale, zero=zero, allocate=cpu.Spill(tmp_path).array)
    for part in ("data", "scale", "zero"):
        assert np.array_equal(getattr(plain, part), getattr(spilled, part))
