"""Captured graphs: one a bucket, over buffers that stay where they are, made before the engine is ready, never after.

Largest first, so that the shared pool is as large as it gets and smaller graphs live in it. A step that is smaller than
its bucket is padded: rows beyond it have slot -1 and length 0, on which every kernel returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from quantkit.runtime.buckets import Bucket, Dispatcher, Phase, Reason, StepShape
from quantkit.runtime.step import Ints, StepInputs

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before a capture: the first compiles and sets up what must not be captured, the second shows that it is done."""


class OutOfDeviceMemory(Exception):
    """A capture found no memory; the device is as it was before."""


class GraphDevice(Protocol):
    """What graphs are made with: torch on CUDA, or a recorder in tests."""

    def write(self, name: str, values: Ints) -> None:
        """Copy into the leading part of the persistent input `name`, in stream order."""
        ...

    def run(self, bucket: Bucket) -> None:
        """The bucket's step over the persistent buffers, launch by launch."""
        ...

    def capture(self, bucket: Bucket) -> Any:
        """The same, captured into the shared pool. OutOfDeviceMemory where it does not fit."""
        ...

    def replay(self, graph: Any) -> None:
        """Run a captured graph."""
        ...

    def addresses(self) -> Mapping[str, int]:
        """Where the persistent inputs and outputs lie."""
        ...


@dataclass(frozen=True)
class Captured:
    """What a capture came to."""

    captured: tuple[Bucket, ...]
    shed: tuple[Bucket, ...]


class Graphs:
    """The graphs of one executor.

    device: runs and captures. blocks: width of the block table. planned: sizes by phase, as `planned_sizes` gives
    them. graph_captures_total stays as it is once `capture` has returned.
    """

    def __init__(self, device: GraphDevice, planned: Mapping[Phase, Sequence[int]], blocks: int) -> None:
        self._device, self._planned, self._blocks = device, planned, blocks
        self._graphs: dict[Bucket, Any] = {}
        self._ready = False
        self.graph_captures_total = 0
        self.dispatcher = Dispatcher(planned, frozenset(), frozenset(), blocks)

    def capture(
        self, buckets: Sequence[Bucket], step: Callable[[int, int], None] = lambda done, total: None
    ) -> Captured:
        """Capture these buckets, once. Where memory runs out the largest not yet captured are dropped, and said.

        RuntimeError when called again, and where a buffer has moved between captures.
        """
        if self._ready:
            raise RuntimeError("graphs are captured once, before the engine is ready")
        self._ready = True
        waiting = sorted(set(buckets), key=lambda bucket: (bucket.size, bucket.phase), reverse=True)
        before, shed, total = dict(self._device.addresses()), [], len(waiting)
        while waiting:
            bucket = waiting.pop(0)
            try:
                self._write(padded(_nothing(), bucket, self._blocks))
                for _ in range(WARM_UPS):
                    self._device.run(bucket)
                self._graphs[bucket] = self._device.capture(bucket)
                self.graph_captures_total += 1
            except OutOfDeviceMemory as error:
                shed.append(bucket)
                log.warning("no graph for %s steps of %d: %s", bucket.phase, bucket.size, error)
            if dict(self._device.addresses()) != before:
                raise RuntimeError(f"buffers moved while {bucket.phase} {bucket.size} was captured")
            step(total - len(waiting), total)
        if shed:
            log.warning("memory allows graphs for %d of %d buckets; other steps run launch by launch",
                        len(self._graphs), total)  # fmt: skip
        self.dispatcher = Dispatcher(self._planned, frozenset(self._graphs), frozenset(shed), self._blocks)
        return Captured(tuple(self._graphs), tuple(shed))

    def replay(self, inputs: StepInputs) -> Bucket | Reason:
        """Replay the graph of a step, padded to its bucket; or the reason why it has none, having done nothing."""
        shape = StepShape(len(inputs.seq_lens), len(inputs.token_ids), inputs.block_table.shape[1])
        chosen = self.dispatcher.choose(shape)
        if isinstance(chosen, Bucket):
            self._write(padded(inputs, chosen, self._blocks))
            self._device.replay(self._graphs[chosen])
        return chosen

    def _write(self, inputs: StepInputs) -> None:
        for each in fields(inputs):
            self._device.write(each.name, getattr(inputs, each.name))


def padded(inputs: StepInputs, bucket: Bucket, blocks: int) -> StepInputs:
    """A step as its bucket's graph reads it; block tables `blocks` wide.

    decode: rows beyond the step are sequences of one token with slot -1 and length 0, whose logits nobody reads.
    prefill: tokens beyond it have slot -1 and belong to no sequence; a step that wants no logits computes one row's.
    """
    decodes = bucket.phase == "decode"
    sequences, tokens = bucket.size if decodes else 1, bucket.size
    starts = inputs.query_start_loc
    if decodes:
        starts = np.arange(sequences + 1, dtype=np.int32)
    elif len(starts) < 2:
        starts = np.zeros(2, np.int32)
    table = np.zeros((sequences, blocks), np.int32)
    height, width = inputs.block_table.shape
    table[:height, :width] = inputs.block_table
    return StepInputs(
        token_ids=_filled(inputs.token_ids, tokens, 0),
        positions=_filled(inputs.positions, tokens, 0),
        slot_mapping=_filled(inputs.slot_mapping, tokens, -1),
        query_start_loc=starts,
        seq_lens=_filled(inputs.seq_lens, sequences, 0),
        block_table=table,
        logits_rows=_filled(inputs.logits_rows, sequences, 0),
    )


def _filled(values: Ints, size: int, with_: int) -> Ints:
    out = np.full(size, with_, np.int32)
    out[: len(values)] = values
    return out


def _nothing() -> StepInputs:
    none = np.zeros(0, np.int32)
    return StepInputs(none, none, none, np.zeros(1, np.int32), none, np.zeros((0, 0), np.int32), none)
