"""Whom to be connected with, out of all that gossip knows: the backbones of our model, and a few others at random.

At random, but always the same: by a hash of both ids, so that a node keeps its neighbours and all nodes together make
a random graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import trio

from swarmnode.config import ContactConfig
from swarmnode.errors import UsageError
from swarmnode.gossip.records import NodeRecord
from swarmnode.gossip.table import Change
from swarmnode.identity import NodeId
from swarmnode.net.address import PeerAddress, split_host_port
from swarmnode.services.gossip import GossipService


def addresses_of(record: NodeRecord) -> list[PeerAddress]:
    """Where the node says it listens; what is no address is left out."""
    found = []
    for text in record.state.addresses:
        try:
            host, port = split_host_port(text)
        except UsageError:
            continue
        found.append(PeerAddress(record.node_id, host, port))
    return found


def choose_neighbours(
    records: Iterable[NodeRecord], own: NodeId, models: frozenset[bytes], config: ContactConfig
) -> list[PeerAddress]:
    """All addresses of the chosen nodes: at most `max_backbones` that have one of `models` (any, if we have none yet),
    and `neighbours` others.
    """
    backbones: list[tuple[bytes, NodeRecord]] = []
    others: list[tuple[bytes, NodeRecord]] = []
    for record in records:
        if record.node_id == own or not record.state.addresses:
            continue
        distance = hashlib.sha256(own.raw + record.node_id.raw).digest()
        (backbones if _is_backbone_for(record, models) else others).append((distance, record))
    chosen = sorted(backbones, key=lambda pair: pair[0])[: config.max_backbones]
    chosen += sorted(others, key=lambda pair: pair[0])[: config.neighbours]
    return [address for _, record in chosen for address in addresses_of(record)]


def _is_backbone_for(record: NodeRecord, models: frozenset[bytes]) -> bool:
    if "backbone" not in record.state.roles:
        return False
    return not models or any(item.model in models for item in record.state.models)


class Neighbours:
    """Keeps a node's wanted contacts up to date with what gossip knows."""

    def __init__(
        self,
        gossip: GossipService,
        own: NodeId,
        set_wanted: Callable[[Iterable[PeerAddress]], None],
        config: ContactConfig,
    ) -> None:
        self._gossip = gossip
        self._own = own
        self._set_wanted = set_wanted
        self._config = config
        self._changed = trio.Event()
        self._models: frozenset[bytes] = frozenset()
        gossip.subscribe(self._heard)

    def hold(self, models: Iterable[bytes]) -> None:
        """These models' backbones matter from now on; any backbone, if there are none."""
        before, self._models = self._models, frozenset(models)
        if self._models != before:
            self._changed.set()

    async def run(self) -> None:
        """Choose anew when something was heard, at most every `choose_interval_s`."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            records = self._gossip.table.live()
            self._set_wanted(choose_neighbours(records, self._own, self._models, self._config))
            await trio.sleep(self._config.choose_interval_s)

    def _heard(self, change: Change) -> None:
        if change.node_id != self._own:
            self._changed.set()
