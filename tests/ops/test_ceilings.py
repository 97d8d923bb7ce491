"""The ceilings that every figure is a share of: measured by each instruction set, refused for what there is none of."""

from __future__ import annotations

import pytest

from quantkit_kernels.cpu.library import ISA_BITS, library


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 128), (8, 64), (8, 128)])
def test_integer_products_have_a_ceiling(isa: str, bits: int, group: int) -> None:
    assert library().qk_bench_dot(ISA_BITS[isa], 1, bits, group, 1) > 1e8


@pytest.mark.parametrize(("threads", "bits", "group"), [(0, 4, 64), (257, 4, 64), (1, 5, 64), (1, 4, 48)])
def test_there_is_none_of_other_kinds(isa: str, threads: int, bits: int, group: int) -> None:
    assert library().qk_bench_dot(ISA_BITS[isa], threads, bits, group, 1) == 0
