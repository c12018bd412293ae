"""Pulls slices in blocks from several peers at once; each slab is checked against the manifest before it is used.

The decisions are `schedule.blocks` (whom to ask for what) and `schedule.blame` (whose bytes were wrong); this file
asks, writes what comes to disk at once, and commits the range when every slab of it is right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from swarmnode.config import StoreConfig
from swarmnode.errors import BadReplyError, ConnectionLostError, RemoteError, RequestRefusedError, StoreError
from swarmnode.identity import NodeId
from swarmnode.schedule.blame import Suspects
from swarmnode.schedule.blocks import BlockScheduler, Standing
from swarmnode.services.nursery import open_flat_nursery
from swarmnode.services.runners import Runner
from swarmnode.weights.incoming import SlabKey
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Message, Slice, SliceGet

log = logging.getLogger(__name__)

Block = tuple[SlabKey, int]
"""A slab and an offset in it."""


class Source(Protocol):
    """Someone who may hold slices. A Peer is one; services.bulk_links makes better ones of peers."""

    @property
    def node_id(self) -> NodeId:
        """Who it is; a source that comes back under the same id is the same one."""
        ...

    @property
    def rows_at_s(self) -> float:
        """When rows were last asked for, either way, on the connection with this node; -inf: never."""
        ...

    async def request(self, message: Message) -> tuple[Message, memoryview]:
        """As `Peer.request`."""
        ...


Sources = Callable[[ExpertRange], Sequence[Source]]
"""Who may hold a range now. Asked again and again while it is fetched, so sources may come and go."""


def only(source: Source) -> Sources:
    """One source, whatever is wanted."""
    return lambda item: (source,)


class SliceFetcher:
    """Fetches ranges of experts into a store."""

    def __init__(
        self,
        sources: Sources,
        manifest: Manifest,
        store: SliceStore,
        threads: Runner,
        config: StoreConfig,
        on_bytes: Callable[[int], None],
    ) -> None:
        """`on_bytes` is told of bytes that are on disk now, those that an earlier run left there included; of fewer
        than none when some turned out to be wrong."""
        self._sources = sources
        self._manifest = manifest
        self._store = store
        self._threads = threads
        self._config = config
        self._on_bytes = on_bytes
        self.standings: dict[NodeId, Standing] = {}
        """What was learned of every source so far."""

    async def fetch(self, item: ExpertRange) -> None:
        """Fetch and commit one range; it becomes visible only when the hash of every slab was right.

        What came stays on disk when it fails or is killed, block by block, and is not fetched again. A source that
        refuses is asked less, one that is silent or busy for `block_timeout_s` not any more, one whose bytes are wrong
        not for this range. Raises the last source's error when none is left that could have the rest: BadReplyError
        (wrong bytes), RequestRefusedError, ConnectionLostError (silent, gone, or none at all); StoreError when the disk
        refuses, and then nothing of the range is left there.
        """
        try:
            await _RangeFetch(self, item).run()
            await self._threads.run(partial(self._store.commit, item))
        except StoreError:
            with trio.CancelScope(shield=True):
                await self._threads.run(partial(self._store.discard, item))
            raise


@dataclass
class _Slab:
    """One expert's part of one tensor, on its way."""

    key: SlabKey
    n_bytes: int
    holders: dict[int, NodeId | None] = field(default_factory=dict)
    """Who gave each block that is on disk, by offset; None: an earlier run of ours."""
    only: NodeId | None = None
    """The one source to ask, because a mixture was wrong."""
    suspects: Suspects = field(default_factory=Suspects)


