"""A worker's life: meet a backbone, take part in the market of its model, announce what is served, start over.

Losing a connection loses nothing: the experts stay in memory and on disk, and the next session announces them again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, MutableMapping

import trio

from swarmnode.errors import (
    BadReplyError,
    LocalError,
    RemoteError,
    RequestRefusedError,
    UnsuitableModelError,
    first_error,
)
from swarmnode.gossip.records import ModelHoldings
from swarmnode.net.peer import Handler, Peer
from swarmnode.services.announcing import MAX_CAPACITY_BYTES, announceable, as_fields, device_text
from swarmnode.services.ask import ask
from swarmnode.services.fetch import Source
from swarmnode.services.manifest_fetch import about_bytes, fetch_manifest
from swarmnode.services.market import Market
from swarmnode.services.reports import Serving
from swarmnode.services.residence import Residence, ResidenceBuilder
from swarmnode.services.slice_server import SliceServer
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire import messages
from swarmnode.wire.constants import MAX_PAIRS
from swarmnode.wire.messages import Message, ModelEntry

log = logging.getLogger(__name__)

_MAX_UNSUITABLE = 64
"""Models remembered as none for this machine; peers may invent any number."""
_LEAST_RETRY_S = 0.2
"""Before an announcement that a busy backbone refused is made again."""

_DRAIN_S = 1.0
"""Longest wait, when leaving, for what was asked before: a token's rows take milliseconds, and whoever asked for more
has a local replica."""

OpenMarket = Callable[[Residence], Market]
Publish = Callable[[tuple[ModelHoldings, ...]], None]


class VolunteerService:
    """Runs sessions with backbones. The first one decides the model; others are served if they have the same."""

    def __init__(
        self,
        builder: ResidenceBuilder,
        open_market: OpenMarket,
        publish: Publish,
        handlers: MutableMapping[type[Message], Handler] | None = None,
    ) -> None:
        """`publish`: what our record says we hold. `handlers`: where to put the handlers once there is something to
        serve (a test's may wrap them)."""
        self._builder = builder
        self._open_market = open_market
        self._publish = publish
        self._timeout_s = builder.config.store.request_timeout_s
        self._sessions: set[Peer] = set()
        self._residence: Residence | None = None
        self._market: Market | None = None
        self._moved: trio.Event | None = None
        """Set when the session that is moving in has done so or failed; None while none is."""
        self._entered = trio.Event()
        """Set when there is a market to run."""
        self._changed = trio.Event()
        """Set, and replaced, when other ranges are served than before."""
        self._unsuitable: dict[bytes, str] = {}
        """Why models are none for this machine, by id."""
        self._handlers: MutableMapping[type[Message], Handler] = {} if handlers is None else handlers
        self._own_handlers: set[type[Message]] = set()
        self._seq = 0
        self._is_leaving = False
        self._is_paused = False
        self._limit_bytes = builder.budget_bytes
        self._failed = trio.Event()
        self._failure: LocalError | None = None

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """For every peer of this worker; experts requests are answered once the experts are tested."""
        return self._handlers

    @property
    def residence(self) -> Residence | None:
        """What is held, once moved in."""
        return self._residence

    @property
    def market(self) -> Market | None:
        """The market of what is held."""
        return self._market

    @property
    def device_name(self) -> str:
        """What computes."""
        return self._builder.device.info.name

    def pause(self, is_paused: bool) -> None:
        """While paused every backbone is told that no rows are wanted, and nothing new is fetched. Nothing is lost."""
        self._is_paused = is_paused
        if self._market is not None:
            self._market.pause(is_paused)

    def limit(self, budget_bytes: int) -> None:
        """Take at most so many bytes for experts from now on; no more than the first budget."""
        self._limit_bytes = budget_bytes
        if self._market is not None:
            self._market.limit(budget_bytes)

    async def session(self, peer: Peer) -> None:
        """With a backbone: move in if need be, announce what is served whenever it changes, until the connection ends.
        With any other node: nothing but wait for the end.

        Raises RemoteError when the peer fails or leaves or its model is none for this machine, LocalError when this
        machine cannot serve at all. No wait for the peer is longer than its deadline in StoreConfig.
        """
        if "backbone" not in peer.settings.roles:
            await peer.wait_closed()
            return
        await self._residence_for(peer, await self._entry(peer))
        self._sessions.add(peer)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_announced, peer)
                await peer.wait_closed()
                nursery.cancel_scope.cancel()
        except* RemoteError as group:
            raise first_error(group) from None
        finally:
            self._sessions.discard(peer)

    async def _keep_announced(self, peer: Peer) -> None:
        told: tuple[ExpertRange, ...] | None = None
        while not self._is_leaving:
            changed, residence, market = self._changed, self._residence, self._market
            if residence is None or market is None:
                raise UnsuitableModelError("its model is none for this machine")
            serving = market.offered
            if serving != told and (serving or told):
                try:
                    await self._announce(peer, residence, serving, "serving" if serving else "fetching")
                except RequestRefusedError as refusal:
                    if refusal.code != "busy":
                        raise
                    await trio.sleep(max(refusal.retry_after_ms / 1e3, _LEAST_RETRY_S))
                    continue  # with what is served by then
                if serving:
                    self._report_serving(peer, residence)
                told = serving
            await changed.wait()

    def _report_serving(self, peer: Peer, residence: Residence) -> None:
        self._builder.report(
            Serving(
                peer.node_id.short,
                residence.n_experts,
                residence.held_bytes,
                residence.max_rows,
                self.device_name,
            )
        )

    async def accepted(self, peer: Peer) -> None:
        """`session` for a node that dialled us, if it is a backbone.

        A RemoteError ends that connection only, a LocalError comes out of `watch`.
        """
        if "backbone" not in peer.settings.roles:
            return
        try:
            await self.session(peer)
        except RemoteError as error:
            log.warning("no session with %r: %s", peer, error)
            peer.close("not_wanted")
        except LocalError as error:
            self._failure = error
            self._failed.set()

    async def run(self) -> None:
        """Take part in the market, once a session has moved in. Raises LocalError when this machine cannot serve."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                await self._entered.wait()
                self._entered = trio.Event()
                await self._run_market()

    async def _watch(self) -> None:
        """Raises the LocalError of an accepted session."""
        await self._failed.wait()
        if self._failure is not None:
            raise self._failure

    async def _run_market(self) -> None:
        market, residence = self._market, self._residence
        if market is None or residence is None:
            return
        try:
            await market.run()
        except* UnsuitableModelError as group:
            self._reject(residence.manifest, str(first_error(group)))
            self._residence = self._market = None
            self._withdraw_handlers()
            self._publish(())
            self._tell_sessions()
            try:
                await residence.forget_all()
            finally:
                await residence.aclose()
        except* LocalError as group:
            raise first_error(group) from None

    async def leave(self) -> None:
        """Tell every backbone that no more rows are wanted, before a clean stop, and answer those that came before.
        A silent one delays no other.

        What changes from now on is not announced any more.
        """
        self._is_leaving = True
        async with trio.open_nursery() as nursery:
            for peer in tuple(self._sessions):
                nursery.start_soon(self._leave, peer)
        if self._residence is not None:
            with trio.move_on_after(_DRAIN_S):
                await self._residence.server.drained()

    async def aclose(self) -> None:
        """Free the memory and the slices' lock; nothing is served any more. Not cancellable."""
        residence, self._residence = self._residence, None
        self._market = None
        if residence is not None:
            self._withdraw_handlers()
            await residence.aclose()

    async def _leave(self, peer: Peer) -> None:
        if self._residence is not None:
            with contextlib.suppress(RemoteError):
                await self._announce(peer, self._residence, (), "leaving")

    async def _entry(self, peer: Peer) -> ModelEntry:
        """The first of the peer's models that is held here, or that may be."""
        reply, _ = await ask(peer, messages.ModelsGet(), messages.Models, self._timeout_s)
        if not reply.models:
            raise BadReplyError(f"{peer.node_id.short} serves no model")
        if self._residence is not None:
            return self._held_entry(peer, reply.models)
        for entry in reply.models:
            if entry.id not in self._unsuitable:
                return entry
        raise UnsuitableModelError(self._unsuitable[reply.models[0].id])

    def _held_entry(self, peer: Peer, entries: tuple[ModelEntry, ...]) -> ModelEntry:
        residence = self._residence
        for entry in entries:
            if residence is not None and entry.id == residence.manifest.model_id:
                return entry
        held = "nothing" if residence is None else residence.title
        raise UnsuitableModelError(f"{peer.node_id.short} serves {entries[0].name}, this worker holds {held}")

    async def _residence_for(self, peer: Peer, entry: ModelEntry) -> Residence:
        """What is held of that model. One session moves in; others wait for it, and if it fails one of them tries."""
        manifest = None if self._residence is not None else await self._manifest(peer, entry)
        while self._residence is None:
            if self._moved is not None:
                await self._moved.wait()
            elif manifest is not None:
                await self._move_in(manifest)
        self._held_entry(peer, (entry,))
        return self._residence

    async def _move_in(self, manifest: Manifest) -> None:
        self._moved = moved = trio.Event()
        try:
            residence = await self._builder.build(manifest)
        except UnsuitableModelError as error:
            self._reject(manifest, str(error))
            raise
        finally:
            self._moved = None
            moved.set()
        self._residence = residence
        self._market = self._open_market(residence)
        self._market.on_change = self._market_changed
        self._market.limit(self._limit_bytes)
        self._market.pause(self._is_paused)
        slices = SliceServer(manifest, residence.store, residence.threads)
        handlers = {**residence.server.handlers, **slices.handlers}
        self._own_handlers = set(handlers)
        self._handlers.update(handlers)
        self._market_changed()
        self._entered.set()

    def _reject(self, manifest: Manifest, reason: str) -> None:
        while len(self._unsuitable) >= _MAX_UNSUITABLE:
            del self._unsuitable[next(iter(self._unsuitable))]
        self._unsuitable[manifest.model_id] = reason

    def _withdraw_handlers(self) -> None:
        for kind in self._own_handlers:
            self._handlers.pop(kind, None)
        self._own_handlers = set()

    def _market_changed(self) -> None:
        if self._market is not None:
            self._publish((self._market.holdings,))
        self._tell_sessions()

    def _tell_sessions(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _manifest(self, peer: Peer, entry: ModelEntry) -> Manifest:
        sources: tuple[Source, ...] = (peer,)
        n_bytes = about_bytes(entry.n_layer, entry.n_expert)
        return await fetch_manifest(
            sources, entry.id, n_bytes, self._builder.threads, self._builder.config.store
        )

    async def _announce(
        self, peer: Peer, residence: Residence, serving: tuple[ExpertRange, ...], state: str
    ) -> None:
        self._seq += 1
        ranges = announceable(serving)
        if len(ranges) < len(serving):
            log.warning(
                "only %d of %d ranges of experts fit an announcement; the others get no rows",
                len(ranges),
                len(serving),
            )
        message = messages.Announce(
            model=residence.manifest.model_id,
            state=state,
            holdings=as_fields(ranges),
            max_rows=min(residence.max_rows, MAX_PAIRS),
            device=device_text(self._builder.device.info.description),
            capacity_bytes=min(self._limit_bytes, MAX_CAPACITY_BYTES),
            seq=self._seq,
        )
        await ask(peer, message, messages.Ok, self._timeout_s)
