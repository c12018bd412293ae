"""The core, message by message: what it sends, answers, refuses and survives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.gossip import bodies
from swarmnode.gossip.core import Outgoing
from swarmnode.gossip.records import OwnState, network_id
from swarmnode.gossip.view import ALL, View
from swarmnode.wire import constants as c
from swarmnode.wire.messages import (
    GossipDifferences,
    GossipDigest,
    GossipHave,
    GossipLink,
    GossipRecords,
    GossipWant,
    Message,
    Ok,
    Refused,
)

from .cores import PEER, WALL_S, connect, core_of, give, only, run
from .samples import (
    CONFIG,
    DEMAND,
    MODEL,
    contents,
    error_code,
    holdings_of_layer,
    key_of,
    record_of,
    state_of,
)

# -- the way of a record


def test_two_nodes_learn_of_each_other_within_two_seconds() -> None:
    a, b = core_of(1), core_of(2)
    a.publish(state_of(), 0.0, WALL_S)
    b.publish(state_of(layer=3), 0.0, WALL_S)
    b.publish_demand(DEMAND, 0.0, WALL_S)
    connect(a, b)
    run([a, b], 0.0, 2.0)
    for core in (a, b):
        assert {record.node_id for record in core.table.live()} == {a.node_id, b.node_id}
        assert [record.models for record in core.table.demands()] == [DEMAND]
    assert contents(a.table) == contents(b.table)
    assert a.neighbours == (b.node_id,)


def test_an_update_crosses_a_chain_and_a_leave_follows() -> None:
    cores = [core_of(number) for number in range(1, 6)]
    for left, right in pairwise(cores):
        connect(left, right)
    now_s = run(cores, 0.0)
    cores[0].publish(state_of(), now_s, WALL_S)
    now_s = run(cores, now_s, 6.0)
    assert all(core.table.get(cores[0].node_id) is not None for core in cores)
    cores[0].publish(OwnState(leaving=True), now_s, WALL_S)
    now_s = run(cores, now_s, 6.0)
    for core in cores:
        assert list(core.table.live()) == []
        assert core.take_changes()[-1].record is None


def test_changes_within_five_seconds_become_one_record() -> None:
    core = core_of()
    for layer in range(10):
        core.publish(state_of(layer=layer), 0.1 * layer, WALL_S)
    record = core.table.get(core.node_id)
    assert record is not None
    assert record.counter == 1
    core.tick(5.0, WALL_S)
    record = core.table.get(core.node_id)
    assert record is not None
    assert (record.counter, record.state) == (2, state_of(layer=9))


def test_a_record_is_issued_again_before_it_ends_and_equal_states_are_not() -> None:
    core = core_of()
    for second in range(2000):
        core.publish(state_of(), float(second), WALL_S)
        core.tick(float(second), WALL_S)
        assert len(list(core.table.live())) == 1
    record = core.table.get(core.node_id)
    assert record is not None
    assert 9 <= record.counter <= 12


def test_a_state_that_fits_no_record_is_its_givers_error() -> None:
    with pytest.raises(UsageError):
        core_of().publish(OwnState(("nonsense",)), 0.0, WALL_S)
    with pytest.raises(UsageError):
        core_of(incarnation=2**60)


def test_leaving_and_coming_back_at_once_counts_once() -> None:
    """Cases 7: join, stop, join within two seconds."""
    witness, node = core_of(1), core_of(2)
    connect(witness, node)
    node.publish(state_of(), 0.0, WALL_S)
    now_s = run([witness, node], 0.0, 3.0)
    node.publish(OwnState(leaving=True), now_s, WALL_S)
    now_s = run([witness, node], now_s, 0.5)
    assert list(witness.table.live()) == []
    witness.disconnected(node.node_id, now_s)
    again = core_of(2, incarnation=8)
    connect(witness, again, now_s)
    again.publish(state_of(), now_s, WALL_S)
    run([witness, again], now_s, 2.0)
    assert [record.incarnation for record in witness.table.live()] == [8]
    assert len(witness.table) == 1


def test_a_stopped_node_that_lost_its_state_and_clock_is_heard_again() -> None:
    """It starts with a lower incarnation than it had, meets its old record and jumps above it."""
    witness, node = core_of(1), core_of(2, incarnation=1000)
    connect(witness, node)
    node.publish(state_of(), 0.0, WALL_S)
    now_s = run([witness, node], 0.0, 3.0)
    witness.disconnected(node.node_id, now_s)
    again = core_of(2, incarnation=3)
    connect(witness, again, now_s)
    again.publish(state_of(layer=9), now_s, WALL_S)
    run([witness, again], now_s, 4.0)
    assert [record.state for record in witness.table.live()] == [state_of(layer=9)]
    assert again.incarnation == 1000
    assert not again.own_conflict


def test_two_live_holders_of_a_key_are_flagged() -> None:
    witnesses = [core_of(1), core_of(2)]
    clones = [core_of(3), core_of(3)]
    connect(witnesses[0], witnesses[1])
    for witness, clone in zip(witnesses, clones, strict=True):
        connect(witness, clone)
        clone.publish(state_of(), 0.0, WALL_S)
    now_s = 0.0
    for step in range(120):  # the two cannot be in one dictionary: run each side in turn
        clones[step % 2].publish(state_of(layer=step % 40), now_s, WALL_S)
        run([*witnesses, clones[0]], now_s, 1.0)
        now_s = run([*witnesses, clones[1]], now_s, 1.0)
    assert any(clone.own_conflict for clone in clones)
    assert max(clone.incarnation for clone in clones) == 7


# -- what others may do


def test_old_records_are_not_told_again() -> None:
    core = core_of()
    connect(core, core_of(3))
    run([core, neighbour := core_of(3)], 0.0, 0.0)
    newest, old = record_of(9, (1, 5)), record_of(9, (1, 4))
    connect(core, neighbour)
    give(core, [newest.data])
    core.take_output()
    give(core, [old.data], 2.0)
    for now_s in (3.0, 4.0, 5.0):
        core.tick(now_s, WALL_S)
        for out in only(core.take_output(), GossipHave):
            assert old.id not in out.body


@pytest.mark.parametrize(
    "data",
    [
        record_of(9).data[:-1] + b"\0",
        record_of(9, network=network_id("another")).data,
        b"nonsense",
        bytes(200),
        record_of(9).data[:100],
    ],
)
def test_a_bad_record_ends_the_connection(data: bytes) -> None:
    core = core_of()
    with pytest.raises(ProtocolError, match="bad_gossip"):
        give(core, [record_of(8).data, data])
    assert [record.node_id for record in core.table.live()] == [key_of(8).node_id]


def test_records_that_were_not_asked_for_end_the_connection() -> None:
    core = core_of()
    core.connected(PEER, 0.0)
    want = Outgoing(PEER, GossipWant(), bytes(8))
    with pytest.raises(ProtocolError, match="not asked for"):
        core.receive_untrusted(want, GossipRecords(), bodies.pack_records([(0, record_of(9).data)]), 0.0)
    assert len(core.table) == 0


def test_a_record_may_come_from_anybody() -> None:
    core = core_of()
    give(core, [record_of(9).data])
    assert core.table.get(key_of(9).node_id) is not None


def test_a_peer_that_promises_and_does_not_deliver_is_passed_over() -> None:
    core, other = core_of(), key_of(51).node_id
    for peer in (PEER, other):
        core.connected(peer, 0.0)
    record = record_of(9)
    for peer in (PEER, other):
        core.answer_untrusted(peer, GossipHave(), bodies.pack_offers([(record.id, 0)]), 0.0)
    first = only(core.take_output(), GossipWant)
    assert [out.peer for out in first] == [PEER]
    core.failed(first[0], 10.0)
    core.tick(10.0, WALL_S)
    second = only(core.take_output(), GossipWant)
    assert [out.peer for out in second] == [other]
    core.receive_untrusted(second[0], GossipRecords(), bodies.pack_records([(0, record.data)]), 10.0)
    assert len(core.table) == 1


def test_a_peer_that_disconnects_is_passed_over() -> None:
    core, other = core_of(), key_of(51).node_id
    record = record_of(9)
    for peer in (PEER, other):
        core.connected(peer, 0.0)
        core.answer_untrusted(peer, GossipHave(), bodies.pack_offers([(record.id, 0)]), 0.0)
    core.take_output()
    core.disconnected(PEER, 1.0)
    core.tick(1.0, WALL_S)
    assert [out.peer for out in only(core.take_output(), GossipWant)] == [other]


def test_signatures_checked_for_one_peer_are_bounded() -> None:
    core = core_of(config=replace(CONFIG, checks_burst=100, checks_per_s=10.0, work_burst=10_000))
    core.connected(PEER, 0.0)
    asked = 0
    for second in range(11):
        offers = [(random.Random(f"{second}.{i}").randbytes(8), 0) for i in range(500)]
        core.answer_untrusted(PEER, GossipHave(), bodies.pack_offers(offers), float(second))
        for want in only(core.take_output(), GossipWant):
            asked += len(want.body) // 8
            core.receive_untrusted(want, GossipRecords(), b"", float(second))
    assert 150 <= asked <= 200


def test_too_many_messages_are_refused_as_busy() -> None:
    core = core_of(config=replace(CONFIG, work_burst=40, work_per_s=1.0))
    core.connected(PEER, 0.0)
    digest = GossipDigest(bytes(8), "all", (), (), ())
    replies = [core.answer_untrusted(PEER, digest, bytes(512), 0.0)[0] for _ in range(3)]
    assert isinstance(replies[0], GossipDifferences)
    assert [type(reply) for reply in replies[1:]] == [Refused, Refused]
    assert isinstance(core.answer_untrusted(PEER, digest, bytes(512), 60.0)[0], GossipDifferences)


def test_a_busy_answer_is_no_loss() -> None:
    core = core_of()
    core.connected(PEER, 0.0)
    core.answer_untrusted(PEER, GossipHave(), bodies.pack_offers([(record_of(9).id, 0)]), 0.0)
    (want,) = only(core.take_output(), GossipWant)
    core.receive_untrusted(want, Refused("busy", "", 0), b"", 0.0)
    core.tick(1.0, WALL_S)
    assert only(core.take_output(), GossipWant) == [want]


def test_strangers_get_nothing() -> None:
    core = core_of()
    reply, body = core.answer_untrusted(PEER, GossipWant(), bytes(8), 0.0)
    assert isinstance(reply, Refused)
    assert body == b""
    core.receive_untrusted(Outgoing(PEER, GossipWant(), bytes(8)), GossipRecords(), b"", 0.0)
    core.failed(Outgoing(PEER, GossipHave()), 0.0)
    core.disconnected(PEER, 0.0)


def test_a_lie_about_an_age_is_set_right_by_the_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the neighbours says of every record that it is nearly over."""
    cores = [core_of(number) for number in range(1, 7)]
    for one in cores:
        for other in cores:
            connect(one, other)
    liar, origin = cores[0], cores[5]
    honest_age = liar.table.age
    monkeypatch.setattr(liar.table, "age", lambda record_id, now_s: max(250, honest_age(record_id, now_s)))
    now_s = run(cores, 0.0)
    origin.publish(state_of(), now_s, WALL_S)
    record = origin.table.get(origin.node_id)
    assert record is not None
    run(cores, now_s, 60.0)
    for core in cores[1:]:
        assert core.table.age(record.id, now_s + 60.0) < 40


