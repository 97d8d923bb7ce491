"""Packed words are compressed-tensors' own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError
from quantkit.formats.packing import pack_int32, unpack_int32, words
from quantkit_kernels.tensors import as_array, as_tensor

cases = given(
    st.integers(0, 2**31 - 1), st.sampled_from([4, 8]), st.integers(1, 9), st.integers(1, 70), st.sampled_from([0, 1])
)


def _codes(seed: int, bits: int, rows: int, columns: int) -> torch.Tensor:
    low = -(2 ** (bits - 1))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, -low, (rows, columns), dtype=torch.int8, generator=generator)


@settings(max_examples=60, deadline=None)
@cases
def test_words_equal_those_of_compressed_tensors(seed, bits, rows, columns, dim):
    codes = _codes(seed, bits, rows, columns)
    ours = pack_int32(as_array(codes), bits, dim=dim)
    assert torch.equal(as_tensor(ours), pack_to_int32(codes, bits, packed_dim=dim))


@settings(max_examples=60, deadline=None)
@cases
def test_words_of_compressed_tensors_unpack_to_the_same_codes(seed, bits, rows, columns, dim):
    codes = _codes(seed, bits, rows, columns)
    packed = pack_to_int32(codes, bits, packed_dim=dim)
    ours = as_tensor(unpack_int32(as_array(packed), bits, (rows, columns), dim=dim))
    assert torch.equal(ours, codes)
    if dim == 1:  # down the rows their reader trips over a single word
        assert torch.equal(ours, unpack_from_int32(packed, bits, codes.shape))


def test_a_row_takes_the_fewest_words_that_hold_it():
    assert [words(k, 4) for k in (1, 8, 9, 576)] == [1, 1, 2, 72]
    assert words(577, 8) == 145


def test_codes_too_wide_for_their_bits_are_refused():
    with pytest.raises(CheckpointError, match="do not fit 4 bits"):
        pack_int32(np.array([[8]], np.int8), 4)


@pytest.mark.parametrize("bad", [np.zeros((2, 8)), np.zeros(8, np.int8)])
def test_only_int8_matrices_are_packed(bad):
    with pytest.raises(CheckpointError, match="int8"):
        pack_int32(bad, 4)


@pytest.mark.parametrize("shape", [(2, 9), (3, 8), (2, 0)])
def test_words_that_do_not_match_the_shape_are_refused(shape):
    with pytest.raises(CheckpointError, match="takes int32"):
        unpack_int32(np.zeros((2, 1), np.int32), 4, shape)
