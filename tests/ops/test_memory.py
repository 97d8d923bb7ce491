from __future__ import annotations

import gc
import weakref

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
