"""Records: what is signed, what is refused, and any bytes at all."""

from __future__ import annotations

import dataclasses
import tracemalloc
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.gossip.holdings import MAX_RANGES
from swarmnode.gossip.records import (
    DOMAIN,
    MAX_COUNTER,
    MAX_INCARNATION,
    MAX_RECORD_BYTES,
    DemandRecord,
    ModelDemand,
    ModelHoldings,
    NodeRecord,
    OwnState,
    network_id,
    open_untrusted,
    parse_record_untrusted,
    read_envelope_untrusted,
    sign_demand,
    sign_record,
)
from swarmnode.weights.slices import ExpertRange
from tests.calls import count_lines

from .samples import (
    DEMAND,
    MODEL,
    NETWORK_ID,
    OTHER_MODEL,
    error_code,
    every_second,
    holdings_of_layer,
    key_of,
    record_of,
    state_of,
)

HEAD_BYTES = 77
FULL = OwnState(
    ("203.0.113.9:7000", "[2001:db8::1]:7000", "node.example.org:443"),
    (key_of(8).node_id, key_of(9).node_id),
    ("backbone", "relay"),
    2**40,
    "vulkan",
    (
        ModelHoldings(MODEL, 48, 256, (ExpertRange(0, 0, 8), ExpertRange(47, 248, 8)), (), 512, False),
        ModelHoldings(OTHER_MODEL, 4, 16, (), (ExpertRange(3, 2, 1),), 0, True),
    ),
)


def body_of(record: NodeRecord) -> list[Any]:
    return list(msgpack.unpackb(record.data[HEAD_BYTES:-64]))


def signed(number: int, head: bytes, body: bytes) -> bytes:
    return head + body + key_of(number).sign(DOMAIN, head + body)


@pytest.mark.parametrize("state", [FULL, OwnState(), OwnState(leaving=True), state_of()])
def test_what_is_signed_is_read(state: OwnState) -> None:
    record = sign_record(key_of(1), NETWORK_ID, (5, 7), 600, 1_800_000_000, state)
    read = parse_record_untrusted(record.data)
    assert isinstance(read, NodeRecord)
    assert read == record
    assert (read.state, read.incarnation, read.counter, read.ttl_s) == (state, 5, 7, 600)
    assert read.leaving == state.leaving


def test_demand_is_read() -> None:
    record = sign_demand(key_of(1), NETWORK_ID, (5, 7), 600, 0, DEMAND)
    assert parse_record_untrusted(record.data) == record
    assert isinstance(record, DemandRecord)
    assert record.models == DEMAND


def test_a_workers_record_is_small() -> None:
    scattered = tuple(ExpertRange(layer, 8 * layer % 256, 8) for layer in range(8))
    holdings = ModelHoldings(MODEL, 48, 256, scattered, (), 512, False)
    state = dataclasses.replace(state_of(), models=(holdings,))
    assert len(sign_record(key_of(1), NETWORK_ID, (2**41, 9), 600, 2**31, state).data) < 300


@pytest.mark.parametrize("at", range(0, 240, 7))
def test_every_flipped_bit_is_seen(at: int) -> None:
    data = bytearray(record_of(1).data)
    data[at % len(data)] ^= 1 << at % 8
    with pytest.raises(ProtocolError, match="bad_gossip"):
        parse_record_untrusted(bytes(data))


def test_a_signature_for_another_purpose_is_none() -> None:
    data = record_of(1).data[:-64]
    with pytest.raises(ProtocolError, match="signature"):
        parse_record_untrusted(data + key_of(1).sign("noise-static", data))
    with pytest.raises(ProtocolError, match="signature"):
        parse_record_untrusted(data + key_of(2).sign(DOMAIN, data))


@pytest.mark.parametrize(
    ("version", "ttl_s"),
    [
        ((2**64 - 1, 0), 600),
        ((0, 2**64 - 1), 600),
        ((MAX_INCARNATION + 1, 0), 600),
        ((0, 0), 0),
        ((0, 0), 2**31),
    ],
)
def test_absurd_numbers(version: tuple[int, int], ttl_s: int) -> None:
    with pytest.raises(UsageError, match="others would refuse"):
        record_of(1, version, ttl_s=ttl_s)


