"""The connection as a machine: handshake, settings, requests, order between classes, cancelling, endings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import ConnectionLostError, HandshakeError, UsageError
from swarmnode.identity import NodeKey
from swarmnode.wire.connection import Connection, State
from swarmnode.wire.constants import ConnectionClass, TrafficClass
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.events import (
    Ended,
    Event,
    Opened,
    PongReceived,
    ReplyReceived,
    RequestCancelled,
    RequestReceived,
)
from swarmnode.wire.handshake import Credentials, DialerHandshake, prologue
from swarmnode.wire.messages import Announce, Models, ModelsGet, Ok, Ping, Refused, Rows, Slice, SliceGet

from .pairs import ACCEPTOR, DIALER, MODEL, endpoint, experts, fresh_pair, open_pair, pump, small_config

KIB = 1024


def only(events: list[Event], kind: type) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


# --- handshake ------------------------------------------------------------------------------------------------------


def test_both_sides_learn_who_the_other_is() -> None:
    one, other = open_pair()
    assert one.node_id == ACCEPTOR.credentials.node_id
    assert other.node_id == DIALER.credentials.node_id
    assert one.handshake_hash == other.handshake_hash != b""
    assert one.settings == ACCEPTOR.settings
    assert other.connection_class is ConnectionClass.LATENCY


def test_the_class_of_the_connection_is_told_and_sealed() -> None:
    one = Connection.dialer(DIALER, ACCEPTOR.credentials.node_id, ConnectionClass.BULK)
    other = Connection.acceptor(ACCEPTOR)
    hello = bytearray(one.data_to_send(4096))
    other.receive_data(hello)
    assert other.connection_class is ConnectionClass.BULK
    tampered = Connection.acceptor(ACCEPTOR)
    hello[3] = ConnectionClass.LATENCY
    tampered.receive_data(hello)
    (ended,) = one.receive_data(tampered.data_to_send(4096))
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, HandshakeError)


def fails_without_answer(
    dialer: Endpoint, acceptor: Endpoint, expected: Endpoint
) -> tuple[list[Event], list[Event]]:
    """Run a handshake that must fail at the dialer; it must not have told who it is."""
    one = Connection.dialer(dialer, expected.credentials.node_id)
    other = Connection.acceptor(acceptor)
    other.receive_data(one.data_to_send(4096))
    events = one.receive_data(other.data_to_send(4096))
    (ended,) = events
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, HandshakeError)
    assert one.state is State.CLOSED
    assert not one.has_data_to_send
    assert other.node_id is None
    return events, other.receive_eof()


def test_another_key_than_the_dialled_one() -> None:
    events, _ = fails_without_answer(DIALER, ACCEPTOR, endpoint(9))
    assert "answered" in str(events[0])


def test_another_network() -> None:
    fails_without_answer(DIALER, endpoint(2, network="another"), ACCEPTOR)


def test_ourselves() -> None:
    one, other = fresh_pair(DIALER, DIALER)
    _, others = pump(one, other)
    assert [event.reason for event in others if isinstance(event, Ended)] == ["a connection from ourselves"]
    assert not other.has_data_to_send


def test_a_stolen_identity() -> None:
    """The victim's key and signature, but a Noise key of one's own."""
    thief = endpoint(5)
    thief.credentials.identity = ACCEPTOR.credentials.identity
    thief.credentials.node_id = ACCEPTOR.credentials.node_id
    one = Connection.dialer(DIALER, ACCEPTOR.credentials.node_id)
    other = Connection.acceptor(thief)
    other.receive_data(one.data_to_send(4096))
    (ended,) = one.receive_data(other.data_to_send(4096))
    assert isinstance(ended, Ended)
    assert "the signature is not by" in ended.reason


def test_a_list_of_allowed_nodes() -> None:
    friend, stranger = endpoint(3), endpoint(4)
    guarded = replace(ACCEPTOR, allowed=frozenset([friend.credentials.node_id]))
    open_pair(friend, guarded)
    one, other = fresh_pair(stranger, guarded)
    _, others = pump(one, other)
    assert [type(event.error) for event in others if isinstance(event, Ended)] == [HandshakeError]
    assert not other.has_data_to_send


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02",
        b"SSH-2.0-x",
        b"SN\x01\x01",
        b"SN\x03\x01",
        b"SN\x02\x03",
        b"sn\x02\x01",
    ],
)
def test_other_protocols_and_versions_are_not_answered(data: bytes) -> None:
    other = Connection.acceptor(ACCEPTOR)
    (ended,) = other.receive_data(data)
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, HandshakeError)
    assert not other.has_data_to_send


def test_nodes_of_another_version_part_at_the_hello() -> None:
    """Before settings, which the older one would take for malformed."""
    one, other = fresh_pair()
    hello = bytearray(one.data_to_send(4096))
    assert hello[:4].hex() == "534e0201", "version 2"
    hello[2] = 1
    (ended,) = other.receive_data(hello)
    assert isinstance(ended, Ended)
    assert str(ended.error) == "protocol version 1"
    assert not other.has_data_to_send
    (ended,) = one.receive_eof()
    assert isinstance(ended, Ended)
    assert "version (here: 2)" in ended.reason


def test_a_replayed_dialer_gets_nowhere() -> None:
    """Every byte of an honest dialer, again: the acceptor's new ephemeral key makes message 3 worthless."""
    one, other = fresh_pair()
    said = bytes(one.data_to_send(4096))
    other.receive_data(said)
    one.receive_data(other.data_to_send(4096))
    message_3 = bytes(one.data_to_send(4096))
    again = Connection.acceptor(ACCEPTOR)
    again.receive_data(said)
    again.data_to_send(4096)
    (ended,) = again.receive_data(message_3)
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, HandshakeError)
    assert not again.has_data_to_send
    assert again.node_id is None


