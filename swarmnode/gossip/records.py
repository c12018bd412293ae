"""Records: what a node says of itself, signed by it, and passed on as the bytes that came. Pure.

    u8 kind | 32 B node key | u64 incarnation | u64 counter | 16 B network | u32 ttl_s | u64 issued_s
    body | 64 B signature

The signature is Ed25519 over everything before it, for the domain `gossip-record`. Kind 1 is a node's own state, kind 2
its demand for experts (of a backbone). The body is one msgpack array in the order of the dataclass's fields.
(incarnation, counter) orders the records of one kind of one node; `issued_s` is for people only.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.gossip import holdings
from swarmnode.identity import NODE_ID_BYTES, SIGNATURE_BYTES, NodeId, NodeKey
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire import constants as c
from swarmnode.wire.codec import unpack_list_untrusted
from swarmnode.wire.schema import Binary, Check, Choice, Integer, Items, Text

Version: TypeAlias = tuple[int, int]
"""(incarnation, counter), compared in this order."""

NODE = 1
DEMAND = 2
DOMAIN = "gossip-record"
NETWORK_BYTES = 16
ID_BYTES = 8
KEY_BYTES = 33
"""Kind and node key."""
MAX_RECORD_BYTES = c.MAX_GOSSIP_RECORD_BYTES
MAX_INCARNATION = 2**48
"""In milliseconds since 1970 this is the year 10889; a higher one can only be a fault, and nothing could follow it."""
MAX_COUNTER = 2**48
MAX_TTL_S = 86_400
MAX_ADDRESSES = 8
MAX_ADDRESS_BYTES = 264
"""A DNS name of 253 characters and a port."""
MAX_RELAYS = 8
MAX_DEVICE_BYTES = 32
MAX_RECORD_MODELS = 4

_HEAD = struct.Struct("<B32sQQ16sIQ")
_ADDRESS = re.compile(r"[^\s/@]{1,256}:[0-9]{1,5}")
_MAX_BODY_BYTES = MAX_RECORD_BYTES - _HEAD.size - SIGNATURE_BYTES


def record_key(node_id: NodeId, kind: int) -> bytes:
    """What `Envelope.key` is for this node's records of this kind."""
    return bytes([kind]) + node_id.raw


def network_id(name: str) -> bytes:
    """16 bytes that stand for a network's name in records."""
    return hashlib.sha256(b"swarmnode-network\0" + name.encode()).digest()[:NETWORK_BYTES]


@dataclass(frozen=True, slots=True)
class ModelHoldings:
    """What a node holds of one model. `n_layer` is the highest layer's number + 1; `max_rows` (row, expert) pairs in
    one request, 0 while it pauses. `seeds`: a full copy that others may fetch from, as a backbone's file; it serves no
    rows for others."""

    model: bytes
    n_layer: int
    n_expert: int
    serving: tuple[ExpertRange, ...]
    fetching: tuple[ExpertRange, ...]
    max_rows: int
    seeds: bool