class _RangeFetch:
    """One call of `fetch`: the range's slabs, whom they are asked of, and what went wrong."""

    def __init__(self, fetcher: SliceFetcher, item: ExpertRange) -> None:
        self._fetcher = fetcher
        self._item = item
        self._config = config = fetcher._config
        self._scheduler: BlockScheduler[Block] = BlockScheduler(config, self._may_ask)
        self._slabs: dict[SlabKey, _Slab] = {}
        """Those that are not whole and right yet."""
        self._sources: dict[NodeId, Source] = {}
        self._out: set[NodeId] = set()
        """Not asked for anything of this range any more."""
        self._dead: dict[NodeId, Source] = {}
        """Lost; the node may come back as another source."""
        self._liars: set[NodeId] = set()
        self._refused: set[tuple[NodeId, int]] = set()
        """Experts that a source does not have."""
        self._busy_since_s: dict[NodeId, float] = {}
        """Sources that said `busy`, since their last block."""
        self._asking: dict[tuple[NodeId, Block], trio.CancelScope] = {}
        self._n_held = 0
        """Blocks asked for or not on disk yet: what memory is taken for."""
        self._look_at_s = -math.inf
        """When to look for sources again."""
        self._changed = trio.Event()
        self._error: RemoteError = ConnectionLostError(f"no node to fetch {item} from")

    async def run(self) -> None:
        """Until every slab is whole and right."""
        await self._look_at_disk()
        async with open_flat_nursery() as nursery:
            while self._slabs:
                self._changed = trio.Event()
                self._update_sources()
                self._pick_others()
                self._ask(nursery)
                if self._scheduler.is_stuck() and not self._n_held:
                    raise self._error
                with trio.move_on_at(min(self._scheduler.wake_s(trio.current_time()), self._look_at_s)):
                    await self._changed.wait()
                for node in self._scheduler.silent(trio.current_time()):
                    self._out.add(node)
                    self._lost(node, f"did not answer SliceGet within {self._config.block_timeout_s:g} s")

    # --- what is here, and who may have the rest -----------------------------------------------------------------

    async def _look_at_disk(self) -> None:
        """Take up what an earlier run left."""
        layout = self._fetcher._manifest.layers[self._item.layer].layout
        for expert in self._item.experts:
            for tensor in layout.tensors:
                slab = _Slab((layout.layer, expert, tensor.kind), tensor.n_bytes)
                missing = await self._fetcher._threads.run(partial(self._missing, slab.key))
                offsets = self._offsets(slab)
                slab.holders = {
                    offset: None for offset in offsets if missing is None or offset not in missing
                }
                self._fetcher._on_bytes(sum(self._length(slab, offset) for offset in slab.holders))
                if missing is None:
                    continue
                self._slabs[slab.key] = slab
                self._scheduler.want((slab.key, offset) for offset in missing)
                if not missing:
                    await self._whole(slab)

    def _missing(self, key: SlabKey) -> tuple[int, ...] | None:
        """Offsets of the blocks that are not on disk; None if the slab is whole and right."""
        incoming = self._fetcher._store.incoming
        return None if incoming.has(key) else incoming.missing(key, self._config.block_bytes)

    def _update_sources(self) -> None:
        """See who has come and who has gone: from time to time, and when nobody is here."""
        if trio.current_time() < self._look_at_s and not self._scheduler.is_stuck():
            return
        self._look_at_s = trio.current_time() + self._config.sources_s
        found = {source.node_id: source for source in self._fetcher._sources(self._item)}
        for node, source in list(self._sources.items()):
            if found.get(node) is not source:
                self._leave(node)
        for node, source in found.items():
            if node not in self._sources and node not in self._out and self._dead.get(node) is not source:
                standing = self._fetcher.standings.setdefault(node, Standing())
                if standing.n_wrong < self._config.max_wrong_slabs:
                    self._sources[node] = source
                    self._scheduler.join(node, standing)
                else:
                    self._error = BadReplyError(f"{node.short} has given wrong bytes too often")

    def _pick_others(self) -> None:
        """A slab that was left to one source, which is gone, is left to another one."""
        for slab in self._slabs.values():
            if slab.only is not None and not self._may_have(slab.only, slab):
                slab.only = self._pick_only(slab)

    def _leave(self, node: NodeId) -> None:
        """Forget a source, and what it was asked for."""
        del self._sources[node]
        self._scheduler.leave(node)
        for (asked, _), scope in self._asking.items():
            if asked == node:
                scope.cancel()
        self._changed.set()

    def _may_ask(self, node: NodeId, block: Block) -> bool:
        slab = self._slabs[block[0]]
        return slab.only in (None, node) and self._may_have(node, slab)

    def _may_have(self, node: NodeId, slab: _Slab) -> bool:
        return node in self._sources and (node, slab.key[1]) not in self._refused

    # --- asking --------------------------------------------------------------------------------------------------

    def _ask(self, nursery: trio.Nursery) -> None:
        """Ask whom there is room to ask."""
        recent_s = trio.current_time() - self._config.rows_recent_s
        self._scheduler.is_gentle = any(source.rows_at_s > recent_s for source in self._sources.values())
        most_held = max(1, self._config.max_flight_bytes // self._config.block_bytes)
        while self._n_held < most_held:
            choice = self._scheduler.next(trio.current_time())
            if choice is None:
                return
            self._n_held += 1
            node, block = choice
            length = self._length(self._slabs[block[0]], block[1])
            scope = self._asking[choice] = trio.CancelScope()
            nursery.start_soon(self._fetch_block, self._sources[node], block, length, scope)

    async def _fetch_block(self, source: Source, block: Block, length: int, scope: trio.CancelScope) -> None:
        node = source.node_id
        body: memoryview | None = None
        try:
            with scope:
                body = await self._block(source, block, length)
        except RequestRefusedError as refusal:
            self._was_refused(node, block, refusal)
        except BadReplyError as error:
            self._lied(node, error)
        except RemoteError as error:
            self._dead[node] = source
            self._lost(node, str(error))
        finally:
            if self._asking.get((node, block)) is scope:
                del self._asking[node, block]
        try:
            if body is not None and not scope.cancel_called:
                await self._arrived(node, block, body)
        finally:
            self._n_held -= 1
            self._changed.set()

    async def _block(self, source: Source, block: Block, length: int) -> memoryview:
        """The bytes asked for. Raises BadReplyError if they are not so many, and what `Source.request` raises."""
        (layer, expert, kind), offset = block
        model = self._fetcher._manifest.model_id
        message = SliceGet(model, layer, expert, kind, offset, length)
        reply, body = await source.request(message)
        if not isinstance(reply, Slice) or reply.offset != offset or len(body) != length:
            raise BadReplyError(f"asked for {message}, got {reply} and {len(body)} bytes")
        return body

    async def _arrived(self, node: NodeId, block: Block, body: memoryview) -> None:
        """Write a block; the last one of a slab has it checked."""
        self._busy_since_s.pop(node, None)
        others = self._scheduler.arrived(node, block, len(body), trio.current_time())
        for other in others:
            if (scope := self._asking.get((other, block))) is not None:
                scope.cancel()
        self._changed.set()
        key, offset = block
        slab = self._slabs[key]
        put = partial(self._fetcher._store.incoming.put, key, self._config.block_bytes, offset, body)
        await self._fetcher._threads.run(put)  # not on the thread that serves everybody
        self._scheduler.stored(node)
        self._changed.set()
        slab.holders[offset] = node
        self._fetcher._on_bytes(len(body))
        if len(slab.holders) == len(self._offsets(slab)):
            await self._whole(slab)

    # --- what went wrong -----------------------------------------------------------------------------------------

    def _was_refused(self, node: NodeId, block: Block, refusal: RequestRefusedError) -> None:
        """`busy` asks for a pause, `no_such_slice` is about one expert, anything else about all."""
        self._error = refusal
        (_, expert, _), _ = block
        if refusal.code == "busy":
            self._was_busy(node, max(refusal.retry_after_ms, 1) / 1000)
        elif node in self._sources:
            self._fetcher.standings[node].n_refused += (node, expert) not in self._refused
            self._refused.add((node, expert))
            if refusal.code != "no_such_slice":
                self._out.add(node)
                self._leave(node)
        self._scheduler.failed(node, block)

    def _was_busy(self, node: NodeId, pause_s: float) -> None:
        """Whoever gives nothing for `block_timeout_s` is as good as silent, whatever pause it asks for."""
        now_s = trio.current_time()
        until_s = self._busy_since_s.setdefault(node, now_s) + self._config.block_timeout_s
        if now_s < until_s:
            self._scheduler.pause(node, min(now_s + pause_s, until_s))
        else:
            self._out.add(node)
            self._lost(node, f"was busy for {self._config.block_timeout_s:g} s")

    def _lost(self, node: NodeId, reason: str) -> None:
        """A source is gone or silent: others have the rest of this range."""
        if node in self._sources:
            self._error = ConnectionLostError(f"{node.short}: {reason}")
            self._fetcher.standings[node].n_lost += 1
            self._leave(node)

    def _lied(self, node: NodeId, error: BadReplyError) -> None:
        """A source gave wrong bytes: it is out for this range, and others are preferred from now on."""
        log.warning("%s: %s", node.short, error)
        self._error = error
        self._liars.add(node)
        self._out.add(node)
        self._fetcher.standings[node].n_wrong += 1
        if node in self._sources:
            self._leave(node)

    # --- slabs of which every block is here ----------------------------------------------------------------------

    async def _whole(self, slab: _Slab) -> None:
        """Check a slab. If it is wrong, find out whose blocks to fetch again, and of whom."""
        threads, incoming = self._fetcher._threads, self._fetcher._store.incoming
        if await threads.run(partial(incoming.seal, slab.key, self._config.block_bytes)):
            if slab.suspects:
                right = await threads.run(partial(incoming.digests, slab.key, self._config.block_bytes))
                self._convict(slab.suspects.liars(right), slab)
            del self._slabs[slab.key]
            self._changed.set()
            return
        holders = set(slab.holders.values())
        wrong = [offset for offset, holder in slab.holders.items() if holder in self._liars]
        if len(holders) == 1:
            wrong = list(slab.holders)
            self._convict(holders, slab)
        elif not wrong:
            wrong = list(slab.holders)
            digests = await threads.run(partial(incoming.digests, slab.key, self._config.block_bytes))
            slab.suspects.remember(tuple(slab.holders[offset] for offset in self._offsets(slab)), digests)
            slab.only = self._pick_only(slab)
        await threads.run(partial(incoming.unmark, slab.key, self._config.block_bytes, wrong))
        self._fetcher._on_bytes(-sum(self._length(slab, offset) for offset in wrong))
        for offset in wrong:
            del slab.holders[offset]
        self._scheduler.want((slab.key, offset) for offset in wrong)
        self._changed.set()

    def _convict(self, nodes: set[NodeId | None], slab: _Slab) -> None:
        layer, expert, kind = slab.key
        for node in nodes:
            if node is not None and node not in self._liars:
                reason = (
                    f"{node.short}: layer {layer}, expert {expert}, {kind}: not the bytes of the manifest"
                )
                self._lied(node, BadReplyError(reason))

    def _pick_only(self, slab: _Slab) -> NodeId | None:
        """Who is asked for all of a slab of which a mixture was wrong: one that was not in it, the fastest."""
        holders = set(slab.holders.values())
        able = [node for node in self._sources if self._may_have(node, slab)]
        standings = self._fetcher.standings
        able.sort(key=lambda node: (node in holders, standings[node].n_wrong, standings[node].s_per_byte))
        return able[0] if able else None

    def _offsets(self, slab: _Slab) -> range:
        return range(0, slab.n_bytes, self._config.block_bytes)

    def _length(self, slab: _Slab, offset: int) -> int:
        return min(self._config.block_bytes, slab.n_bytes - offset)