@given(st.data())
@settings(max_examples=60)
def test_a_changed_handshake_never_opens(data: st.DataObject) -> None:
    """One byte of the whole exchange changed, wherever it is, on either side."""
    one, other = fresh_pair()
    victim = data.draw(st.sampled_from([one, other]))
    at = data.draw(st.integers(0, 191 if victim is one else 195))
    seen = {one: 0, other: 0}
    for _ in range(4):
        for sender, receiver in ((one, other), (other, one)):
            sent = bytearray(sender.data_to_send(4096))
            offset = at - seen[receiver]
            if receiver is victim and 0 <= offset < len(sent):
                sent[offset] ^= data.draw(st.integers(1, 255))
            seen[receiver] += len(sent)
            assert not only(receiver.receive_data(bytes(sent)), Opened) or receiver is not victim
    assert State.CLOSED in (one.state, other.state) or victim.state is not State.OPEN


@given(st.integers(1, 7), st.integers(1, 50))
@settings(max_examples=20)
def test_events_do_not_depend_on_how_the_bytes_are_cut(step: int, n_rows: int) -> None:
    """Byte at a time or all at once."""
    one, other = fresh_pair()
    events: list[Event] = []

    def carry(sender: Connection, receiver: Connection, into: list[Event]) -> None:
        while sent := sender.data_to_send(8 * KIB):
            for start in range(0, len(sent), step):
                into += receiver.receive_data(sent[start : start + step])

    for _ in range(2):
        carry(one, other, events)
        carry(other, one, [])
    message, body = experts(n_rows, 40)
    one.send_request(message, body)
    one.send_ping(3)
    carry(one, other, events)
    one.close("done", "enough")
    carry(one, other, events)
    assert [type(event) for event in events] == [Opened, RequestReceived, Ended]
    assert isinstance(events[1], RequestReceived)
    assert events[1].message == message
    assert events[1].body == b"".join(body)
    assert events[2] == Ended("done", "enough", None)


