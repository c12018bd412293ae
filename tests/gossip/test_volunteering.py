"""What a node takes: laws of every decision, and small markets of real nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.gossip.decisions import Claim, Decision, Drop, Fetch, Withdraw
from swarmnode.gossip.shape import F32, MarketShape
from swarmnode.gossip.volunteering import Volunteer
from swarmnode.weights.slices import ExpertRange, merge_pairs, overlapping
from tests.gossip.market import CONFIG, Market, MarketNode, even_shape

MIXED = MarketShape(4, 10, {1: 53, 2: 61, 3: 53})
"""A dense leading layer, experts of two sizes, a last run of 2."""


class FixedView:
    """A view that a test sets."""

    def __init__(self, shape: MarketShape, replicas: F32 | None = None, n_nodes: int = 20) -> None:
        self.shape = shape
        self.n_nodes = self.n_claiming = n_nodes
        self.replicas = np.zeros(shape.size, np.float32) if replicas is None else replicas
        self.demand: F32 = shape.exists.astype(np.float32)

    def settled(self, item: ExpertRange, since_s: float) -> F32:
        return self.replicas[self.shape.slice_of(item)]


def fill(volunteer: Volunteer, view: FixedView, rounds: int = 60) -> list[Decision]:
    """Rounds in which everything is published and downloaded at once."""
    taken: list[Decision] = []
    now_s = 0.0
    for _ in range(rounds):
        now_s = max(now_s + 30, volunteer.next_s)
        decisions = volunteer.decide(view, now_s)
        volunteer.published(now_s)
        for decision in decisions:
            if isinstance(decision, Fetch):
                volunteer.served(decision.item)
            elif isinstance(decision, Drop):
                volunteer.freed(decision.item)
        taken += decisions
    return taken


events = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(["serve", "fail", "wait", "free"])), max_size=60
)


def replay(budget_bytes: int, taken: list[tuple[int, str]]) -> list[Decision]:
    """Decisions in views drawn from seeds, with downloads that succeed, fail or go on. Checks the laws on the way."""
    volunteer = Volunteer(b"n" * 32, MIXED, budget_bytes, CONFIG)
    decided: list[Decision] = []
    dropped: list[ExpertRange] = []
    now_s = 0.0
    for seed, event in taken:
        rng = np.random.default_rng(seed)
        replicas = (rng.integers(0, 9, MIXED.size) / 2).astype(np.float32)
        now_s += float(rng.uniform(0, 40))
        decisions = volunteer.decide(FixedView(MIXED, replicas, int(rng.integers(0, 50))), now_s)
        volunteer.published(now_s)
        decided += decisions
        dropped += [decision.item for decision in decisions if isinstance(decision, Drop)]
        laws(volunteer, budget_bytes)
        for item in volunteer.loading:
            if event == "serve":
                volunteer.served(item)
            elif event == "fail":
                volunteer.failed(item, now_s)
        if event == "free":
            for item in dropped:
                volunteer.freed(item)
            dropped.clear()
        laws(volunteer, budget_bytes)
    return decided


def laws(volunteer: Volunteer, budget_bytes: int) -> None:
    assert volunteer.occupied_bytes <= budget_bytes
    everything = [*volunteer.serving, *volunteer.fetching]
    assert overlapping(everything) is None, "held twice"
    assert all(MIXED.holds(item) for item in everything), "nothing is taken that the model does not have"
    assert len(volunteer.loading) <= CONFIG.max_downloads


@given(st.integers(0, 2500), events)
def test_laws_of_every_decision(budget_bytes: int, taken: list[tuple[int, str]]) -> None:
    assert replay(budget_bytes, taken) == replay(budget_bytes, taken)


@settings(max_examples=40)
@given(st.integers(0, 2000))
def test_a_budget_is_filled_in_real_bytes(budget_bytes: int) -> None:
    """cases.md 4: nothing is priced at the widest layer."""
    volunteer = Volunteer(b"n" * 32, MIXED, budget_bytes, CONFIG)
    fill(volunteer, FixedView(MIXED))
    left_bytes = budget_bytes - volunteer.occupied_bytes
    for layer, expert_bytes in MIXED.expert_bytes.items():
        held = sum(item.count for item in volunteer.serving if item.layer == layer)
        assert left_bytes < expert_bytes or held == MIXED.n_expert
    assert volunteer.occupied_bytes == MIXED.range_bytes(volunteer.serving)


def test_a_budget_at_the_real_sizes() -> None:
    sizes = {layer: 6_100_000 if layer % 2 else 5_300_000 for layer in range(48)}
    shape = MarketShape(48, 256, sizes)
    for budget_bytes in (42_000_000, 300_000_000, 340_000_000):
        volunteer = Volunteer(b"n" * 32, shape, budget_bytes, CONFIG)
        fill(volunteer, FixedView(shape))
        assert 0 <= budget_bytes - shape.range_bytes(volunteer.serving) < 5_300_000


def test_a_large_budget_takes_longer_runs() -> None:
    shape = even_shape(48, 256)
    volunteer = Volunteer(b"n" * 32, shape, 10 * 10_000, CONFIG)
    assert 0 < len(fill(volunteer, FixedView(shape), 400)) < 700
    assert volunteer.full
    assert len(volunteer.serving) <= CONFIG.max_runs


def test_claims_are_published_before_anything_is_downloaded() -> None:
    view = FixedView(even_shape())
    volunteer = Volunteer(b"n" * 32, even_shape(), 400, CONFIG)
    first = volunteer.decide(view, 0.0)
    assert [type(decision) for decision in first] == [Claim] * CONFIG.max_claims
    assert volunteer.decide(view, 1e3) == []  # nothing went out, so nobody can have heard
    volunteer.published(1e3)
    soon = volunteer.decide(view, 1e3 + 8)
    assert [decision for decision in soon if isinstance(decision, Fetch)] == [
        Fetch(item) for item in volunteer.loading
    ]
    assert len(volunteer.loading) == CONFIG.max_downloads


def test_rounds_are_jittered() -> None:
    view = FixedView(even_shape())
    waits = set()
    for number in range(20):
        volunteer = Volunteer(bytes([number]) * 32, even_shape(), 400, CONFIG)
        volunteer.decide(view, 100.0)
        waits.add(volunteer.next_s - 100.0)
        assert volunteer.decide(view, 100.1) == []
    assert len(waits) == 20
    assert 0.5 * CONFIG.round_s <= min(waits) < max(waits) <= 1.5 * CONFIG.round_s


def test_the_same_slices_after_a_restart() -> None:
    shape = even_shape()
    before = Volunteer(b"n" * 32, shape, 200, CONFIG)
    fill(before, FixedView(shape))
    after = Volunteer(b"n" * 32, shape, 200, CONFIG, epoch=12345)
    loaded = after.adopt(before.serving, 0.0)
    assert merge_pairs((item.layer, expert) for item in loaded for expert in item.experts) == before.serving
    assert max(item.count for item in loaded) <= CONFIG.run_experts, (
        "as runs, which may be given up one by one"
    )
    assert after.serving == ()
    assert after.fetching == before.serving
    assert after.decide(FixedView(shape), 1.0) == []
    for item in loaded:
        after.served(item)
    crowded = FixedView(shape, np.full(shape.size, 2, np.float32))
    assert not [decision for decision in fill(after, crowded) if not isinstance(decision, Claim | Withdraw)]
    assert after.serving == before.serving


def test_what_is_kept_beyond_the_budget_is_cut() -> None:
    volunteer = Volunteer(b"n" * 32, MIXED, 200, CONFIG)
    kept = (ExpertRange(0, 0, 2), ExpertRange(1, 0, 3), ExpertRange(1, 2, 2), ExpertRange(2, 8, 4))
    assert volunteer.adopt(kept, 0.0) == (ExpertRange(1, 0, 3),)
    assert volunteer.occupied_bytes == 159


def test_a_failed_run_is_left_alone_for_a_while() -> None:
    shape = even_shape(1, 4)
    volunteer = Volunteer(b"n" * 32, shape, 40, CONFIG)
    view = FixedView(shape)
    volunteer.decide(view, 0.0)
    volunteer.published(0.0)
    (fetch,) = volunteer.decide(view, 30.0)
    assert isinstance(fetch, Fetch)
    volunteer.failed(fetch.item, 30.0)
    assert volunteer.decide(view, 50.0) == []
    assert volunteer.decide(view, 100.0) == [Claim(fetch.item)]


def test_nothing_is_given_up_without_replicas_to_spare() -> None:
    shape = even_shape()
    volunteer = Volunteer(b"n" * 32, shape, 80, CONFIG)
    fill(volunteer, FixedView(shape))
    assert not [
        decision
        for decision in fill(volunteer, FixedView(shape, np.full(shape.size, 3, np.float32)), 2000)
        if isinstance(decision, Drop)
    ]


def test_surplus_is_given_up_seldom_and_for_something_scarce() -> None:
    shape = even_shape(4, 64)
    dropped = 0
    for number in range(40):
        volunteer = Volunteer(bytes([number]) * 32, shape, 80, CONFIG)
        fill(volunteer, FixedView(shape), 10)
        held = volunteer.serving
        replicas = np.full(shape.size, 3, np.float32)
        for item in held:
            replicas[shape.slice_of(item)] = 9
        decisions = fill(volunteer, FixedView(shape, replicas, n_nodes=300), 10)
        dropped += sum(isinstance(decision, Drop) for decision in decisions)
        assert volunteer.full
    assert 0 < dropped < 40  # 400 turns, of which 2 % may act


def test_two_nodes_within_150_ms_do_not_overlap() -> None:
    """cases.md 28: neither can have heard of the other when it decides."""
    shape = even_shape(3, 16)
    for seed in range(10):
        nodes = [MarketNode(2 * seed + place, shape, 24 * 10) for place in range(2)]
        market = Market(nodes, delay_s=1.0)
        market.run(120, {nodes[1].number: 0.15})
        assert market.all_replicas() == [1] * 48
        assert all(node.volunteer.full for node in nodes)
        assert sum(item.count for node in nodes for item in node.fetched) == 48, "nothing was fetched in vain"


def test_several_slots_of_a_node_do_not_overlap() -> None:
    """cases.md 28: two downloads at once, of different experts."""
    node = MarketNode(1, even_shape(3, 16), 480)
    market = Market([node])
    market.run(150)
    assert market.all_replicas() == [1] * 48
    assert overlapping(node.fetched) is None
    assert sum(item.count for item in node.fetched) == 48


@pytest.mark.parametrize("swarm", range(4))
@pytest.mark.parametrize("kills", [1, 3])
def test_eight_nodes_heal_after_kills(kills: int, swarm: int) -> None:
    """Each of 8 holds a third: 2.7 replicas of everything; the rest holds 2.3 when one is gone, 1.7 after three."""
    shape = even_shape(3, 16)
    nodes = [MarketNode(8 * swarm + number, shape, 160) for number in range(8)]
    market = Market(nodes, step_s=0.25)
    market.run(90)
    assert min(market.all_replicas()) >= 2
    for node in nodes[:kills]:
        market.kill(node)
    market.run(360)
    assert min(market.all_replicas()) >= (2 if kills == 1 else 1)


def test_what_is_being_dropped_is_not_claimed_until_it_is_freed() -> None:
    """A download of it could begin before the old one is deleted, and would be deleted with it."""
    shape = even_shape(2, 8)
    volunteer = Volunteer(b"n" * 32, shape, 4 * shape.expert_bytes[0], CONFIG)
    item = ExpertRange(0, 0, 4)
    for part in volunteer.adopt([item], 0.0):
        volunteer.served(part)
    assert volunteer.serving == (item,)
    volunteer._drop(item)
    others = FixedView(shape, np.full(shape.size, 5, np.float32))
    others.replicas[shape.slice_of(item)] = 0  # nothing else is as scarce
    claimed = [found for found in volunteer.decide(others, 1.0) if isinstance(found, Claim)]
    assert claimed
    assert overlapping([item, *[found.item for found in claimed]]) is None
    volunteer.freed(item)
    assert overlapping([item, *[run for _, run in volunteer._pick(others, 10**9, 4)]]) is not None


def test_a_hole_is_filled_though_backbones_doubt_the_rest() -> None:
    """After kills a backbone has missed rows of nearly everything: what stays counts a little less than whole."""
    shape = even_shape(2, 8)
    hole = ExpertRange(1, 4, 4)
    replicas = np.full(shape.size, 0.8, np.float32)
    replicas[shape.slice_of(hole)] = 0
    volunteer = Volunteer(b"n" * 32, shape, 8 * shape.expert_bytes[0], CONFIG)
    for part in volunteer.adopt([ExpertRange(0, 0, 8)], 0.0):
        volunteer.served(part)
    fill(volunteer, FixedView(shape, replicas, n_nodes=3))
    assert hole in volunteer.serving
    assert sum(item.count for item in volunteer.serving) == 8


def exchanged(own_replicas: float) -> tuple[float, float] | None:
    """A full node of a swarm in which experts have three replicas, its own so many (itself counted), and one run a
    single one: when it claims that run, and when it drops something for it.
    """
    shape = even_shape(2, 8)
    scarce = ExpertRange(1, 4, 4)
    replicas = np.full(shape.size, 3, np.float32)
    replicas[shape.slice_of(ExpertRange(0, 0, 8))] = own_replicas - 1
    replicas[shape.slice_of(scarce)] = 1
    view = FixedView(shape, replicas, n_nodes=3)
    volunteer = Volunteer(b"n" * 32, shape, 8 * shape.expert_bytes[0], CONFIG)
    for part in volunteer.adopt([ExpertRange(0, 0, 8)], 0.0):
        volunteer.served(part)
    claimed_s = None
    for second in range(600):
        now_s = float(second)
        decisions = volunteer.decide(view, now_s)
        volunteer.published(now_s)
        if any(isinstance(decision, Drop) for decision in decisions):
            assert claimed_s is not None
            return claimed_s, now_s
        if Claim(scarce) in decisions:
            claimed_s = now_s
    assert claimed_s is None
    return None


@pytest.mark.parametrize("own_replicas", [2.0, 2.5, 2.9])
def test_a_second_replica_is_not_given_up_for_a_second_one_elsewhere(own_replicas: float) -> None:
    """Nor with a third on its way: for a moment there would be one of both."""
    assert exchanged(own_replicas) is None


def test_a_third_replica_is_given_up_for_a_second_one_elsewhere_after_a_minute() -> None:
    times = exchanged(3.0)
    assert times is not None
    claimed_s, dropped_s = times
    assert CONFIG.second_wait_s <= dropped_s - claimed_s <= CONFIG.second_wait_s + 1.5 * CONFIG.round_s


def test_claims_that_wait_for_downloads_wake_nobody() -> None:
    """Four have settled, two are downloaded, the other two are looked at once a round: not a hundred times a second."""
    shape = even_shape()
    volunteer, view = Volunteer(b"n" * 32, shape, 400, CONFIG), FixedView(shape)
    now_s, wakes = 0.0, 0
    while now_s < 120.0:
        volunteer.decide(view, now_s)
        volunteer.published(now_s)
        now_s, wakes = max(volunteer.next_s, now_s + 0.01), wakes + 1
    assert len(volunteer.loading) == CONFIG.max_downloads
    assert volunteer.fetching != volunteer.loading, "others wait"
    assert wakes <= 2 + 120.0 / (0.5 * CONFIG.round_s)


def test_claims_to_free_room_settle_as_soon_as_they_can() -> None:
    shape, view = even_shape(), FixedView(even_shape())
    volunteer = Volunteer(b"n" * 32, shape, 400, replace(CONFIG, round_s=60.0))
    volunteer.decide(view, 0.0)
    assert volunteer.next_s >= 30.0
    volunteer.published(5.0)
    settled_s = 5.0 + volunteer.settle_s(view.n_nodes)
    assert volunteer.next_s == settled_s < 30.0
    assert [type(found) for found in volunteer.decide(view, settled_s)] == [Fetch] * CONFIG.max_downloads
