from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from quantkit_kernels import cpu


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), (3000, 4001)])
def test_streamed_memory_is_zeroed_aligned_and_of_its_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = cpu.streamed_tensor(*shape, dtype=dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.any()


def test_pieces_of_one_chunk_do_not_overlap() -> None:
    pieces = [cpu.streamed_tensor(1000 + i, dtype=torch.int32).fill_(i) for i in range(50)]
    assert all((piece == i).all() for i, piece in enumerate(pieces))


def test_memory_goes_with_its_last_tensor() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    tensor = cpu.streamed_tensor(256 << 20, dtype=torch.uint8).fill_(1)
    alive = weakref.ref(tensor)
    part = tensor[5:9]
    assert resident() - before > 200 << 20
    del tensor
    gc.collect()
    assert alive() is None
    assert part.tolist() == [1, 1, 1, 1]
    del part
    gc.collect()
    assert resident() - before < 50 << 20


def resident(kind: str) -> int:
    """Bytes this process holds: `RssAnon` or `RssFile`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def test_a_spill_is_zeroed_aligned_and_no_anonymous_memory(tmp_path: Path) -> None:
    spill = cpu.Spill(tmp_path)
    before = resident("RssAnon")
    tensors = [spill.tensor(3000, 4001, dtype=torch.int32) for _ in range(4)]
    assert all(t.shape == (3000, 4001) and t.data_ptr() % 64 == 0 and not t.any() for t in tensors)
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))
    assert resident("RssAnon") - before < 64 << 20  # of 183 MiB
    assert list(tmp_path.iterdir()) == []  # nothing for a kill to leave behind
    assert spill.tensor(0, 4, dtype=torch.float16).shape == (0, 4)


def test_many_spilled_tensors_share_few_file_descriptors(tmp_path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    spill, before = cpu.Spill(tmp_path), opened()
    tensors = [spill.tensor(1 << 15, dtype=torch.uint8).fill_(i % 250) for i in range(2000)]
    assert opened() - before < 8
    assert all(t.data_ptr() % 64 == 0 and bool((t == i % 250).all()) for i, t in enumerate(tensors))
    del spill
    assert bool((tensors[1999] == 249).all())  # a tensor keeps its memory


def test_a_spilled_matrix_is_packed_alike(tmp_path: Path) -> None:
    codes = torch.randint(-8, 8, (70, 128), dtype=torch.int8)
    scale, zero = torch.rand(70, 2) + 0.1, torch.randint(-8, 8, (70, 2), dtype=torch.int8)
    plain = cpu.pack_matrix(codes, bits=4, scale=scale, zero=zero)
    spilled = cpu.pack_matrix(codes, bits=4, scale=scale, zero=zero, allocate=cpu.Spill(tmp_path).tensor)
    for part in ("data", "scale", "zero"):
        assert torch.equal(getattr(plain, part), getattr(spilled, part))
