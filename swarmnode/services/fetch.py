"""Pulls slices from a peer in blocks, several slabs at once; each is checked against the manifest before use."""

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

        Several slabs travel at once, each block by block: that fills a long link and bounds the memory to
        `slabs_in_flight` slabs and `max_flight_bytes`. Raises BadReplyError when the peer's bytes are wrong,
        ConnectionLostError when no block comes for `block_timeout_s`, StoreError when the disk refuses, and what
        `Peer.request` raises; nothing of the range is then visible.
        """
        layout = self._manifest.layers[item.layer].layout
        largest_bytes = max(tensor.n_bytes for tensor in layout.tensors)
        at_once = min(self._config.slabs_in_flight, self._config.max_flight_bytes // largest_bytes)
        limit = trio.CapacityLimiter(max(1, at_once))
        async with open_flat_nursery() as nursery:
            for expert in item.experts:
                for tensor in layout.tensors:
                    token = (expert, tensor.kind)
                    await limit.acquire_on_behalf_of(token)
                    nursery.start_soon(self._store_slab, item.layer, expert, tensor, limit, token)
        await self._threads.run(partial(self._store.commit, item))

    async def _store_slab(
        self, layer: int, expert: int, tensor: ExpertTensor, limit: trio.CapacityLimiter, token: object
    ) -> None:
        try:
            slab = await self._slab(layer, expert, tensor)
            # Hashes the bytes and writes them: not on the thread that serves everybody.
            await self._threads.run(partial(self._store.add_slab, layer, expert, tensor.kind, slab))
        finally:
            limit.release_on_behalf_of(token)

    async def _slab(self, layer: int, expert: int, tensor: ExpertTensor) -> bytearray:
        slab = bytearray()
        while len(slab) < tensor.n_bytes:
            message = SliceGet(
                model=self._manifest.model_id,
                layer=layer,
                expert=expert,
                kind=tensor.kind,
                offset=len(slab),
                length=min(self._config.block_bytes, tensor.n_bytes - len(slab)),
            )
            slab += await self._block(message)
            self._on_bytes(message.length)
        return slab

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
