"""What a neighbour is told, and how often."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from swarmnode.gossip import bodies
from swarmnode.wire import constants as c
from swarmnode.wire.messages import GossipHave, Ok

from .cores import PEER, WALL_S, core_of, only
from .samples import CONFIG, record_of


def test_offers_and_pending_ids_are_bounded() -> None:
    config = replace(CONFIG, max_offers=300, max_pending=20, work_burst=10_000, max_passed=64)
    core = core_of(config=config)
    core.connected(PEER, 0.0)
    for start in range(5):
        offers = [(bytes([start, i >> 8, i & 255]) + bytes(5), 0) for i in range(500)]
        core.answer_untrusted(PEER, GossipHave(), bodies.pack_offers(offers), 0.0)
    peer = core._overlay.get(PEER)
    assert peer is not None
    assert len(peer.offers) == 300
    peer.linked, peer.telling = True, []
    for number in range(100):  # a neighbour that answers nothing
        core.table.offer(record_of(number + 1), 0.0)
        core._telling.spread(record_of(number + 1), None, 0.0)
    assert len(peer.pending) == 20
    assert record_of(100).id in peer.pending


def haves_to_a_neighbour(news_s: list[float], until_s: float) -> list[tuple[float, int]]:
    """When a neighbour that answers at once is told something, and of how many ids, while one comes at each of these
    times.
    """
    core = core_of()
    core.connected(PEER, 0.0)
    peer = core._overlay.get(PEER)
    assert peer is not None
    peer.linked = True
    told = []
    waiting = list(enumerate(news_s, 1))
    for eighth in range(int(8 * until_s)):
        now_s = eighth / 8
        while waiting and waiting[0][1] <= now_s:
            record = record_of(waiting.pop(0)[0])
            core.table.offer(record, now_s)
            core._telling.spread(record, None, now_s)
        core.tick(now_s, WALL_S)
        for have in only(core.take_output(), GossipHave):
            told.append((now_s, len(have.body) // c.GOSSIP_OFFER_BYTES))
            core.receive_untrusted(have, Ok(), b"", now_s)
    return told


def test_the_first_new_id_waits_for_others_and_the_next_ones_for_a_second() -> None:
    wait_s, interval_s = CONFIG.have_wait_s, CONFIG.have_interval_s
    told = haves_to_a_neighbour([1.0, 1.125, 1.5, 1.75, 5.0], 10.0)
    assert told == [(1 + wait_s, 2), (1 + wait_s + interval_s, 2), (5 + wait_s, 1)]


def test_a_neighbour_hears_once_a_second_however_much_there_is() -> None:
    told = haves_to_a_neighbour([number / 16 for number in range(16 * 30)], 31.0)
    times = [told_s for told_s, _ in told]
    assert min(after - before for before, after in pairwise(times)) >= CONFIG.have_interval_s
    assert len(told) == 31
    assert sum(n_ids for _, n_ids in told) == 16 * 30
