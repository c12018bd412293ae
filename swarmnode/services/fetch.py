"""Pulls slices from a peer in blocks, several slabs at once; each is checked against the manifest before use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from swarmnode.compute.layout import ExpertTensor
from swarmnode.config import StoreConfig
from swarmnode.errors import BadReplyError
from swarmnode.net.peer import Peer
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

    async def fetch(self, item: ExpertRange) -> None:
        """Fetch and commit one range; it becomes visible only when the hash of every slab was right.

        Several slabs travel at once, each block by block: that fills a long link and bounds the memory to
        `slabs_in_flight` slabs. Raises BadReplyError when the peer's bytes are wrong, StoreError when the disk
        refuses, and what `Peer.request` raises; nothing of the range is then visible.
        """
        limit = trio.CapacityLimiter(self._config.slabs_in_flight)
        layout = self._manifest.layers[item.layer].layout
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
            length = min(self._config.block_bytes, tensor.n_bytes - len(slab))
            message = SliceGet(
                model=self._manifest.model_id,
                layer=layer,
                expert=expert,
                kind=tensor.kind,
                offset=len(slab),
                length=length,
            )
            reply, body = await self._peer.request(message)
            if not isinstance(reply, Slice) or reply.offset != len(slab) or len(body) != length:
                raise BadReplyError(f"asked for {message}, got {reply} and {len(body)} bytes")
            slab += body
            self._on_bytes(length)
        return slab
