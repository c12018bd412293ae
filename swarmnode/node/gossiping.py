"""Gossip as every node has it: the core with a number of its own, its service, what it says, whom it wants to meet."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial

import trio

from swarmnode.compute.devices import DeviceInfo
from swarmnode.gossip.core import GossipCore
from swarmnode.gossip.records import MAX_DEVICE_BYTES, NodeRecord
from swarmnode.gossip.table import Change
from swarmnode.identity import NodeKey
from swarmnode.node.common import NodeOptions
from swarmnode.node.meeting import Meeting
from swarmnode.services.gossip import GossipService
from swarmnode.services.incarnation import next_incarnation, store_incarnation
from swarmnode.services.neighbours import Neighbours, addresses_of
from swarmnode.services.own_record import OwnRecord
from swarmnode.wire.secret import network_tag


@dataclass(frozen=True)
class Gossiping:
    """What a node has for gossip; `start` runs it."""

    service: GossipService
    record: OwnRecord
    neighbours: Neighbours

    async def start(self, nursery: trio.Nursery, listening: list[tuple[str, int]]) -> None:
        """Begin; `listening`: where nodes are accepted."""
        await nursery.start(self.service.run)
        nursery.start_soon(self.neighbours.run)
        self.record.listening(listening)


def prepare_gossip(
    options: NodeOptions,
    key: NodeKey,
    role: str,
    meeting: Meeting,
    device: DeviceInfo,
    capacity_bytes: int,
    rng: random.Random,
) -> Gossiping:
    """Wire it; nothing runs yet. StoreError if the node's number cannot be stored."""
    path = options.folders.data / "incarnation"
    config = options.config
    core = GossipCore(
        key,
        network_tag(options.network, options.secret).hex(),
        config.gossip,
        rng,
        next_incarnation(path, time.time()),
    )
    service = GossipService(
        core, meeting.connections, config.gossip, time.time, partial(store_incarnation, path)
    )

    def remember(change: Change) -> None:
        if isinstance(change.record, NodeRecord):
            meeting.book.heard(addresses_of(change.record))

    service.subscribe(remember)
    kind = device.kind.encode()[:MAX_DEVICE_BYTES].decode(errors="ignore")
    record = OwnRecord(service, meeting.connections, (role,), capacity_bytes, kind, options.advertise)
    neighbours = Neighbours(service, key.node_id, meeting.contacts.set_wanted, config.contact)
    return Gossiping(service, record, neighbours)