@dataclass(frozen=True, slots=True)
class OwnState:
    """What a node says of itself. Addresses are `host:port`, relays node ids; `device` is a class such as `cpu`."""

    addresses: tuple[str, ...] = ()
    relays: tuple[NodeId, ...] = ()
    roles: tuple[str, ...] = ()
    capacity_bytes: int = 0
    device: str = ""
    models: tuple[ModelHoldings, ...] = ()
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What a backbone wants of one model: a sketch as demand.py encodes it, not read here."""

    model: bytes
    sketch: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """The head of a record and its bytes. Nothing is proven yet."""

    kind: int
    node_id: NodeId
    version: Version
    network: bytes
    ttl_s: int
    issued_s: int
    data: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    """SHA-256 of `data`."""

    @property
    def id(self) -> bytes:
        """The 8 bytes by which nodes tell each other of the record."""
        return self.digest[:ID_BYTES]

    @property
    def key(self) -> bytes:
        """Whose record of which kind: there is one at a time. (Bytes, because their hash costs a tenth of NodeId's.)"""
        return self.data[:KEY_BYTES]

    @property
    def incarnation(self) -> int:
        return self.version[0]

    @property
    def counter(self) -> int:
        return self.version[1]

    @property
    def signature(self) -> bytes:
        return self.data[-SIGNATURE_BYTES:]


@dataclass(frozen=True, slots=True)
class NodeRecord(Envelope):
    """A node's state, signed by it."""

    state: OwnState

    @property
    def leaving(self) -> bool:
        return self.state.leaving


@dataclass(frozen=True, slots=True)
class DemandRecord(Envelope):
    """A backbone's demand, signed by it."""

    models: tuple[ModelDemand, ...]

    @property
    def leaving(self) -> bool:
        return False


Record: TypeAlias = NodeRecord | DemandRecord


def sign_record(
    key: NodeKey, network: bytes, version: Version, ttl_s: int, issued_s: int, state: OwnState
) -> NodeRecord:
    """Our own state as a record. Raises UsageError if it breaks a cap: others would refuse it."""
    record = _sign(key, network, NODE, version, ttl_s, issued_s, _state_body(state))
    assert isinstance(record, NodeRecord)
    return record


def sign_demand(
    key: NodeKey,
    network: bytes,
    version: Version,
    ttl_s: int,
    issued_s: int,
    models: tuple[ModelDemand, ...],
) -> DemandRecord:
    """Our own demand as a record. Raises UsageError if it breaks a cap."""
    record = _sign(
        key, network, DEMAND, version, ttl_s, issued_s, [[item.model, item.sketch] for item in models]
    )
    assert isinstance(record, DemandRecord)
    return record


def parse_record_untrusted(data: bytes) -> Record:
    """A record whose signature is right. Raises ProtocolError `bad_gossip`, whatever is wrong."""
    envelope = read_envelope_untrusted(data)
    if not is_genuine(envelope):
        raise _bad("a record whose signature is wrong")
    return open_untrusted(envelope)


def read_envelope_untrusted(data: bytes) -> Envelope:
    """The head of a record; signature and body are not looked at. Raises ProtocolError `bad_gossip`."""
    if not _HEAD.size + SIGNATURE_BYTES < len(data) <= MAX_RECORD_BYTES:
        raise _bad(f"a record of {len(data)} bytes")
    kind, raw, incarnation, counter, network, ttl_s, issued_s = _HEAD.unpack_from(data)
    if kind not in (NODE, DEMAND):
        raise _bad(f"a record of kind {kind}")
    if incarnation > MAX_INCARNATION or counter > MAX_COUNTER:
        raise _bad(f"version {incarnation}.{counter}, which nothing could follow")
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise _bad(f"a time to live of {ttl_s} s")
    try:
        node_id = NodeId(raw)
    except UsageError as error:
        raise _bad(str(error)) from None
    digest = hashlib.sha256(data).digest()
    return Envelope(kind, node_id, (incarnation, counter), network, ttl_s, issued_s, data, digest)


def is_genuine(envelope: Envelope) -> bool:
    """Whether the node signed exactly these bytes (60 us)."""
    return envelope.node_id.verify(DOMAIN, envelope.data[:-SIGNATURE_BYTES], envelope.signature)


def open_untrusted(envelope: Envelope) -> Record:
    """The record with its body read; its signature is not looked at. Raises ProtocolError `bad_gossip`."""
    body = envelope.data[_HEAD.size : -SIGNATURE_BYTES]
    e = envelope
    head = (e.kind, e.node_id, e.version, e.network, e.ttl_s, e.issued_s, e.data, e.digest)
    try:
        values = unpack_list_untrusted(body, _MAX_BODY_BYTES)
        if envelope.kind == NODE:
            return NodeRecord(*head, _read_state(values))
        return DemandRecord(*head, _read_demand(values))
    except ProtocolError as error:
        raise _bad(error.reason) from None


def _bad(reason: str) -> ProtocolError:
    return ProtocolError("bad_gossip", reason)


def _sign(
    key: NodeKey, network: bytes, kind: int, version: Version, ttl_s: int, issued_s: int, body: list[Any]
) -> Record:
    try:
        head = _HEAD.pack(kind, key.node_id.raw, *version, network, ttl_s, issued_s)
    except struct.error as error:
        raise UsageError(f"a record whose numbers are over their caps: {error}") from error
    signed = head + bytes(msgpack.packb(body, use_bin_type=True))
    try:
        return open_untrusted(read_envelope_untrusted(signed + key.sign(DOMAIN, signed)))
    except ProtocolError as error:
        raise UsageError(f"a record that others would refuse: {error.reason}") from error


_Checks: TypeAlias = tuple[Check, ...]


def _bytes(value: object) -> bytes:
    """Bytes of any length: the record's own bound is enough."""
    if type(value) is not bytes:
        raise _bad("something else instead of bytes")
    return value


def _anything(value: object) -> object:
    return value


_MODEL = Binary(c.MODEL_ID_BYTES)
_MODEL_CHECKS: _Checks = (
    _MODEL,
    Integer(1, c.MAX_LAYER + 1),
    Integer(1, c.MAX_EXPERT + 1),
    _bytes,
    _bytes,
    Integer(0, c.MAX_PAIRS),
    Integer(0, 1),
)
_STATE_CHECKS: _Checks = (
    Items(Text(MAX_ADDRESS_BYTES), MAX_ADDRESSES),
    Items(Binary(NODE_ID_BYTES), MAX_RELAYS),
    Items(Choice(c.ROLES), len(c.ROLES)),
    Integer(0, 2**48),
    Text(MAX_DEVICE_BYTES),
    Items(_anything, MAX_RECORD_MODELS),
    Integer(0, 1),
)
_DEMAND_CHECKS: _Checks = (_MODEL, _bytes)


def _checked(value: object, checks: _Checks) -> list[Any]:
    """The values of a list of exactly these. Raises ProtocolError."""
    if type(value) is not tuple or len(value) != len(checks):
        raise _bad(f"not a list of {len(checks)} values")
    return [check(item) for check, item in zip(checks, value, strict=True)]


def _state_body(state: OwnState) -> list[Any]:
    models = [
        [
            item.model,
            item.n_layer,
            item.n_expert,
            holdings.encode(item.serving, item.n_layer, item.n_expert),
            holdings.encode(item.fetching, item.n_layer, item.n_expert),
            item.max_rows,
            int(item.seeds),
        ]
        for item in state.models
    ]
    return [
        state.addresses,
        [relay.raw for relay in state.relays],
        state.roles,
        state.capacity_bytes,
        state.device,
        models,
        int(state.leaving),
    ]


def _read_state(values: object) -> OwnState:
    addresses, relays, roles, capacity_bytes, device, models, leaving = _checked(values, _STATE_CHECKS)
    for address in addresses:
        if _ADDRESS.fullmatch(address) is None:
            raise _bad("an address that is not host:port")
    try:
        relay_ids = tuple([NodeId(raw) for raw in relays])
    except UsageError as error:
        raise _bad(str(error)) from None
    left = holdings.MAX_RANGES
    read: list[ModelHoldings] = []
    for fields in models:
        read.append(_read_model(fields, left))
        left -= len(read[-1].serving) + len(read[-1].fetching)
    if len({item.model for item in read}) != len(read):
        raise _bad("a model named twice")
    return OwnState(addresses, relay_ids, roles, capacity_bytes, device, tuple(read), bool(leaving))


def _read_model(fields: object, max_ranges: int) -> ModelHoldings:
    model, n_layer, n_expert, serving, fetching, max_rows, seeds = _checked(fields, _MODEL_CHECKS)
    served = holdings.decode_untrusted(serving, n_layer, n_expert, max_ranges)
    fetched = holdings.decode_untrusted(fetching, n_layer, n_expert, max_ranges - len(served))
    return ModelHoldings(model, n_layer, n_expert, served, fetched, max_rows, bool(seeds))


def _read_demand(values: object) -> tuple[ModelDemand, ...]:
    if type(values) is not tuple or len(values) > MAX_RECORD_MODELS:
        raise _bad(f"not a list of at most {MAX_RECORD_MODELS} sketches")
    models = tuple([ModelDemand(*_checked(fields, _DEMAND_CHECKS)) for fields in values])
    if len({item.model for item in models}) != len(models):
        raise _bad("a model named twice")
    return models
