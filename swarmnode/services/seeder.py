"""What a backbone does for those who join: names its model, hands out the manifest and slices, hears what is served.

Which experts a worker takes is the worker's own decision (services/market).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from swarmnode.config import DispatchConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.gossip.rates import TokenBucket
from swarmnode.identity import NodeId
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.services.members import Members, Worker
from swarmnode.services.runners import Runner
from swarmnode.services.slice_server import SliceServer
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange, holdings_of, ranges_of
from swarmnode.wire import messages
from swarmnode.wire.constants import (
    MAX_BODY_BYTES,
    PAIR_EXPERT_BYTES,
    PAIR_ROW_BYTES,
    PAIR_WEIGHT_BYTES,
)
from swarmnode.wire.messages import Message

log = logging.getLogger(__name__)

MAX_NAME_BYTES = 96
"""Of a model's name in `models`: for people, the id is what counts."""

MAX_ANNOUNCERS = 4096
"""Nodes whose announcements are counted: far more than connections at a time."""


class Seeder:
    """Handlers for joining workers. `on_worker` is called for every announcement (the prober starts there)."""

    def __init__(
        self,
        index: ModelIndex,
        manifest: Manifest,
        members: Members,
        threads: Runner,
        on_worker: Callable[[Worker], None],
        config: DispatchConfig,
        now: Callable[[], float],
    ) -> None:
        self._slices = SliceServer(manifest, index, threads)
        self._manifest = manifest
        self._model_id = manifest.model_id
        self._members = members
        self._on_worker = on_worker
        self._config = config
        self._now = now
        self._announcements: dict[NodeId, TokenBucket] = {}
        """How many of each node are taken, connected or not; the one heard of last is the last."""

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """For the peer: the message types this service answers."""
        return {
            messages.ModelsGet: self._models,
            messages.Announce: self._announce,
            **self._slices.handlers,
        }

    async def _models(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        manifest = self._manifest
        entry = messages.ModelEntry(
            id=self._model_id,
            name=manifest.name.encode()[:MAX_NAME_BYTES].decode("utf-8", "ignore"),
            architecture=manifest.architecture,
            n_layer=manifest.n_layer,
            n_expert=manifest.n_expert,
            expert_bytes=max(layer.layout.expert_bytes for layer in manifest.layers.values()),
        )
        return messages.Models(models=(entry,)), ()

    async def _announce(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        assert isinstance(message, messages.Announce)
        self._slices.check_model(message.model)
        if message.state != "serving":
            pauses = message.state == "fetching"
            self._members.leaving(peer, pauses=pauses, lacks=self._lacks(message) if pauses else "")
        else:
            self._limit(peer.node_id)
            ranges = self._checked_ranges(message.holdings)
            if not ranges:
                raise RequestRefusedError("bad_range", "a serving worker holds at least one expert")
            max_rows = min(message.max_rows, self._pairs_a_body_carries(peer))
            if max_rows < 1:
                raise RequestRefusedError(
                    "too_large", "your max_body_bytes is less than one row of this model"
                )
            worker = self._members.announce(peer, ranges, max_rows, message.device)
            self._on_worker(worker)
        return messages.Ok(), ()

    def _lacks(self, message: messages.Announce) -> str:
        """Why a worker that offers nothing cannot hold anything; "" if it could, and pauses."""
        least_bytes = self._manifest.least_expert_bytes
        if message.capacity_bytes >= least_bytes:
            return ""
        return (
            f"its budget of {message.capacity_bytes / 1e6:.2f} MB is too small for one expert, which takes "
            f"{least_bytes / 1e6:.2f} MB"
        )

    def _limit(self, node_id: NodeId) -> None:
        """Each announcement that brings something new means a probe and a new routing. Leaving is always heard."""
        config, now_s = self._config, self._now()
        bucket = self._announcements.pop(node_id, None)
        if bucket is None:
            bucket = TokenBucket(config.announces_per_s, config.announce_burst, now_s)
        self._announcements[node_id] = bucket
        if len(self._announcements) > MAX_ANNOUNCERS:
            del self._announcements[next(iter(self._announcements))]
        if not bucket.take(1, now_s):
            retry_ms = int(1e3 / config.announces_per_s)
            raise RequestRefusedError("busy", "you announce too often", retry_ms)

    def _pairs_a_body_carries(self, peer: Peer) -> int:
        """Pairs whose request fits what the peer takes, and whose f32 reply fits what we take."""
        row_bytes = 4 * self._manifest.n_embd
        pair_bytes = PAIR_ROW_BYTES + PAIR_EXPERT_BYTES + PAIR_WEIGHT_BYTES
        return min(peer.settings.max_body_bytes // (row_bytes + pair_bytes), MAX_BODY_BYTES // row_bytes)

    def _checked_ranges(self, ranges: tuple[tuple[int, int, int], ...]) -> tuple[ExpertRange, ...]:
        """A peer's ranges, merged; one outside the model is refused, never clamped."""
        items = [ExpertRange(*item) for item in ranges]
        for item in items:
            if not self._manifest.holds(item):
                raise RequestRefusedError("bad_range", f"{item} is not in this model")
        return ranges_of(holdings_of(items))