def test_network_names_are_bounded_and_cannot_run_into_the_class() -> None:
    assert prologue("a", ConnectionClass.LATENCY) == b"swarmnode/2\x01a\x01"
    assert prologue("a\x01", ConnectionClass.BULK) != prologue("a", ConnectionClass.LATENCY)
    for name in ("", "é" * 33):
        with pytest.raises(UsageError, match="a network name has 1 to 64 bytes"):
            prologue(name, ConnectionClass.LATENCY)


def test_the_handshake_has_fixed_sizes() -> None:
    handshake = DialerHandshake(
        DIALER.credentials, "n", ConnectionClass.LATENCY, ACCEPTOR.credentials.node_id
    )
    assert len(handshake.first_bytes) == 36
    assert handshake.needs_bytes == 192


# --- requests -------------------------------------------------------------------------------------------------------


def ask(one: Connection, other: Connection, n_rows: int = 1, n_embd: int = 8) -> RequestReceived:
    """Send a request and let it arrive."""
    message, body = experts(n_rows, n_embd)
    one.send_request(message, body)
    _, events = pump(one, other)
    (event,) = only(events, RequestReceived)
    assert isinstance(event, RequestReceived)
    return event


@pytest.mark.parametrize("n_rows", [1, 2, 300, 8000])
@pytest.mark.parametrize("max_bytes", [1, 16 * KIB, 1024 * KIB])
def test_a_request_and_its_reply(n_rows: int, max_bytes: int) -> None:
    one, other = open_pair()
    message, body = experts(n_rows, 100)
    body[0] = memoryview(bytes(range(200)) * n_rows)
    request_id = one.send_request(message, body)
    _, events = pump(one, other, max_bytes)
    assert events == [RequestReceived(request_id, message, memoryview(b"".join(body)), TrafficClass.DECODE)]
    other.send_reply(request_id, Rows("f16", n_rows, 5), body[:1])
    events, _ = pump(one, other, max_bytes)
    assert events == [ReplyReceived(request_id, Rows("f16", n_rows, 5), memoryview(bytes(body[0])))]
    assert (one.queued_bytes, other.queued_bytes) == (0, 0)


def test_many_requests_both_ways_answered_in_any_order() -> None:
    one, other = open_pair()
    for _ in range(100):
        one.send_request(*experts())
        other.send_request(ModelsGet())
    ones, others = pump(one, other)
    for event in reversed(only(others, RequestReceived)):
        assert isinstance(event, RequestReceived)
        other.send_reply(event.request_id, Rows("f16", 1, 0), [memoryview(bytes(16))])
    for event in only(ones, RequestReceived):
        assert isinstance(event, RequestReceived)
        one.send_reply(event.request_id, Models(()))
    ones, others = pump(one, other)
    ids = [event.request_id for event in ones + others if isinstance(event, ReplyReceived)]
    assert sorted(ids) == list(range(1, 201))
    assert ids[:100] == list(range(199, 0, -2))


def test_a_small_message_is_one_record() -> None:
    one, other = open_pair()
    one.send_request(*experts(1, 3072))
    sent = one.data_to_send(16 * KIB)
    assert int.from_bytes(sent[:2], "little") == len(sent) - 2
    assert len(only(other.receive_data(sent), RequestReceived)) == 1


def test_the_more_urgent_cuts_in() -> None:
    """A decode row and a ping overtake a megabyte of prefill, and wait for one chunk at most."""
    one, other = open_pair()
    message, body = experts(500, 1000)
    one.send_request(message, body, TrafficClass.PREFILL)
    other.receive_data(one.data_to_send(16 * KIB))
    one.send_request(*experts())
    one.send_ping(1)
    events = other.receive_data(one.data_to_send(16 * KIB))
    assert [event.traffic_class for event in events if isinstance(event, RequestReceived)] == [
        TrafficClass.DECODE
    ]
    assert other.has_data_to_send  # the pong
    _, events = pump(one, other)
    assert [event.traffic_class for event in events if isinstance(event, RequestReceived)] == [
        TrafficClass.PREFILL
    ]


