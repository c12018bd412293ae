"""Two connections that talk to each other, and the raw bytes a rude peer would send after the handshake."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import msgpack

from swarmnode.config import WireConfig
from swarmnode.errors import ProtocolError
from swarmnode.identity import NodeKey
from swarmnode.wire.connection import Connection
from swarmnode.wire.constants import FrameType, TrafficClass
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.events import Event, Opened, RequestReceived
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Experts
from swarmnode.wire.secret import NetworkSecret

MODEL = bytes(range(32))


def endpoint(
    seed: int,
    *,
    network: str = "test",
    config: WireConfig | None = None,
    secret: NetworkSecret | None = None,
) -> Endpoint:
    """A node whose id repeats from run to run."""
    credentials = Credentials(NodeKey.from_seed(bytes([seed]) * 32))
    return Endpoint.create(
        credentials, network=network, agent="test", roles=("worker",), config=config, secret=secret
    )


DIALER, ACCEPTOR = endpoint(1), endpoint(2)


def fresh_pair(dialer: Endpoint = DIALER, acceptor: Endpoint = ACCEPTOR) -> tuple[Connection, Connection]:
    """(dialer, acceptor), no byte sent yet."""
    return Connection.dialer(dialer, acceptor.credentials.node_id), Connection.acceptor(acceptor)


def pump(one: Connection, other: Connection, max_bytes: int = 64 * 1024) -> tuple[list[Event], list[Event]]:
    """Carry bytes both ways until there are none; the events of each."""
    ones: list[Event] = []
    others: list[Event] = []
    while one.has_data_to_send or other.has_data_to_send:
        others += other.receive_data(one.data_to_send(max_bytes))
        ones += one.receive_data(other.data_to_send(max_bytes))
    return ones, others


def open_pair(dialer: Endpoint = DIALER, acceptor: Endpoint = ACCEPTOR) -> tuple[Connection, Connection]:
    """(dialer, acceptor), both OPEN."""
    one, other = fresh_pair(dialer, acceptor)
    ones, others = pump(one, other)
    assert [type(event) for event in ones + others] == [Opened, Opened]
    return one, other


def small_config(**caps: int) -> WireConfig:
    """The defaults with other caps."""
    return replace(WireConfig(), **caps)


def experts(n_rows: int = 1, n_embd: int = 8, n_pairs: int = 1) -> tuple[Experts, list[memoryview]]:
    """A request in f16 with a body of zeros of the right length."""
    message = Experts(MODEL, 1, "experts", "f16", n_rows, n_pairs)
    return message, [memoryview(bytes(n_rows * n_embd * 2)), memoryview(bytes(message.pair_bytes))]


def raw_frame(
    kind: int,
    content: bytes = b"",
    *,
    request_id: int = 1,
    traffic_class: int = TrafficClass.DECODE,
    flags: int = 0,
    length: int | None = None,
) -> bytes:
    """A frame as a rude peer may write it."""
    length = len(content) if length is None else length
    return struct.pack("<BBHII", kind, traffic_class, flags, request_id, length) + content


def raw_start(
    number: int, header: object, body_bytes: int = 0, first: bytes = b"", *, header_bytes: int | None = None
) -> bytes:
    """The start of a message as a rude peer may write it; a header that is no bytes yet becomes msgpack."""
    packed = header if isinstance(header, bytes) else bytes(msgpack.packb(header))
    header_bytes = len(packed) if header_bytes is None else header_bytes
    return struct.pack("<HHI", number, header_bytes, body_bytes) + packed + first


EXPERTS_HEADER: dict[object, object] = {
    "model": MODEL,
    "layer": 1,
    "form": "experts",
    "encoding": "f16",
    "n_rows": 1,
    "n_pairs": 1,
}
EXPERTS_BODY = bytes(16 + 6)


def raw_request(
    header: dict[object, object] | None = None, body: bytes = EXPERTS_BODY, **frame: int
) -> bytes:
    """A request for experts with some header fields replaced."""
    fields: dict[object, object] = {**EXPERTS_HEADER, **(header or {})}
    return raw_frame(FrameType.REQUEST, raw_start(Experts.number, fields, len(body), body), **frame)


def protocol_error(call: Callable[[], object]) -> str | None:
    """The code of the ProtocolError that this raises, None if it raises nothing; other errors go through."""
    try:
        call()
    except ProtocolError as error:
        return error.code
    return None


def only(events: list[Event], kind: type) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def ask(one: Connection, other: Connection, n_rows: int = 1, n_embd: int = 8) -> RequestReceived:
    """Send a request and let it arrive."""
    message, body = experts(n_rows, n_embd)
    one.send_request(message, body)
    _, events = pump(one, other)
    (event,) = only(events, RequestReceived)
    assert isinstance(event, RequestReceived)
    return event
