"""BlockPool: every KV block there is, who holds it, and in which order idle ones are given out again.

Block 0 is null: padding points at it, nobody owns it. A block is used (referenced), cached (idle, its content still
addressable by hash) or free (idle, content worthless); free + cached + used = total at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Block:
    """One block of the paged cache. Idle ones are linked into the free list through `previous` and `next`."""

    __slots__ = ("block_hash", "block_id", "next", "previous", "ref_count", "tokens")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: bytes | None = None
        self.ref_count = 0
        self.tokens: bytes | None = None
        """What the block holds, kept only where hits are checked token by token."""
        self.previous: Block = self
        self.next: Block = self


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; the null block is not counted."""

    free: int
    cached: int
    used: int
    total: int


class BlockPool:
    """`num_blocks` blocks, the null block included. All operations are O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, got {num_blocks}")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.total = num_blocks - 1
        self.num_idle = 0
        """Blocks nobody references: free ones and cached ones."""
        self._num_cached = 0
        self._by_hash: dict[bytes, Block] = {}
        self._ends = Block(-1)  # sentinel: its next is given out first, its previous last
        for block in self.blocks[1:]:
            self._link(block, before=self._ends)

    def take(self, count: int) -> list[Block]:
        """`count` blocks for one owner, evicting contents from the longest idle on; the caller checks for room."""
        if count > self.num_idle:
            raise RuntimeError(f"{count} blocks wanted, {self.num_idle} idle")
        taken = []
        for _ in range(count):
            block = self._ends.next
            self._unlink(block)
            self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[Block]) -> None:
        """One more owner for each of `blocks`."""
        for block in blocks:
            if block.ref_count == 0:
                self._unlink(block)
                self._num_cached -= 1
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """One owner less for each of a sequence's `blocks`; its tail is given out again before its head."""
        for block in reversed(blocks):
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.block_hash is None:  # nothing is lost by reusing it: first in line
                self._link(block, before=self._ends.next)
            else:
                self._link(block, before=self._ends)
                self._num_cached += 1

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Make a full block findable; where another already holds that content, the first stays the one found."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def find(self, block_hash: bytes) -> Block | None:
        """The block with that content, used or idle."""
        return self._by_hash.get(block_hash)

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        return PoolCounts(
            free=self.num_idle - self._num_cached,
            cached=self._num_cached,
            used=self.total - self.num_idle,
            total=self.total,
        )

    def idle_order(self) -> list[int]:
        """Ids of the idle blocks in the order they would be given out."""
        order, block = [], self._ends.next
        while block is not self._ends:
            order.append(block.block_id)
            block = block.next
        return order

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = block.tokens = None
            self._num_cached -= 1

    def _link(self, block: Block, before: Block) -> None:
        block.previous, block.next = before.previous, before
        before.previous.next = block
        before.previous = block
        self.num_idle += 1

    def _unlink(self, block: Block) -> None:
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = block
        self.num_idle -= 1