# -- links and views


def test_a_node_with_a_view_takes_no_links_and_is_not_pushed() -> None:
    phone = core_of(view=View("some", ("backbone",)))
    phone.connected(PEER, 0.0)
    reply, _ = phone.answer_untrusted(PEER, GossipLink("all", (), (), ()), b"", 0.0)
    assert isinstance(reply, Refused)
    digest = GossipDigest(bytes(8), "all", (), (), ())
    assert phone.answer_untrusted(PEER, digest, bytes(512), 0.0) == (GossipDifferences(0), b"")


def test_links_are_as_many_as_wanted_and_refused_when_there_are_too_many() -> None:
    core = core_of(config=replace(CONFIG, max_neighbours=3))
    answers = []
    for number in range(100, 106):
        core.connected(key_of(number).node_id, 0.0)
        answers.append(
            core.answer_untrusted(key_of(number).node_id, GossipLink("all", (), (), ()), b"", 0.0)[0]
        )
    assert [type(answer) for answer in answers] == [Ok, Ok, Ok, Refused, Refused, Refused]
    none = GossipLink("none", (), (), ())
    assert isinstance(core.answer_untrusted(key_of(100).node_id, none, b"", 1.0)[0], Ok)
    assert len(core.neighbours) == 2


def test_a_phone_hears_only_of_its_view() -> None:
    """Backbones, and holders of layers 3 and 4; but everybody hears of the phone."""
    view = View("some", ("backbone",), (MODEL,), (3, 4))
    full, phone = core_of(1), core_of(2, view=view)
    workers = [core_of(10 + layer) for layer in range(6)]
    backbone = core_of(20)
    for layer, worker in enumerate(workers):
        connect(full, worker)
        worker.publish(state_of(layer=layer), 0.0, WALL_S)
    connect(full, backbone)
    backbone.publish(state_of(layer=40, roles=("backbone",)), 0.0, WALL_S)
    everyone = [full, phone, backbone, *workers]
    now_s = run(everyone, 0.0)
    connect(full, phone, now_s)
    phone.publish(state_of(layer=9), now_s, WALL_S)
    now_s = run(everyone, now_s)
    wanted = {backbone.node_id, workers[3].node_id, workers[4].node_id}
    assert {record.node_id for record in phone.table.live()} == wanted | {phone.node_id}
    assert full.table.get(phone.node_id) is not None
    workers[5].publish(state_of(layer=4), now_s, WALL_S)
    workers[3].publish(OwnState(leaving=True), now_s, WALL_S)
    run(everyone, now_s)
    wanted = {backbone.node_id, workers[5].node_id, workers[4].node_id}
    assert {record.node_id for record in phone.table.live()} == wanted | {phone.node_id}


