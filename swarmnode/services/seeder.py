"""What a backbone does for those who join: names its model, hands out the manifest and slices, offers scarce experts.

Who holds what comes from the workers' own announcements on this connection, and the offer is decided here by
`schedule.placement`. The slices themselves are `services.slice_server`, which any holder has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import trio

from swarmnode.config import ServeConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.identity import NodeId
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.schedule.placement import choose_scarcest, replica_counts
from swarmnode.services.announcing import announceable
from swarmnode.services.members import Members, Worker
from swarmnode.services.runners import Runner
from swarmnode.services.slice_server import SliceServer
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange, holdings_of, ranges_of
from swarmnode.wire import messages
from swarmnode.wire.constants import (
    MAX_BODY_BYTES,
    MAX_RANGES,
    PAIR_EXPERT_BYTES,
    PAIR_ROW_BYTES,
    PAIR_WEIGHT_BYTES,
)
from swarmnode.wire.messages import Message

log = logging.getLogger(__name__)

MAX_NAME_BYTES = 96
"""Of a model's name in `models`: for people, the id is what counts."""


@dataclass(frozen=True)
class _Lease:
    """Experts offered to a node that is fetching them: they count as held until the lease lapses."""

    ranges: tuple[ExpertRange, ...]
    until_s: float


class Seeder:
    """Handlers for joining workers. `on_worker` is called for every announcement (the prober starts there)."""

    def __init__(
        self,
        index: ModelIndex,
        manifest: Manifest,
        members: Members,
        threads: Runner,
        config: ServeConfig,
        on_worker: Callable[[Worker], None],
    ) -> None:
        self._slices = SliceServer(manifest, index, threads)
        self._manifest = manifest
        self._model_id = manifest.model_id
        self._members = members
        self._threads = threads
        self._config = config
        self._on_worker = on_worker
        self._leases: dict[NodeId, _Lease] = {}
        self._choosing = trio.Lock()

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """For the peer: the message types this service answers."""
        return {
            messages.ModelsGet: self._models,
            messages.Volunteer: self._volunteer,
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

    async def _volunteer(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        """Offer the scarcest experts that fit beside what the node already holds."""
        assert isinstance(message, messages.Volunteer)
        self._slices.check_model(message.model)
        held = self._checked_ranges(message.held)
        async with self._choosing:  # the next choice must know of this one's lease
            others = self._others(peer.node_id)
            choose = partial(self._choose, others, held, message.budget_bytes, bytes(peer.node_id))
            ranges = await self._threads.run(choose)
            self._lease(peer.node_id, ranges_of(holdings_of([*held, *ranges])))
        reply = messages.Ranges(
            model=self._model_id,
            ranges=tuple((item.layer, item.first, item.count) for item in ranges),
            lease_s=int(self._config.lease_s),
        )
        return reply, ()

    def _choose(
        self,
        others: list[tuple[ExpertRange, ...]],
        held: tuple[ExpertRange, ...],
        budget_bytes: int,
        seed: bytes,
    ) -> tuple[ExpertRange, ...]:
        manifest = self._manifest
        counts = replica_counts(manifest.n_expert, tuple(manifest.layers), others)
        sizes = {number: layer.layout.expert_bytes for number, layer in manifest.layers.items()}
        return announceable(choose_scarcest(counts, held, sizes, budget_bytes, seed, MAX_RANGES))

    async def _announce(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        assert isinstance(message, messages.Announce)
        self._slices.check_model(message.model)
        if message.state == "leaving":
            self._members.leaving(peer)
        elif message.state == "serving":
            ranges = self._checked_ranges(message.holdings)
            if not ranges:
                raise RequestRefusedError("bad_range", "a serving worker holds at least one expert")
            max_rows = min(message.max_rows, self._pairs_a_body_carries(peer))
            if max_rows < 1:
                raise RequestRefusedError(
                    "too_large", "your max_body_bytes is less than one row of this model"
                )
            worker = self._members.announce(peer, ranges, max_rows, message.device)
            self._leases.pop(peer.node_id, None)
            self._on_worker(worker)
        return messages.Ok(), ()

    def disconnected(self, peer: Peer) -> None:
        """A connection ended: what was leased to it is free again."""
        self._leases.pop(peer.node_id, None)

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

    def _others(self, asking: NodeId) -> list[tuple[ExpertRange, ...]]:
        """What everyone but `asking` holds or is fetching."""
        held = dict(self._members.replicas())
        leased = {node: lease.ranges for node, lease in self._current_leases().items() if node not in held}
        return [ranges for node, ranges in (held | leased).items() if node != asking]

    def _current_leases(self) -> dict[NodeId, _Lease]:
        now_s = trio.current_time()
        self._leases = {node: lease for node, lease in self._leases.items() if lease.until_s > now_s}
        return self._leases

    def _lease(self, node: NodeId, ranges: tuple[ExpertRange, ...]) -> None:
        """Keep the ranges free for the node; the oldest lease goes when there are too many."""
        leases = self._current_leases()
        leases.pop(node, None)
        while len(leases) >= self._config.max_leases:
            del leases[next(iter(leases))]
        leases[node] = _Lease(ranges, trio.current_time() + self._config.lease_s)
