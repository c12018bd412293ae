"""Whom to dial, decided without a network."""

from __future__ import annotations

import random
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import ContactConfig
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.services.dial_plan import DialPlan, Source, Step

CONFIG = ContactConfig(dials_at_once=16, max_contacts=4, max_targets=40, max_addresses=3)
OWN, *NODES = (NodeKey.from_seed(bytes([number]) * 32).node_id for number in range(1, 62))


def at(node: NodeId, host: str = "host") -> PeerAddress:
    return PeerAddress(node, host, 1)


def plan(seed: int = 0) -> DialPlan:
    return DialPlan(OWN, CONFIG, random.Random(seed))


def started(step: Step) -> list[NodeId]:
    return [target.node_id for target in step.start]


def test_a_few_at_a_time_and_more_when_they_do_not_answer() -> None:
    made = plan()
    made.add(map(at, NODES[:10]), Source.LISTED)
    assert len(started(made.step(0.0, ()))) == 4
    assert started(made.step(0.1, ())) == []
    assert made.wake_s(0.1) == CONFIG.attempt_delay_s
    assert len(started(made.step(0.25, ()))) == 4
    assert len(started(made.step(0.5, ()))) == 2


def test_the_order_is_drawn_at_random() -> None:
    firsts = set()
    for seed in range(20):
        made = plan(seed)
        made.add(map(at, NODES[:10]), Source.LISTED)
        firsts.add(tuple(started(made.step(0.0, ()))))
    assert len(firsts) > 10


def test_dials_are_given_up_when_there_are_contacts_enough() -> None:
    made = plan()
    made.add(map(at, NODES[:8]), Source.LISTED)
    made.step(0.0, ())
    made.step(0.25, ())
    step = made.step(0.3, set(NODES[:4]))
    assert started(step) == []
    assert len(step.abandon) == 8


def test_old_dials_make_room_for_nodes_that_were_never_tried() -> None:
    made = plan()
    made.add(map(at, NODES[:30]), Source.LISTED)
    now_s, tried = 0.0, set[NodeId]()
    while len(tried) < 30:
        step = made.step(now_s, ())
        tried |= set(started(step))
        for target in step.abandon:
            made.postpone(target, now_s)
        now_s += 0.05
        assert now_s < 10
    assert now_s < 6


def test_who_is_wanted_is_dialled_first_and_whatever_else_is_going_on() -> None:
    made = plan()
    made.add(map(at, NODES[:30]), Source.LISTED)
    for number in range(10):
        made.step(number * CONFIG.attempt_delay_s, ())
    made.replace([at(NODES[40])], Source.WANTED)
    assert started(made.step(2.26, set(NODES[:4]))) == [NODES[40]]


def test_remembered_ones_wait_for_the_listed() -> None:
    made = plan()
    made.add([at(NODES[0])], Source.LISTED)
    made.add([at(NODES[1])], Source.REMEMBERED)
    assert started(made.step(0.0, ())) == [NODES[0]]
    assert made.wake_s(1.9) <= CONFIG.patience_s
    assert started(made.step(CONFIG.remembered_after_s, ())) == [NODES[1]]
    other = plan()
    other.add([at(NODES[1])], Source.REMEMBERED)
    assert started(other.step(0.0, {NODES[5]})) == []
    assert started(other.step(5.0, ())) == [NODES[1]]


def test_sources_come_and_go_by_themselves() -> None:
    made = plan()
    made.add([at(NODES[0])], Source.LISTED)
    made.replace([at(NODES[0], "other"), at(NODES[1])], Source.WANTED)
    made.replace([], Source.WANTED)
    assert made.get(NODES[1]) is None
    target = made.get(NODES[0])
    assert target is not None
    assert target.source is Source.LISTED
    assert [address.host for address in target.places] == ["host", "other"]
    made.remove([NODES[0], NODES[7]])
    assert len(made) == 0


def test_everything_is_bounded() -> None:
    made = plan()
    made.add(map(at, [OWN, *NODES]), Source.LISTED)
    assert len(made) == CONFIG.max_targets
    assert made.get(OWN) is None
    made.add([at(NODES[0], f"h{number}") for number in range(100)], Source.WANTED)
    target = made.get(NODES[0])
    assert target is not None
    assert [address.host for address in target.places] == ["h97", "h98", "h99"]


def test_a_wrong_address_is_tried_only_when_there_is_no_other() -> None:
    made = plan()
    made.add([at(NODES[0], "wrong"), at(NODES[0], "right")], Source.LISTED)
    target = made.get(NODES[0])
    assert target is not None
    made.reached_another(target, at(NODES[0], "wrong"))
    assert [address.host for address in target.places] == ["right"]
    made.reached_another(target, at(NODES[0], "right"))
    assert [address.host for address in target.places] == ["wrong", "right"]
    made.opened(target, at(NODES[0], "right"))
    assert [address.host for address in target.places] == ["right"]


@given(st.data())
def test_no_node_is_dialled_twice_or_while_it_is_connected_and_bounds_hold(data: st.DataObject) -> None:
    made, now_s = plan(), 0.0
    connected: set[NodeId] = set()
    dialling: set[NodeId] = set()
    nodes = st.sampled_from(NODES[:30])
    for _ in range(30):
        match data.draw(st.sampled_from(["add", "want", "connect", "lose", "fail", "wait"])):
            case "add":
                made.add(map(at, data.draw(st.lists(nodes))), data.draw(st.sampled_from(Source)))
            case "want":
                made.replace(map(at, data.draw(st.lists(nodes, max_size=5))), Source.WANTED)
            case "connect":
                connected.add(data.draw(nodes))
            case "lose" if connected:
                connected.discard(data.draw(st.sampled_from(sorted(connected))))
            case "fail" if dialling:
                node = data.draw(st.sampled_from(sorted(dialling)))
                dialling.discard(node)
                target = made.get(node)
                if target is not None:
                    made.ended(target, now_s, is_well=False, lasted_s=0.0)
            case _:
                now_s += data.draw(st.floats(0.01, 5))
        dialling &= {node for node in NODES if made.get(node) is not None}
        step = made.step(now_s, connected)
        check(step, connected, dialling)
        dialling |= set(started(step))
        assert len(dialling) <= CONFIG.dials_at_once
        assert made.wake_s(now_s) > now_s


def check(step: Step, connected: Collection[NodeId], dialling: Collection[NodeId]) -> None:
    new = started(step)
    assert len(set(new)) == len(new)
    assert not set(new) & set(connected)
    assert not set(new) & set(dialling)
    assert all(target.dialling_since_s is not None for target in step.abandon)
