"""A worker's life: find a backbone, take the scarcest experts that fit the budget, check them, serve, start over.

Losing a connection loses nothing: the experts stay in memory and on disk, and the next session announces them again.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial

import trio

from swarmnode.errors import BadReplyError, LocalError, RemoteError, UnsuitableModelError
from swarmnode.net.peer import Handler, Peer
from swarmnode.services.announcing import MAX_CAPACITY_BYTES, announceable, as_fields, device_text
from swarmnode.services.ask import ask
from swarmnode.services.reports import Serving
from swarmnode.services.residence import Residence, ResidenceBuilder
from swarmnode.weights.manifest import HASH_BYTES, MAX_MANIFEST_BYTES, Manifest
from swarmnode.wire import messages
from swarmnode.wire.constants import MAX_PAIRS
from swarmnode.wire.messages import Message, ModelEntry

log = logging.getLogger(__name__)

_MAX_UNSUITABLE = 64
"""Models remembered as none for this machine; peers may invent any number."""


class VolunteerService:
    """Runs sessions with backbones. The first one decides the model; others are served if they have the same."""

    def __init__(
        self, builder: ResidenceBuilder, handlers: dict[type[Message], Handler] | None = None
    ) -> None:
        """`handlers`: where to put the handlers once there is something to serve (a test's may wrap them)."""
        self._builder = builder
        self._timeout_s = builder.config.store.request_timeout_s
        self._sessions: set[Peer] = set()
        self._residence: Residence | None = None
        self._moved: trio.Event | None = None
        """Set when the session that is moving in has done so or failed; None while none is."""
        self._unsuitable: dict[bytes, str] = {}
        """Why models are none for this machine, by id."""
        self._handlers: dict[type[Message], Handler] = {} if handlers is None else handlers
        self._seq = 0
        self._failed = trio.Event()
        self._failure: LocalError | None = None

    @property
    def handlers(self) -> dict[type[Message], Handler]:
        """For every peer of this worker; experts requests are answered once the experts are tested."""
        return self._handlers

    @property
    def residence(self) -> Residence | None:
        """What is held, once moved in."""
        return self._residence

    async def session(self, peer: Peer) -> None:
        """Move in if need be, announce, and stay until the connection ends.

        Raises RemoteError when the peer fails or leaves or its model is none for this machine, LocalError when this
        machine cannot serve at all. No wait for the peer is longer than its deadline in StoreConfig.
        """
        residence = await self._residence_for(peer, await self._entry(peer))
        await self._announce(peer, residence, "serving")
        self._builder.report(
            Serving(
                peer.node_id.short,
                sum(len(experts) for experts in residence.bank.holdings.values()),
                residence.bank.used_bytes,
                residence.max_rows,
                self._builder.device.info.name,
            )
        )
        self._sessions.add(peer)
        try:
            await peer.wait_closed()
        finally:
            self._sessions.discard(peer)

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

    async def watch(self) -> None:
        """Raises the LocalError of an accepted session; runs until then."""
        await self._failed.wait()
        if self._failure is not None:
            raise self._failure

    async def leave(self) -> None:
        """Tell every backbone that no more rows are wanted, before a clean stop. A silent one delays no other."""
        async with trio.open_nursery() as nursery:
            for peer in tuple(self._sessions):
                nursery.start_soon(self._leave, peer)

    async def aclose(self) -> None:
        """Free the memory and the slices' lock; nothing is served any more. Not cancellable."""
        residence, self._residence = self._residence, None
        if residence is not None:
            self._handlers.clear()
            await residence.aclose()

    async def _leave(self, peer: Peer) -> None:
        if self._residence is not None:
            with contextlib.suppress(RemoteError):
                await self._announce(peer, self._residence, "leaving")
            peer.close("leaving")
            await peer.wait_closed()  # so that the goodbye leaves before everything is cancelled

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
                self._residence = await self._move_in(peer, manifest)
                self._handlers.update(self._residence.server.handlers)
        self._held_entry(peer, (entry,))
        return self._residence

    async def _move_in(self, peer: Peer, manifest: Manifest) -> Residence:
        self._moved = moved = trio.Event()
        try:
            return await self._builder.build(peer, manifest)
        except UnsuitableModelError as error:
            while len(self._unsuitable) >= _MAX_UNSUITABLE:
                del self._unsuitable[next(iter(self._unsuitable))]
            self._unsuitable[manifest.model_id] = str(error)
            raise
        finally:
            self._moved = None
            moved.set()

    async def _manifest(self, peer: Peer, entry: ModelEntry) -> Manifest:
        about_bytes = min(3 * HASH_BYTES * entry.n_layer * entry.n_expert, MAX_MANIFEST_BYTES)
        timeout_s = self._builder.config.store.reply_timeout_s(about_bytes)
        message = messages.ManifestGet(model=entry.id)
        _, body = await ask(peer, message, messages.ManifestReply, timeout_s)
        return await self._builder.threads.run(partial(Manifest.decode_untrusted, bytes(body), entry.id))

    async def _announce(self, peer: Peer, residence: Residence, state: str) -> None:
        self._seq += 1
        ranges = announceable(residence.ranges)
        if len(ranges) < len(residence.ranges):
            log.warning(
                "only %d of %d ranges of experts fit an announcement; the others get no rows",
                len(ranges),
                len(residence.ranges),
            )
        message = messages.Announce(
            model=residence.manifest.model_id,
            state=state,
            holdings=as_fields(ranges),
            max_rows=min(residence.max_rows, MAX_PAIRS),
            device=device_text(self._builder.device.info.description),
            capacity_bytes=min(self._builder.budget_bytes, MAX_CAPACITY_BYTES),
            seq=self._seq,
        )
        await ask(peer, message, messages.Ok, self._timeout_s)