def test_a_reply_is_as_urgent_as_its_request_but_slices_are_bulk() -> None:
    one, other = open_pair()
    one.send_request(*experts(), TrafficClass.PREFILL)
    one.send_request(SliceGet(MODEL, 0, 0, "ffn_up_exps", 0, 8))
    _, events = pump(one, other)
    first, second = only(events, RequestReceived)
    assert isinstance(first, RequestReceived)
    assert isinstance(second, RequestReceived)
    other.send_reply(second.request_id, Slice(0, 8, 8), [memoryview(bytes(8))])
    other.send_reply(first.request_id, Rows("f16", 1, 0), [memoryview(bytes(16))])
    ones, _ = pump(one, other)
    assert [type(event.message) for event in ones if isinstance(event, ReplyReceived)] == [Rows, Slice]


def test_a_full_peer_is_not_asked() -> None:
    one, other = open_pair(DIALER, endpoint(2, config=small_config(max_requests_in_flight=2)))
    first = one.send_request(ModelsGet())
    assert one.n_requests_left == 1
    one.send_request(ModelsGet())
    assert not one.can_request
    with pytest.raises(UsageError, match="no ModelsGet can be asked now"):
        one.send_request(ModelsGet())
    pump(one, other)
    other.send_reply(first, Models(()))
    pump(one, other)
    assert one.can_request


def test_our_own_wrong_messages_are_told_to_us() -> None:
    one, other = open_pair(DIALER, endpoint(2, config=small_config(max_body_bytes=64 * KIB)))
    message, body = experts(8192, 100)
    with pytest.raises(UsageError, match="the peer takes 65536"):
        one.send_request(message, body)
    message, body = experts()
    with pytest.raises(UsageError, match="bad_body"):
        one.send_request(message, [memoryview(bytes(7))])
    with pytest.raises(UsageError, match="control messages have no body"):
        one.send_request(message, body, TrafficClass.CONTROL)
    with pytest.raises(UsageError, match="no Ok can be asked"):
        one.send_request(Ok())
    with pytest.raises(UsageError, match="not waiting for a reply"):
        one.send_reply(7, Ok())
    event = ask(one, other)
    with pytest.raises(UsageError, match="Models does not answer Experts"):
        other.send_reply(event.request_id, Models(()))
    other.send_reply(event.request_id, Refused("busy", "", 0))
    with pytest.raises(UsageError, match="not waiting for a reply"):
        other.send_reply(event.request_id, Refused("busy", "", 0))
    ones, _ = pump(one, other)
    assert len(only(ones, ReplyReceived)) == 1  # all of that went by the peer unseen


# --- cancelling -----------------------------------------------------------------------------------------------------


def test_cancelled_before_a_byte_left_it_never_was() -> None:
    one, _ = open_pair()
    one.cancel_request(one.send_request(*experts()))
    assert not one.has_data_to_send
    assert one.queued_bytes == 0


def test_cancelled_half_way_out() -> None:
    one, other = open_pair()
    message, body = experts(500, 1000)
    request_id = one.send_request(message, body)
    other.receive_data(one.data_to_send(16 * KIB))
    one.cancel_request(request_id)
    assert one.queued_bytes == 0
    ones, others = pump(one, other)
    assert (ones, others) == ([], [])  # the refusal that ended it is nobody's business
    assert ask(one, other).request_id == request_id + 2  # the class is free again


def test_cancelled_while_the_peer_works() -> None:
    one, other = open_pair()
    event = ask(one, other)
    one.cancel_request(event.request_id)
    _, others = pump(one, other)
    assert others == [RequestCancelled(event.request_id)]
    other.send_reply(event.request_id, Rows("f16", 1, 0), [memoryview(bytes(16))])
    ones, _ = pump(one, other)
    assert ones == []
    ask(one, other)


