"""PrefixCache: full blocks found again by what they hold and everything before it.

A block's hash is SHA-256 over (parent hash, its tokens); the root covers salt, artifact, KV format and block size. A
hit is therefore the same tokens after the same tokens, under the same model and tenant.
"""

from __future__ import annotations

import hashlib

from quantkit.runtime.block_pool import Block, BlockPool
from quantkit.runtime.request import Request


class PrefixCache:
    """Finds and publishes blocks of one pool.

    Args:
        pool: the blocks.
        block_size: tokens a block holds.
        identity: what the cache's content depends on besides tokens (artifact id and KV format).
        enabled: off: nothing is found, nothing published.
        check_tokens: compare tokens on every hit, for debugging; a mismatch is a RuntimeError.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, identity: str, *, enabled: bool = True, check_tokens: bool = False
    ) -> None:
        self._pool, self._block_size, self._enabled, self._check = pool, block_size, enabled, check_tokens
        self._identity = f"{identity}\0{block_size}\0"

    def find(self, request: Request) -> list[Block]:
        """The longest cached run of the request's first blocks, never covering its last token."""
        found: list[Block] = []
        if not self._enabled:
            return found
        usable = (request.num_tokens - 1) // self._block_size
        for index, block_hash in enumerate(self._hashes(request, usable)):
            block = self._pool.find(block_hash)
            if block is None:
                break
            if self._check and block.tokens != self._tokens(request, index):
                raise RuntimeError(f"block {block.block_id} was found by hash but holds other tokens")
            found.append(block)
        return found

    def publish(self, request: Request) -> None:
        """Make the blocks that the request's computed tokens have filled findable."""
        full = request.num_computed // self._block_size
        if not self._enabled or full == request.num_published:
            return
        hashes = self._hashes(request, full)
        for index in range(request.num_published, full):
            block = request.blocks[index]
            self._pool.publish(block, hashes[index])
            if self._check and block.block_hash is not None:
                block.tokens = self._tokens(request, index)
        request.num_published = full

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        hashes = request.hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else self._root(request.salt)
            hashes.append(hashlib.sha256(parent + self._tokens(request, len(hashes))).digest())
        return hashes[:count]

    def _root(self, salt: str) -> bytes:
        return hashlib.sha256((self._identity + salt).encode(errors="surrogatepass")).digest()

    def _tokens(self, request: Request, index: int) -> bytes:
        start = index * self._block_size
        return request.tokens[start : start + self._block_size].tobytes()
