"""Cores that talk to each other, and a peer that says what a test wants."""

from __future__ import annotations

import hashlib
import random

from swarmnode.config import GossipConfig
from swarmnode.gossip import bodies
from swarmnode.gossip.core import GossipCore, Outgoing
from swarmnode.gossip.view import ALL, View
from swarmnode.wire.messages import GossipHave, GossipRecords, GossipWant, Message

from .samples import CONFIG, NETWORK, key_of

WALL_S = 1_800_000_000.0
PEER = key_of(50).node_id


def core_of(
    number: int = 0, config: GossipConfig = CONFIG, view: View = ALL, incarnation: int = 7
) -> GossipCore:
    return GossipCore(key_of(number), NETWORK, config, random.Random(number), incarnation, view=view)


def run(cores: list[GossipCore], now_s: float, duration_s: float = 5.0) -> float:
    """Deliver everything at once, a quarter of a second a tick; the time after."""
    by_id = {core.node_id: core for core in cores}
    end_s = now_s + duration_s
    while now_s < end_s:
        now_s += 0.25
        for core in cores:
            core.tick(now_s, WALL_S)
        for _ in range(8):
            for core in cores:
                for out in core.take_output():
                    reply, body = by_id[out.peer].answer_untrusted(core.node_id, out.message, out.body, now_s)
                    core.receive_untrusted(out, reply, body, now_s)
    return now_s


def connect(a: GossipCore, b: GossipCore, now_s: float = 0.0) -> None:
    a.connected(b.node_id, now_s)
    b.connected(a.node_id, now_s)


def give(core: GossipCore, records: list[bytes], now_s: float = 1.0) -> None:
    """Let PEER offer these records and answer what is asked for."""
    if core.table.first_known_s(PEER) is None:
        core.connected(PEER, now_s)
    ids = [id_of(data) for data in records]
    core.answer_untrusted(PEER, GossipHave(), bodies.pack_offers([(i, 0) for i in ids]), now_s)
    wants = [out for out in core.take_output() if isinstance(out.message, GossipWant)]
    for want in wants:
        body = bodies.pack_records([(0, data) for data in records])
        core.receive_untrusted(want, GossipRecords(), body, now_s)


def id_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def only(outputs: list[Outgoing], message: type[Message]) -> list[Outgoing]:
    return [out for out in outputs if isinstance(out.message, message)]
