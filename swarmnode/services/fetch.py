"""Pulls slices from a peer in blocks, several at once; each slab is checked against the manifest before use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from swarmnode.compute.layout import ExpertTensor
from swarmnode.config import StoreConfig
from swarmnode.errors import BadReplyError
from swarmnode.net.peer import Peer
from swarmnode.services.ask import no_answer
from swarmnode.services.nursery import open_flat_nursery
from swarmnode.services.runners import Runner
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Slice, SliceGet


class _Slab:
    """One expert's part of one tensor, on its way; a block counts when it has come."""

    def __init__(self, layer: int, expert: int, tensor: ExpertTensor) -> None:
        self.layer = layer
        self.expert = expert
        self.kind = tensor.kind
        self.data = bytearray(tensor.n_bytes)
        self.missing_bytes = tensor.n_bytes

    def put(self, offset: int, block: memoryview) -> None:
        self.data[offset : offset + len(block)] = block
        self.missing_bytes -= len(block)


class SliceFetcher:
    """Fetches ranges of experts from one peer into a store. `on_bytes` is told of every block that arrived."""

    def __init__(
        self,
        peer: Peer,
        manifest: Manifest,
        store: SliceStore,
        threads: Runner,
        config: StoreConfig,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._peer = peer
        self._manifest = manifest
        self._store = store
        self._threads = threads
        self._config = config
        self._on_bytes = on_bytes
        self._waits: set[trio.CancelScope] = set()
        """One for each block that is under way."""

    async def fetch(self, item: ExpertRange) -> None:
        """Fetch and commit one range; it becomes visible only when the hash of every slab was right.

        Blocks are asked for in order, several at once, across the ends of slabs: that fills a long link, and the memory
        is bounded by `max_flight_bytes` (or one slab): the slabs that are not whole, or not on disk yet. Raises
        BadReplyError when the peer's bytes are wrong, ConnectionLostError when no block comes for `block_timeout_s`,
        StoreError when the disk refuses, and what `Peer.request` raises; nothing of the range is then visible.
        """
        config = self._config
        layout = self._manifest.layers[item.layer].layout
        largest_bytes = max(tensor.n_bytes for tensor in layout.tensors)
        slabs = trio.Semaphore(max(1, min(config.blocks_in_flight, config.max_flight_bytes // largest_bytes)))
        blocks = trio.Semaphore(config.blocks_in_flight)
        async with open_flat_nursery() as nursery:
            for expert in item.experts:
                for tensor in layout.tensors:
                    await slabs.acquire()
                    slab = _Slab(item.layer, expert, tensor)
                    for offset in range(0, tensor.n_bytes, config.block_bytes):
                        await blocks.acquire()
                        nursery.start_soon(self._fetch_block, slab, offset, blocks, slabs)
                    del slab
        await self._threads.run(partial(self._store.commit, item))

    async def _fetch_block(
        self, slab: _Slab, offset: int, blocks: trio.Semaphore, slabs: trio.Semaphore
    ) -> None:
        """One block into its slab; the last one to come stores it. A failure ends the whole fetch."""
        message = SliceGet(
            model=self._manifest.model_id,
            layer=slab.layer,
            expert=slab.expert,
            kind=slab.kind,
            offset=offset,
            length=min(self._config.block_bytes, len(slab.data) - offset),
        )
        slab.put(offset, await self._block(message))
        blocks.release()
        self._on_bytes(message.length)
        if slab.missing_bytes == 0:
            # Hashes the bytes and writes them: not on the thread that serves everybody.
            await self._threads.run(
                partial(self._store.add_slab, slab.layer, slab.expert, slab.kind, slab.data)
            )
            slabs.release()

    async def _block(self, message: SliceGet) -> memoryview:
        """The bytes asked for. They have as long as any other block needs, and `block_timeout_s` on top."""
        timeout_s = self._config.block_timeout_s
        with trio.CancelScope(deadline=trio.current_time() + timeout_s) as scope:
            self._waits.add(scope)
            try:
                reply, body = await self._peer.request(message)
            finally:
                self._waits.discard(scope)
        if scope.cancelled_caught:
            raise no_answer(self._peer, message, timeout_s)
        if not isinstance(reply, Slice) or reply.offset != message.offset or len(body) != message.length:
            raise BadReplyError(f"asked for {message}, got {reply} and {len(body)} bytes")
        for other in self._waits:
            other.deadline = trio.current_time() + timeout_s
        return body