def test_cancelled_while_the_reply_is_under_way() -> None:
    one, other = open_pair()
    event = ask(one, other)
    other.send_reply(event.request_id, Rows("f16", 1000, 0), [memoryview(bytes(1_000_000))])
    one.receive_data(other.data_to_send(16 * KIB))
    one.cancel_request(event.request_id)
    assert one._inbox.held_bytes == 0
    ones, others = pump(one, other)
    assert (ones, others) == ([], [])
    assert other.queued_bytes == 0
    again = ask(one, other)
    other.send_reply(again.request_id, Rows("f16", 1, 0), [memoryview(bytes(16))])
    ones, _ = pump(one, other)
    assert len(only(ones, ReplyReceived)) == 1


def test_cancelled_when_the_reply_waits_behind_another() -> None:
    one, other = open_pair()
    first, second = ask(one, other), ask(one, other)
    other.send_reply(first.request_id, Rows("f16", 1000, 0), [memoryview(bytes(1_000_000))])
    other.send_reply(second.request_id, Rows("f16", 1000, 0), [memoryview(bytes(1_000_000))])
    one.receive_data(other.data_to_send(16 * KIB))
    one.cancel_request(second.request_id)
    ones, _ = pump(one, other)
    assert [event.request_id for event in ones if isinstance(event, ReplyReceived)] == [first.request_id]


def test_a_cancel_that_crosses_the_reply() -> None:
    one, other = open_pair()
    event = ask(one, other)
    other.send_reply(event.request_id, Rows("f16", 1, 0), [memoryview(bytes(16))])
    reply = other.data_to_send(64 * KIB)
    one.cancel_request(event.request_id)
    assert one.receive_data(reply) == []
    assert pump(one, other) == ([], [])
    assert one.can_request


class Story:
    """Two connections whose driver does what hypothesis says; each request must end exactly once."""

    def __init__(self) -> None:
        self.one, self.other = open_pair()
        self.asked: set[int] = set()
        self.cancelled: set[int] = set()
        self.replied: set[int] = set()
        self.working: list[int] = []

    def ask(self, n_rows: int, urgency: TrafficClass) -> None:
        self.asked.add(self.one.send_request(*experts(n_rows), urgency))

    def answer(self, n_rows: int) -> None:
        if self.working:
            body = memoryview(bytes(n_rows * 16))
            self.other.send_reply(self.working.pop(0), Rows("f16", n_rows, 0), [body])

    def cancel(self, choice: int) -> None:
        open_ids = sorted(self.asked - self.replied - self.cancelled)
        if open_ids:
            unlucky = open_ids[choice % len(open_ids)]
            self.cancelled.add(unlucky)
            self.one.cancel_request(unlucky)

    def carry_there(self) -> None:
        for event in self.other.receive_data(self.one.data_to_send(8 * KIB)):
            if isinstance(event, RequestReceived):
                self.working.append(event.request_id)
            else:
                assert isinstance(event, RequestCancelled)
                self.working.remove(event.request_id)
                self.other.send_reply(event.request_id, Refused("cancelled", "", 0))

    def carry_back(self) -> None:
        for event in self.one.receive_data(self.other.data_to_send(8 * KIB)):
            assert isinstance(event, ReplyReceived)
            assert event.request_id not in self.replied | self.cancelled
            self.replied.add(event.request_id)

    def finish(self) -> None:
        while self.working or self.one.has_data_to_send or self.other.has_data_to_send:
            self.carry_there()
            self.answer(1)
            self.carry_back()


