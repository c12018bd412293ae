"""Whom to ask for which block: by speed, within windows, with take-overs; and nothing is lost whatever happens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import StoreConfig
from swarmnode.identity import NodeId, NodeKey
from swarmnode.schedule.blame import Suspects
from swarmnode.schedule.blocks import BlockScheduler, Standing

CONFIG = replace(StoreConfig(), block_bytes=1000)
A, B, C = (NodeKey.from_seed(bytes([seed] * 32)).node_id for seed in range(3))


def scheduler(*nodes: NodeId, blocks: int = 100) -> BlockScheduler[int]:
    made: BlockScheduler[int] = BlockScheduler(CONFIG, lambda node, block: True)
    made.want(range(blocks))
    for node in nodes:
        made.join(node, Standing())
    return made


def asked(made: BlockScheduler[int], now_s: float) -> list[tuple[NodeId, int]]:
    """Everything there is room for now."""
    choices = []
    while (choice := made.next(now_s)) is not None:
        choices.append(choice)
    return choices


def test_strangers_get_few_blocks_in_order() -> None:
    made = scheduler(A, B)
    assert [block for _, block in asked(made, 0.0)] == [0, 1, 2, 3]
    assert made.n_in_flight == 2 * CONFIG.first_blocks


@pytest.mark.parametrize(
    ("block_s", "between_s", "window"),
    [(0.1, 0.11, 2), (0.1, 0.06, 3), (0.1, 0.03, 5), (0.1, 0.01, 8), (1.0, 1.1, 2), (0.0, 0.0, 8)],
)
def test_the_window_is_one_round_trip_of_speed_and_a_block(
    block_s: float, between_s: float, window: int
) -> None:
    standing = Standing()
    for _ in range(50):
        standing.arrived(1000, block_s, between_s)
    assert standing.window(CONFIG) == window


def test_blocks_that_are_not_on_disk_count_as_under_way() -> None:
    made = scheduler(A)
    assert len(asked(made, 0.0)) == 2
    made.arrived(A, 0, 1000, 0.1)
    made.arrived(A, 1, 1000, 0.2)
    window = CONFIG.first_blocks
    assert len(asked(made, 0.2)) < window
    made.stored(A)
    made.stored(A)
    assert made.n_in_flight + len(asked(made, 0.2)) >= window


def test_a_fast_source_takes_more() -> None:
    """B needs ten times as long for a block: it gets about a tenth of them, and is relieved of the last ones."""
    made, now_s = scheduler(A, B), 0.0
    due: list[tuple[float, NodeId, int]] = []
    got = {A: 0, B: 0}
    while sum(got.values()) < 100:
        for node, block in asked(made, now_s):
            later = [when for when, other, _ in due if other == node]
            due.append((max([now_s, *later]) + (0.1 if node == A else 1.0), node, block))
        now_s, node, block = due.pop(due.index(min(due, key=lambda item: item[0])))
        losers = made.arrived(node, block, 1000, now_s)
        made.stored(node)
        due = [item for item in due if item[2] != block or item[1] not in losers]
        got[node] += 1
    assert 5 <= got[B] <= 15
    assert now_s < 11.5


def test_a_late_block_is_taken_over_by_one_other_when_nothing_else_is_left() -> None:
    made = scheduler(A, B, C, blocks=2)
    assert asked(made, 0.0) == [(A, 0), (B, 1)]
    assert made.arrived(B, 1, 1000, 0.1) == ()
    assert asked(made, CONFIG.takeover_s - 0.01) == []
    assert made.wake_s(0.1) <= CONFIG.takeover_s
    (choice,) = asked(made, CONFIG.takeover_s)
    assert choice in {(B, 0), (C, 0)}
    assert asked(made, 2 * CONFIG.takeover_s) == [], "two are enough"
    assert made.arrived(choice[0], 0, 1000, 1.5) == (A,)
    made.want([7])
    assert A not in {node for node, _ in asked(made, 1.5)}, "it is given a rest"
    assert not made.is_stuck()


def test_a_slow_taker_waits_longer() -> None:
    made = scheduler(blocks=1)
    slow = Standing()
    slow.arrived(1000, 2.0, 2.0)
    made.join(A, Standing())
    assert asked(made, 0.0) == [(A, 0)]
    made.join(B, slow)
    assert asked(made, 11.9) == []
    assert asked(made, 12.0) == [(B, 0)], "three times the four seconds that it needs itself"


def test_what_a_source_had_comes_first_when_it_leaves() -> None:
    made = scheduler(A, B)
    asked(made, 0.0)
    made.leave(A)
    made.arrived(B, 1, 1000, 0.1)
    made.stored(B)
    assert asked(made, 0.1)[0] == (B, 2)
    assert set(made.nodes) == {B}


def test_silence_is_noticed_and_an_arrival_gives_the_others_as_long_again() -> None:
    made = scheduler(A)
    asked(made, 0.0)
    made.arrived(A, 0, 1000, 15.0)
    assert made.silent(15.0 + CONFIG.block_timeout_s - 0.1) == ()
    assert made.silent(15.0 + CONFIG.block_timeout_s) == (A,)


def test_a_liar_gets_only_what_others_do_not_have() -> None:
    made: BlockScheduler[int] = BlockScheduler(CONFIG, lambda node, block: node != A or block % 2 == 0)
    made.want(range(4))
    made.join(A, Standing())
    made.join(B, Standing(n_wrong=1))
    choices = asked(made, 0.0)
    assert {block for node, block in choices if node == A} == {0, 2}
    assert {block for node, block in choices if node == B} == {1, 3}


def test_stuck_is_told() -> None:
    made: BlockScheduler[int] = BlockScheduler(CONFIG, lambda node, block: node == A)
    made.want([0])
    assert made.is_stuck()
    made.join(B, Standing())
    assert made.is_stuck()
    made.join(A, Standing())
    made.pause(A, 5.0)
    assert asked(made, 0.0) == []
    assert not made.is_stuck(), "it may be asked later"
    assert asked(made, 5.0) == [(A, 0)]


@given(st.integers(0, 10**9))
def test_every_block_comes_whatever_happens(seed: int) -> None:
    """Sources come, go, fail, pause and answer at random; as long as one stays, each block arrives exactly once."""
    rng = random.Random(seed)
    made, now_s = scheduler(A, blocks=30), 0.0
    standings = {node: Standing() for node in (A, B, C)}
    flights: set[tuple[NodeId, int]] = set()
    got: list[int] = []
    for _ in range(5000):
        now_s += rng.uniform(0.0, 0.4)
        flights |= set(asked(made, now_s))
        node = rng.choice((B, C))
        match rng.randrange(6):
            case 0 if node not in made.nodes:
                made.join(node, standings[node])
            case 1 if node in made.nodes:
                made.leave(node)
                flights = {flight for flight in flights if flight[0] != node}
            case 2:
                made.pause(node, now_s + 1)
            case 3 if flights:
                failing = rng.choice(sorted(flights, key=str))
                flights.discard(failing)
                made.failed(*failing)
            case _ if flights:
                coming = rng.choice(sorted(flights, key=str))
                others = made.arrived(*coming, 1000, now_s)
                made.stored(coming[0])
                flights -= {coming, *((other, coming[1]) for other in others)}
                got.append(coming[1])
        assert made.n_in_flight == len(flights)
        if len(got) == 30:
            break
    assert sorted(got) == list(range(30))
    assert made.is_stuck(), "nothing is left"


def test_blame_falls_on_whose_blocks_differ() -> None:
    suspects = Suspects()
    assert not suspects
    suspects.remember((A, B, None, A), (b"1", b"x", b"y", b"4"))
    suspects.remember((C, B, C, C), (b"1", b"2", b"z", b"4"))
    assert suspects.liars((b"1", b"2", b"3", b"4")) == {B, C}