@pytest.mark.parametrize(
    ("view", "matches"),
    [
        (ALL, True),
        (View("none"), False),
        (View("some"), False),
        (View("some", ("worker",)), True),
        (View("some", ("relay",), (bytes(32),)), False),
        (View("some", (), (MODEL,)), True),
        (View("some", (), (MODEL,), (1, 2)), False),
        (View("some", (), (MODEL,), (0,)), True),
    ],
)
def test_views(view: View, matches: bool) -> None:
    assert view.matches(record_of(1)) == matches
    fetching = replace(holdings_of_layer(7), serving=(), fetching=holdings_of_layer(0).serving)
    record = record_of(1, state=replace(state_of(), models=(fetching,)))
    assert view.matches(record) == matches
    assert view.matches(record_of(1, state=OwnState(leaving=True))) == (view.scope != "none")


# -- anything at all

MESSAGES: list[Message] = [
    GossipHave(),
    GossipWant(),
    GossipLink("all", (), (), ()),
    GossipDigest(bytes(8), "all", (), (), ()),
    Ok(),
]
REPLIES: list[Message] = [
    GossipRecords(),
    GossipDifferences(0),
    GossipDifferences(9),
    Ok(),
    Refused("busy", "", 0),
]
BODIES = st.binary(max_size=2000) | st.lists(
    st.sampled_from([record_of(number, (1, counter)).data for number in (0, 1, 2, 3) for counter in (1, 2)]),
    max_size=5,
).map(lambda records: bodies.pack_records([(0, data) for data in records]))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), BODIES), max_size=12))
def test_any_messages(steps: list[tuple[bool, int, bytes]]) -> None:
    core = core_of()
    core.publish(state_of(), 0.0, WALL_S)
    for number in (1, 2):
        core.table.offer(record_of(number), 0.0, PEER)
    core.connected(PEER, 0.0)
    sent = [Outgoing(PEER, GossipDigest(bytes(8), "all", (), (), ()), bytes(512))]
    for now_s, (incoming, number, body) in enumerate(steps):
        core.tick(float(now_s), WALL_S)
        sent += core.take_output()
        step: Callable[[], object]
        if incoming:
            step = partial(core.answer_untrusted, PEER, MESSAGES[number], body, float(now_s))
        else:
            request = sent[number % len(sent)]
            step = partial(core.receive_untrusted, request, REPLIES[number], body, float(now_s))
        assert error_code(step) in ("", "bad_body", "bad_gossip")
    assert core.table.get(core.node_id) is not None


def test_an_offered_id_is_asked_for_once_whoever_offers_it() -> None:
    core = core_of()
    ids = [bytes([i]) * 8 for i in range(100)]
    wanted: list[bytes] = []
    for number in range(60, 70):
        core.connected(key_of(number).node_id, 0.0)
        core.answer_untrusted(
            key_of(number).node_id, GossipHave(), bodies.pack_offers([(i, 0) for i in ids]), 0.0
        )
        for out in only(core.take_output(), GossipWant):
            wanted += bodies.read_ids_untrusted(out.body)
    assert sorted(wanted) == ids
    assert len(wanted) <= c.MAX_GOSSIP_WANTED