STEPS = st.one_of(
    st.tuples(
        st.just(Story.ask),
        st.sampled_from([1, 3000]),
        st.sampled_from([TrafficClass.DECODE, TrafficClass.PREFILL]),
    ),
    st.tuples(st.just(Story.answer), st.sampled_from([1, 3000])),
    st.tuples(st.just(Story.cancel), st.integers(0, 100)),
    st.tuples(st.just(Story.carry_there)),
    st.tuples(st.just(Story.carry_back)),
)


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=100)
def test_any_order_of_asking_answering_cancelling_and_carrying(steps: list[tuple[Any, ...]]) -> None:
    """Each request ends exactly once, nothing is left behind, and nobody ever sees an error."""
    story = Story()
    for act, *arguments in steps:
        act(story, *arguments)
    story.finish()
    assert story.replied == story.asked - story.cancelled
    for side in (story.one, story.other):
        assert (side._asked, side._served, side.queued_bytes, side.oldest_incomplete) == ({}, {}, 0, 0)


# --- endings --------------------------------------------------------------------------------------------------------


def test_bye_ends_it_with_its_words() -> None:
    one, other = open_pair()
    ask(one, other)
    one.close("leaving", "good\x07night")
    _, others = pump(one, other)
    assert others == [Ended("leaving", "good?night", None)]
    assert other.receive_eof() == []
    assert one.receive_data(b"anything") == []
    other.send_reply(1, Ok())  # an answer that comes too late hurts nobody
    assert not other.has_data_to_send


def test_an_end_without_bye_is_an_error() -> None:
    one, _ = open_pair()
    (ended,) = one.receive_eof()
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, ConnectionLostError)


def test_settings_are_not_known_before_they_come() -> None:
    one, _ = fresh_pair()
    with pytest.raises(UsageError, match="have not come yet"):
        _ = one.settings
    one.close()
    assert only([], Ended) == []
    assert one.state is State.CLOSED


def test_pings_are_answered() -> None:
    one, other = open_pair()
    one.send_ping(77)
    ones, others = pump(one, other)
    assert (ones, others) == ([PongReceived(77)], [])
    for nonce in range(200):
        one.send_ping(nonce)
        pump(one, other)
    assert other.state is State.OPEN


def test_ids_wrap_and_skip_those_in_flight() -> None:
    one, other = open_pair()
    held = ask(one, other)
    one._last_id = 2**32 - 3
    assert one.send_request(ModelsGet()) == 2**32 - 1
    assert one.send_request(ModelsGet()) == held.request_id + 2 == 3
    other._last_id = 2**32 - 2
    assert other.send_request(ModelsGet()) == 2


def test_memory_is_taken_as_bytes_arrive() -> None:
    """A declared body of 60 MB that never comes costs nothing."""
    one, other = open_pair()
    message, body = experts(8000, 3900)
    assert sum(len(part) for part in body) > 60_000_000
    one.send_request(message, body)
    other.receive_data(one.data_to_send(8 * KIB))
    assert other._inbox.held_bytes < 8 * KIB


def test_credentials_do_not_repeat_their_noise_key() -> None:
    key = NodeKey.generate()
    assert Credentials(key).identity[:32] == Credentials(key).identity[:32] == bytes(key.node_id)
    assert Credentials(key).identity != Credentials(key).identity


def test_a_message_of_each_kind_has_its_own_place() -> None:
    assert Announce.traffic_class is TrafficClass.CONTROL
    assert SliceGet.traffic_class is TrafficClass.BULK
    assert Ping(1) == Ping(1)


def test_bodies_stay_when_the_next_large_record_is_opened() -> None:
    """Large records are opened into memory that is used again; what fitted into one of them must not change with it."""
    one, other = open_pair()
    bodies = [bytes([number]) * 40_000 for number in range(1, 6)]
    for body in bodies:
        message, parts = experts(1, 20_000)
        one.send_request(message, [memoryview(body), *parts[1:]])
    _, events = pump(one, other)
    received = [event for event in events if isinstance(event, RequestReceived)]
    assert [bytes(event.body[:40_000]) for event in received] == bodies
    assert all(event.body.readonly for event in received)
