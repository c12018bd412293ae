"""What all peers together may cost a node, however many of them one attacker is."""

from __future__ import annotations

import pytest

from swarmnode.config import GossipConfig
from swarmnode.gossip.bodies import pack_offers
from swarmnode.gossip.core import GossipCore
from swarmnode.identity import NodeId, NodeKey
from swarmnode.wire.messages import GossipDifferences, GossipDigest, GossipHave, GossipRecords, GossipWant, Ok

from .samples import CONFIG, record_of
from .test_core import core_of

FLOODERS = [NodeKey.from_seed(bytes([1, number]) * 16).node_id for number in range(64)]
HONEST = NodeKey.from_seed(bytes([2]) * 32).node_id


def offer_ids(core: GossipCore, peer: NodeId, first: int, now_s: float) -> None:
    offers = [((first + number).to_bytes(8, "big"), 0) for number in range(1024)]
    core.answer_untrusted(peer, GossipHave(), pack_offers(offers), now_s)


def wanted_of(core: GossipCore, now_s: float) -> dict[NodeId, int]:
    """How many records each peer is asked for now; all answer that they have nothing any more."""
    wanted: dict[NodeId, int] = {}
    while output := [sent for sent in core.take_output() if isinstance(sent.message, GossipWant)]:
        for sent in output:
            wanted[sent.peer] = wanted.get(sent.peer, 0) + len(sent.body) // 8
            core.receive_untrusted(sent, GossipRecords(), b"", now_s)
    return wanted


def test_many_connections_get_no_more_records_checked_than_a_node_has_time_for() -> None:
    core = core_of(config=CONFIG)
    for peer in (*FLOODERS, HONEST):
        core.connected(peer, 0.0)
    core.take_output()
    total, honest = 0, 0
    for second in range(60):
        now_s = float(second)
        for number, flooder in enumerate(FLOODERS):  # quick ones: they come before everybody else
            offer_ids(core, flooder, (number + 1) * 2**40 + second * 1024, now_s)
        offer_ids(core, HONEST, second * 1024, now_s)
        core.tick(now_s, 0.0)
        wanted = wanted_of(core, now_s)
        total += sum(wanted.values())
        honest += wanted.get(HONEST, 0) if second >= 30 else 0
    assert total <= CONFIG.all_checks_burst + 60 * CONFIG.all_checks_per_s
    assert honest >= 30 * CONFIG.all_checks_per_s / (2 * len(FLOODERS)), "an even share"


def test_one_peer_alone_is_not_held_up_by_the_bounds_for_all() -> None:
    core = core_of(config=CONFIG)
    core.connected(HONEST, 0.0)
    core.take_output()
    total = 0
    for second in range(8):
        offer_ids(core, HONEST, second * 1024, float(second))
        core.tick(float(second), 0.0)
        total += wanted_of(core, float(second)).get(HONEST, 0)
    assert total >= CONFIG.checks_burst + 6 * CONFIG.checks_per_s


def test_many_connections_get_no_more_answers_than_a_node_has_time_for() -> None:
    core = core_of(config=CONFIG)
    for peer in (*FLOODERS, HONEST):
        core.connected(peer, 0.0)
    digest = GossipDigest(bytes(8), "all", (), (), ())
    answered = 0
    for second in range(60):
        for flooder in FLOODERS:
            for _ in range(4):
                reply, _ = core.answer_untrusted(flooder, digest, bytes(512), float(second))
                answered += isinstance(reply, GossipDifferences)
    assert answered * 32 <= len(FLOODERS) * CONFIG.work_burst + 2 * 60 * CONFIG.all_work_per_s
    reply, _ = core.answer_untrusted(HONEST, GossipHave(), pack_offers([(bytes(8), 0)]), 60.0)
    assert isinstance(reply, Ok), "who asked little is still answered"


@pytest.mark.parametrize(("n_records", "answered"), [(0, 16), (2048, 10)])
def test_a_comparison_counts_for_what_it_costs(n_records: int, answered: int) -> None:
    config = GossipConfig(max_per_prefix=10**6)
    core = core_of(config=config)
    core.connected(HONEST, 0.0)
    for number in range(n_records):
        core.table.offer(record_of(number + 1), 0.0)
    digest = GossipDigest(bytes(8), "all", (), (), ())
    replies = [core.answer_untrusted(HONEST, digest, bytes(512), 0.0)[0] for _ in range(32)]
    assert sum(isinstance(reply, GossipDifferences) for reply in replies) == answered


def test_what_many_connections_offer_is_kept_for_a_bounded_part_only() -> None:
    core = core_of(config=CONFIG)
    for peer in FLOODERS:
        core.connected(peer, 0.0)
    for second in range(64):
        for number, flooder in enumerate(FLOODERS):
            offer_ids(core, flooder, (number + 1) * 2**40 + second * 1024, float(second))
    kept = sum(len(peer.offers) for peer in core._overlay)
    assert 0 < kept <= CONFIG.all_offers
