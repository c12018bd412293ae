"""A worker's life: find a backbone, take the scarcest experts that fit the budget, check them, serve, start over.

Losing a connection loses nothing: the experts stay in memory and on disk, and the next session announces them again.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial

import trio

from swarmnode.errors import BadReplyError, RemoteError
from swarmnode.net.peer import Handler, Peer
from swarmnode.services.reports import Serving
from swarmnode.services.residence import Residence, ResidenceBuilder
from swarmnode.weights.manifest import Manifest
from swarmnode.wire import messages
from swarmnode.wire.messages import Message

log = logging.getLogger(__name__)


class VolunteerService:
    """Runs sessions with backbones. The first one decides the model; others are served if they have the same."""

    def __init__(
        self, builder: ResidenceBuilder, handlers: dict[type[Message], Handler] | None = None
    ) -> None:
        """`handlers`: where to put the handlers once there is something to serve (a test's may wrap them)."""
        self._builder = builder
        self._sessions: set[Peer] = set()
        self._residence: Residence | None = None
        self._moving_in = trio.Lock()
        self._handlers: dict[type[Message], Handler] = {} if handlers is None else handlers
        self._seq = 0

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

        Raises RemoteError when the peer fails or leaves, LocalError when this machine cannot serve.
        """
        manifest = await self._manifest(peer)
        async with self._moving_in:
            if self._residence is None:
                self._residence = await self._builder.build(peer, manifest)
                self._handlers.update(self._residence.server.handlers)
        residence = self._residence
        if residence.manifest.model_id != manifest.model_id:
            raise BadReplyError(
                f"{peer.node_id.short} serves {manifest.name}, this worker holds {residence.manifest.name}"
            )
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
        """`session` for a node that dialled us, if it is a backbone; its errors end that connection only."""
        if "backbone" not in peer.settings.roles:
            return
        try:
            await self.session(peer)
        except RemoteError as error:
            log.info("no session with %r: %s", peer, error)
            peer.close("not_wanted")

    async def leave(self) -> None:
        """Tell every backbone that no more rows are wanted, before a clean stop."""
        for peer in tuple(self._sessions):
            if self._residence is not None:
                with contextlib.suppress(RemoteError):
                    await self._announce(peer, self._residence, "leaving")
                peer.close("leaving")

    def close(self) -> None:
        """Release the slices' lock."""
        if self._residence is not None:
            self._residence.close()

    async def _manifest(self, peer: Peer) -> Manifest:
        reply, _ = await peer.request(messages.ModelsGet())
        if not isinstance(reply, messages.Models) or not reply.models:
            raise BadReplyError(f"{peer.node_id.short} serves no model")
        entry = reply.models[0]
        if self._residence is not None and any(
            item.id == self._residence.manifest.model_id for item in reply.models
        ):
            return self._residence.manifest
        reply, body = await peer.request(messages.ManifestGet(model=entry.id))
        if not isinstance(reply, messages.ManifestReply):
            raise BadReplyError(f"asked for a manifest, got {type(reply).__name__}")
        return await self._builder.threads.run(partial(Manifest.decode_untrusted, bytes(body), entry.id))

    async def _announce(self, peer: Peer, residence: Residence, state: str) -> None:
        self._seq += 1
        message = messages.Announce(
            model=residence.manifest.model_id,
            state=state,
            holdings=tuple((item.layer, item.first, item.count) for item in residence.ranges),
            max_rows=residence.max_rows,
            device=self._builder.device.info.description,
            capacity_bytes=self._builder.budget_bytes,
            seq=self._seq,
        )
        await peer.request(message)
