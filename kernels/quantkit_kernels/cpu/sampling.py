"""Native sampling: one call draws a token for every row of a step. See `ops.sample` for what is computed."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quantkit_kernels.cpu.library import ISA_BITS, last_error, library
from quantkit_kernels.cpu.library import isa as default_isa
from quantkit_kernels.cpu.threads import usable_threads
from quantkit_kernels.ops.sample import GREEDY, Sampled, SampleRow

_MASK = 2**64 - 1
_ROW = struct.Struct("4P4id2fd2i2d2Q")
"""`SampleRow` of src/abi.h."""
_NO_ADJUSTMENTS = (0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0.0, 0.0)


class Sampler:
    """Draws over a vocabulary of `vocab_size`, its scratch allocated once. One caller at a time.

    A row's draw depends on that row alone: not on its batch, the number of threads or the instruction set.

    threads: None for all the process may use; as many as the step's `CallList` has, to share its team. isa: None for
    the best one (see `quantkit_kernels.cpu.isa`).
    """

    def __init__(self, vocab_size: int, threads: int | None = None, isa: str | None = None) -> None:
        self._vocab_size, self._library = vocab_size, library()
        handle = self._library.qk_sampler_create(
            vocab_size, ISA_BITS[isa or default_isa()], usable_threads() if threads is None else threads
        )
        if not handle:
            raise ValueError(last_error())
        self._handle = handle
        weakref.finalize(self, self._library.qk_sampler_destroy, handle)

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled]:
        """One draw for each row of `logits` float32 `[R, V]`.

        Raises:
            ValueError: logits of another type, shape or layout.
            IndexError: an id outside the vocabulary; nothing has been drawn then.
        """
        count = len(rows)
        if logits.dtype != np.float32 or not logits.flags.c_contiguous or logits.shape != (count, self._vocab_size):
            raise ValueError(f"logits must be contiguous float32 [{count}, {self._vocab_size}]")
        kept: list[NDArray] = []  # what pointers point to
        asked = b"".join([_GREEDY if row is GREEDY else _native(row, kept) for row in rows])
        wanted = [row.logprobs for row in rows if row.logprobs is not None]
        tokens = np.empty(count, np.int32)
        outputs: list[NDArray] = [tokens]
        if wanted:
            outputs += [np.empty((count, 1 + max(wanted))), np.empty((count, max(wanted)), np.int32)]
        addresses = [_address(array) for array in outputs] + [None] * (3 - len(outputs))
        most = max(wanted, default=0)
        if self._library.qk_sampler_run(self._handle, _address(logits), asked, count, most, *addresses):
            raise IndexError(last_error())
        drawn = [Sampled(token if token >= 0 else None) for token in tokens.tolist()]
        for index, row in enumerate(rows if wanted else ()):
            if row.logprobs is not None and drawn[index].token is not None:
                chosen, *best = outputs[1][index, : 1 + min(row.logprobs, self._vocab_size)].tolist()
                drawn[index] = Sampled(drawn[index].token, chosen, outputs[2][index, : len(best)].tolist(), best)
        return drawn


def _native(row: SampleRow, kept: list[NDArray]) -> bytes:
    """`row` as the library takes it; arrays made for it are appended to `kept`."""
    adjusts = len(row.tokens) or row.bias or row.banned
    return _ROW.pack(
        *(_adjustments(row, kept) if adjusts else _NO_ADJUSTMENTS),
        row.temperature,
        row.top_k,
        -1 if row.logprobs is None else row.logprobs,
        row.top_p,
        row.min_p,
        row.seed & _MASK,
        row.position,
    )


def _adjustments(row: SampleRow, kept: list[NDArray]) -> tuple:
    def held(values: NDArray) -> int:
        kept.append(values)
        return _address(values)

    bias, banned = row.bias, row.banned
    return (
        held(np.fromiter(bias.keys(), np.int32, len(bias))) if bias else 0,
        held(np.fromiter(bias.values(), np.float32, len(bias))) if bias else 0,
        held(np.ascontiguousarray(row.tokens, np.int32)),
        held(np.fromiter(banned, np.int32, len(banned))) if banned else 0,
        len(bias),
        min(row.prompt, len(row.tokens)),
        len(row.tokens),
        len(banned),
        row.repetition,
        row.presence,
        row.frequency,
    )


def _address(array: NDArray) -> int:
    return int(array.ctypes.data)


_GREEDY = _native(GREEDY, [])
