"""Requests over a connection: their replies, order between classes, cancelling, ids, memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import UsageError
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.events import ReplyReceived, RequestCancelled, RequestReceived
from swarmnode.wire.messages import Models, ModelsGet, Ok, Refused, Rows, Slice, SliceGet

from .pairs import DIALER, MODEL, ask, endpoint, experts, only, open_pair, pump, small_config

KIB = 1024


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
        assert (side._requests._asked, side._requests._served) == ({}, {})
        assert (side.queued_bytes, side.oldest_incomplete) == (0, 0)


# --- ids and memory ---------------------------------------------------------------------------------------------------


def test_ids_wrap_and_skip_those_in_flight() -> None:
    one, other = open_pair()
    held = ask(one, other)
    one._requests._last_id = 2**32 - 3
    assert one.send_request(ModelsGet()) == 2**32 - 1
    assert one.send_request(ModelsGet()) == held.request_id + 2 == 3
    other._requests._last_id = 2**32 - 2
    assert other.send_request(ModelsGet()) == 2


def test_memory_is_taken_as_bytes_arrive() -> None:
    """A declared body of 60 MB that never comes costs nothing."""
    one, other = open_pair()
    message, body = experts(8000, 3900)
    assert sum(len(part) for part in body) > 60_000_000
    one.send_request(message, body)
    other.receive_data(one.data_to_send(8 * KIB))
    assert other._inbox.held_bytes < 8 * KIB


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
