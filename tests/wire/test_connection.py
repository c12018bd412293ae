"""The connection as a machine: handshake, settings, endings."""

from __future__ import annotations

from dataclasses import replace

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
    RequestReceived,
)
from swarmnode.wire.handshake import Credentials, DialerHandshake, prologue
from swarmnode.wire.messages import Announce, Ok, Ping, SliceGet

from .pairs import ACCEPTOR, DIALER, ask, endpoint, experts, fresh_pair, only, open_pair, pump

KIB = 1024


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


def test_credentials_do_not_repeat_their_noise_key() -> None:
    key = NodeKey.generate()
    assert Credentials(key).identity[:32] == Credentials(key).identity[:32] == bytes(key.node_id)
    assert Credentials(key).identity != Credentials(key).identity


def test_a_message_of_each_kind_has_its_own_place() -> None:
    assert Announce.traffic_class is TrafficClass.CONTROL
    assert SliceGet.traffic_class is TrafficClass.BULK
    assert Ping(1) == Ping(1)
