"""What all peers together may cost a node, however many of them one attacker is."""

from __future__ import annotations

import pytest

from swarmnode.config import GossipConfig
from swarmnode.gossip.bodies import pack_offers
from swarmnode.gossip.core import GossipCore
from swarmnode.gossip.work import DIGEST_RECORDS, DIGEST_WORK
from swarmnode.identity import NodeId, NodeKey
from swarmnode.wire.messages import (
    GossipDifferences,
    GossipDigest,
    GossipHave,
    GossipRecords,
    GossipWant,
    Message,
    Refused,
)

from .cores import core_of
from .samples import CONFIG, record_of

FLOODERS = [NodeKey.from_seed(bytes([1, number]) * 16).node_id for number in range(64)]
HONEST = NodeKey.from_seed(bytes([2]) * 32).node_id
DIGEST = GossipDigest(bytes(8), "all", (), (), ())


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


def is_answered(core: GossipCore, peer: NodeId, message: Message, now_s: float) -> bool:
    """Whether a small message of the peer gets another answer than `busy`."""
    body = bytes(512) if isinstance(message, GossipDigest) else pack_offers([(bytes(8), 0)])
    reply, _ = core.answer_untrusted(peer, message, body, now_s)
    return not isinstance(reply, Refused)


def asks(core: GossipCore, peer: NodeId, now_s: float, n_digests: int, n_haves: int) -> int:
    """A flooder's turn; how many of its comparisons were answered."""
    answered = sum(is_answered(core, peer, DIGEST, now_s) for _ in range(n_digests))
    for _ in range(n_haves):
        is_answered(core, peer, GossipHave(), now_s)
    return answered


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
    answered = 0
    for second in range(60):
        for flooder in FLOODERS:
            answered += asks(core, flooder, float(second), n_digests=4, n_haves=16)
    assert answered * 32 <= len(FLOODERS) * CONFIG.work_burst + 2 * 60 * CONFIG.all_work_per_s
    assert core._work._all.left(59.0) < 1, "nothing is left for anybody at this moment"
    assert is_answered(core, HONEST, GossipHave(), 59.0), "who asked little is still answered"
    assert is_answered(core, HONEST, DIGEST, 59.0)


def test_a_comparison_is_answered_to_who_was_quiet_and_its_cost_is_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a table of 20,000 it costs an even share of 65 peers 190 s: more than anybody may save."""
    core = core_of(config=CONFIG)
    monkeypatch.setattr(type(core.table), "__len__", lambda table: 20_000)
    for peer in (*FLOODERS, HONEST):
        core.connected(peer, 0.0)
    answered = 0
    for second in range(120):
        for flooder in FLOODERS:
            answered += asks(core, flooder, float(second), n_digests=4, n_haves=16)
    assert core._work._all.left(119.0) < 1
    assert is_answered(core, HONEST, DIGEST, 119.0)
    cost = DIGEST_WORK * (1 + 20_000 / DIGEST_RECORDS)
    at_first = CONFIG.all_work_burst // cost + len(FLOODERS)
    assert answered <= at_first + 2 * 120 * CONFIG.all_work_per_s / cost
    assert not is_answered(core, HONEST, DIGEST, 123.0), "four seconds have not paid for it"


def test_one_flooder_takes_nothing_from_others() -> None:
    """What is refused must not have been taken from what is there for all."""
    core = core_of(config=CONFIG)
    for peer in (*FLOODERS, HONEST):
        core.connected(peer, 0.0)
    answered = 0
    for tick in range(600):
        now_s = tick / 10
        asks(core, FLOODERS[0], now_s, n_digests=4, n_haves=40)
        answered += sum(is_answered(core, HONEST, GossipHave(), now_s) for _ in range(2))
    assert answered == 1200
    assert is_answered(core, FLOODERS[1], DIGEST, 60.0)


@pytest.mark.parametrize(("n_records", "answered"), [(0, 16), (2048, 10)])
def test_a_comparison_counts_for_what_it_costs(n_records: int, answered: int) -> None:
    config = GossipConfig(max_per_prefix=10**6)
    core = core_of(config=config)
    core.connected(HONEST, 0.0)
    for number in range(n_records):
        core.table.offer(record_of(number + 1), 0.0)
    replies = [core.answer_untrusted(HONEST, DIGEST, bytes(512), 0.0)[0] for _ in range(32)]
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


def test_what_peers_offer_that_connect_one_after_the_other_is_bounded_too() -> None:
    """The first is alone and offers as much as one may, the next is one of two ..."""
    core = core_of(config=CONFIG)
    now_s = 0.0
    for number in range(128):
        peer = NodeKey.from_seed(bytes([3, number]) * 16).node_id
        core.connected(peer, now_s)
        for _ in range(CONFIG.max_offers // 1024 + 1):
            now_s += 1.0
            offer_ids(core, peer, (number + 1) * 2**40 + int(now_s) * 1024, now_s)
        kept = [len(peer.offers) for peer in core._overlay]
        assert sum(kept) <= CONFIG.all_offers
    assert min(kept) > 0
