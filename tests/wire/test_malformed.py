"""Each malformed frame is one clear error, ends its connection, and says why."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.wire import constants as c
from swarmnode.wire.connection import Connection, State
from swarmnode.wire.events import Ended, Opened
from swarmnode.wire.messages import (
    Ok,
    Rows,
    Settings,
    encode_header,
)
from swarmnode.wire.records import RecordWriter

from .malformed import CANCEL, DATA, MALFORMED, REPLY, notice
from .pairs import experts, open_pair, pump, raw_frame, raw_request, raw_start

IDS = [name for name, _, _ in MALFORMED]


def send_raw(sender: Connection, receiver: Connection, plain: bytes) -> list[object]:
    """Seal what no honest connection writes."""
    writer = sender._writer
    assert isinstance(writer, RecordWriter)
    return list(receiver.receive_data(writer.seal(plain)))


@pytest.mark.parametrize(("plain", "code"), [item[1:] for item in MALFORMED], ids=IDS)
def test_one_clear_error_and_the_connection_is_over(plain: bytes, code: str) -> None:
    rude, victim = open_pair()
    events = send_raw(rude, victim, plain)
    ended = [event for event in events if isinstance(event, Ended)]
    assert ended == events[-1:]
    assert ended[0].code == code
    assert ended[0].error is not None
    assert code in c.PROTOCOL_ERRORS
    assert victim.state is State.CLOSED
    # It says why, and is deaf afterwards.
    told = [event for event in rude.receive_data(victim.data_to_send(4096)) if isinstance(event, Ended)]
    assert told[0].code == code
    assert told[0].error is None
    assert not victim.has_data_to_send
    assert send_raw(rude, victim, raw_request(request_id=99)) == []


def test_there_are_fifty_kinds() -> None:
    assert len(MALFORMED) >= 50
    assert {code for _, _, code in MALFORMED} >= set(c.PROTOCOL_ERRORS) - {
        "bad_gossip", "bad_manifest", "bad_record", "bad_tensor", "no_version", "ended", "wrong_reply",
    }  # fmt: skip


def test_a_broken_seal_ends_it_without_an_answer() -> None:
    rude, victim = open_pair()
    record = bytearray(rude._writer.seal(raw_request()))  # type: ignore[union-attr]
    record[-1] ^= 1
    (ended,) = victim.receive_data(record)
    assert isinstance(ended, Ended)
    assert ended.code == "bad_record"
    assert not victim.has_data_to_send


@pytest.mark.parametrize("length", [0, 27])
def test_a_short_record_ends_it_without_an_answer(length: int) -> None:
    _, victim = open_pair()
    (ended,) = victim.receive_data(struct.pack("<H", length))
    assert isinstance(ended, Ended)
    assert ended.code == "bad_record"
    assert not victim.has_data_to_send


def test_a_reply_of_a_wrong_type() -> None:
    asker, rude = open_pair()
    message, body = experts()
    asker.send_request(message, body)
    pump(asker, rude)
    events = send_raw(rude, asker, raw_frame(REPLY, raw_start(Ok.number, b"\x80"), request_id=1))
    assert [event.code for event in events if isinstance(event, Ended)] == ["wrong_reply"]


def test_a_reply_to_a_request_that_is_not_all_sent() -> None:
    asker, rude = open_pair()
    asker.send_request(*experts(500, 1000))
    asker.data_to_send(16 * 1024)
    reply = raw_frame(REPLY, raw_start(Rows.number, encode_header(Rows("f16", 1, 0)), 2, b"xx"), request_id=1)
    events = send_raw(rude, asker, reply)
    assert [event.code for event in events if isinstance(event, Ended)] == ["wrong_reply"]


def test_no_version_in_common() -> None:
    rude, victim = open_pair()
    victim.state = State.SETTINGS
    header = msgpack.packb(
        {
            "versions": [1, 3],
            "agent": "",
            "roles": [],
            "encodings": [],
            "max_body_bytes": 65_536,
            "max_requests": 1,
        }
    )
    (ended,) = send_raw(rude, victim, notice(Settings.number, header))
    assert isinstance(ended, Ended)
    assert ended.code == "no_version"


def test_encodings_of_later_versions_are_no_error() -> None:
    newer, victim = open_pair()
    victim.state = State.SETTINGS
    header = encode_header(Settings((c.PROTOCOL_VERSION,), "", (), ("f32", "q4x"), 65_536, 1))
    (opened,) = send_raw(newer, victim, notice(Settings.number, header))
    assert isinstance(opened, Opened)
    assert opened.settings.encodings == ("f32", "q4x")


def test_settings_without_the_common_encoding() -> None:
    rude, victim = open_pair()
    victim.state = State.SETTINGS
    header = encode_header(Settings((c.PROTOCOL_VERSION,), "", (), ("f16",), 65_536, 1))
    (ended,) = send_raw(rude, victim, notice(Settings.number, header))
    assert isinstance(ended, Ended)
    assert ended.code == "bad_field"


@pytest.mark.parametrize(
    "plain", [raw_request(), raw_frame(DATA, b"x"), raw_frame(CANCEL), notice(2, {"nonce": 1})]
)
def test_nothing_may_come_before_settings(plain: bytes) -> None:
    rude, victim = open_pair()
    victim.state = State.SETTINGS
    (ended,) = send_raw(rude, victim, plain)
    assert isinstance(ended, Ended)
    assert ended.code == "bad_state"


FRAMES = st.one_of(
    st.binary(max_size=60),
    st.builds(
        raw_frame,
        st.integers(0, 8),
        st.binary(max_size=60),
        request_id=st.integers(0, 6),
        traffic_class=st.integers(0, 4),
        flags=st.sampled_from([0, 0, 0, 1]),
    ),
    st.sampled_from([item[1] for item in MALFORMED if len(item[1]) < 2000]),
    st.builds(raw_request, request_id=st.integers(0, 6), traffic_class=st.integers(0, 3)),
)


@given(st.lists(st.lists(FRAMES, min_size=1, max_size=4), max_size=6), st.booleans())
@settings(max_examples=200)
def test_any_frames_in_any_order_are_events_or_one_error(
    records: list[list[bytes]], victim_asks: bool
) -> None:
    rude, victim = open_pair()
    if victim_asks:
        victim.send_request(*experts())
        rude.receive_data(victim.data_to_send(4096))
    ended: list[Ended] = []
    for record in records:
        plain = b"".join(record)
        if len(plain) < 12:
            continue
        events = send_raw(rude, victim, plain)
        assert not (ended and events)
        ended += [event for event in events if isinstance(event, Ended)]
    assert len(ended) <= 1
    assert all(event.code in c.PROTOCOL_ERRORS or event.error is None for event in ended)
    assert (victim.state is State.CLOSED) == bool(ended)