def test_the_highest_versions_are_read() -> None:
    assert record_of(1, (MAX_INCARNATION, MAX_COUNTER)).version == (MAX_INCARNATION, MAX_COUNTER)


@pytest.mark.parametrize(
    "state",
    [
        OwnState(("no port",)),
        OwnState(("host:1",) * 9),
        OwnState(("a@b:1",)),
        OwnState(("x" * 300 + ":1",)),
        OwnState(roles=("master",)),
        OwnState(capacity_bytes=-1),
        OwnState(device="d" * 33),
        OwnState(device="\x1b[2J"),
        OwnState(models=(holdings_of_layer(0),) * 2),
        OwnState(relays=(key_of(1).node_id,) * 9),
        OwnState(models=(dataclasses.replace(holdings_of_layer(0), model=b"short"),)),
        OwnState(models=(dataclasses.replace(holdings_of_layer(0), max_rows=-1),)),
        OwnState(models=tuple(every_second(64, number) for number in range(3))),
    ],
)
def test_states_over_their_caps(state: OwnState) -> None:
    with pytest.raises(UsageError):
        sign_record(key_of(1), NETWORK_ID, (1, 1), 600, 0, state)


def test_a_sketch_over_its_cap() -> None:
    with pytest.raises(UsageError):
        sign_demand(key_of(1), NETWORK_ID, (1, 1), 600, 0, (ModelDemand(MODEL, bytes(MAX_RECORD_BYTES)),))


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize(
    "value", [None, -1, 2**63, "text", b"bytes", [], [[]], {}, [None], 1.0, True, "x" * 3000]
)
def test_wrong_values_in_a_signed_body(at: int, value: object) -> None:
    record = sign_record(key_of(1), NETWORK_ID, (1, 1), 600, 0, FULL)
    body = body_of(record)
    if type(body[at]) is type(value) and value in ("text", []):
        return  # legal
    body[at] = value
    if at == 3 and value is True:
        body[at] = None
    with pytest.raises(ProtocolError, match="bad_gossip"):
        parse_record_untrusted(signed(1, record.data[:HEAD_BYTES], msgpack.packb(body)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x97",
        b"\x90",
        b"\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 3000,
        b"\xc7\x01\x05x",
        b"\xc0\xc0",
    ],
)
def test_signed_bodies_that_are_no_list(body: bytes) -> None:
    head = record_of(1).data[:HEAD_BYTES]
    with pytest.raises(ProtocolError, match="bad_gossip"):
        parse_record_untrusted(signed(1, head, body))


def test_weak_keys_are_nobody() -> None:
    data = bytearray(record_of(1).data)
    data[1:33] = bytes(32)
    with pytest.raises(ProtocolError, match="weak key"):
        parse_record_untrusted(bytes(data))


def test_networks_differ() -> None:
    assert network_id("a") != network_id("b")
    assert len(network_id("a")) == 16


@given(st.binary(max_size=5000))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_record_untrusted(data)
    assert caught.value.code == "bad_gossip"


@given(st.binary(max_size=4000), st.sampled_from([1, 2]))
def test_any_signed_body(body: bytes, kind: int) -> None:
    data = signed(1, bytes([kind]) + record_of(1).data[1:HEAD_BYTES], body)
    assert error_code(lambda: parse_record_untrusted(data)) in ("", "bad_gossip")


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=8))
def test_mutated_bodies(at: int, patch: bytes) -> None:
    """Behind the signature, where a fuzzer of plain bytes never comes."""
    record = sign_record(key_of(1), NETWORK_ID, (1, 1), 600, 0, FULL)
    data = bytearray(record.data)
    start = HEAD_BYTES + at % (len(data) - HEAD_BYTES - 64)
    data[start : start + len(patch)] = patch
    code = error_code(lambda: open_untrusted(read_envelope_untrusted(bytes(data))))
    assert code in ("", "bad_gossip")


def test_the_worst_record_costs_little() -> None:
    """A bitmap of every second expert is the most ranges that so few bytes can become."""
    state = OwnState(models=(every_second(32),))
    data = sign_record(key_of(1), NETWORK_ID, (1, 1), 600, 0, state).data
    n_lines = count_lines(partial(parse_record_untrusted, data))
    assert n_lines < 100 + 50 * MAX_RANGES
    tracemalloc.start()
    parse_record_untrusted(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000
