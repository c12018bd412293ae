"""Every message: its number, its fields with caps, which reply it gets, how long its body may be.

A message is a frozen dataclass; `encode_header` and `decode_header_untrusted` turn it into a msgpack map of its fields
and back. What a field alone cannot show (products, a body against its header) is in its `check_body_untrusted`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, TypeAlias

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.wire import constants as c
from swarmnode.wire.codec import pack_map, unpack_map_untrusted
from swarmnode.wire.constants import FrameType, TrafficClass
from swarmnode.wire.encodings import ROW_ENCODINGS, row_bytes, row_width_untrusted
from swarmnode.wire.schema import Binary, Choice, Code, Integer, Items, Range, Schema, Text

Ranges3: TypeAlias = tuple[tuple[int, int, int], ...]
"""(layer, first expert, count) each."""

_MODEL = Binary(c.MODEL_ID_BYTES)
_LAYER = Integer(0, c.MAX_LAYER)
_EXPERT = Integer(0, c.MAX_EXPERT)
_RANGES = Items(Range(c.MAX_LAYER, c.MAX_EXPERT), c.MAX_RANGES)
_CAPACITY = Integer(0, 2**48)
_ENCODING = Choice(c.ENCODINGS)
_U32 = Integer(0, 2**32 - 1)


class Message:
    """Base of all messages."""

    __slots__ = ()

    number: ClassVar[int]
    frame: ClassVar[FrameType]
    """Which frame starts it: REQUEST, REPLY or NOTICE."""
    body_cap_bytes: ClassVar[int] = 0
    replies: ClassVar[tuple[type[Message], ...]] = ()
    """For requests: what may answer, next to Refused."""
    traffic_class: ClassVar[TrafficClass] = TrafficClass.CONTROL
    """Where the message goes unless its sender says otherwise."""

    def check_body_untrusted(self, body_bytes: int) -> None:
        """Raises ProtocolError if a body of this length cannot belong to this header. The cap is checked elsewhere."""
        if body_bytes and not self.body_cap_bytes:
            raise ProtocolError("bad_body", f"{type(self).__name__} has no body")

    def reply_bytes(self, body_bytes: int) -> int:
        """For requests whose body of `body_bytes` was checked: most bytes of body that the reply can have."""
        return max((reply.body_cap_bytes for reply in self.replies), default=0)


@dataclass(frozen=True, slots=True)
class Settings(Message):
    """The first message each way: what the sender speaks and accepts."""

    number = 1
    frame = FrameType.NOTICE

    versions: Annotated[tuple[int, ...], Items(Integer(1, 65_535), 8)]
    agent: Annotated[str, Text(64)]
    roles: Annotated[tuple[str, ...], Items(Choice(c.ROLES), len(c.ROLES))]
    encodings: Annotated[tuple[str, ...], Items(Text(16), 8)]
    max_body_bytes: Annotated[int, Integer(64 * c.KIB, c.MAX_BODY_BYTES)]
    max_requests: Annotated[int, Integer(1, c.MAX_REQUESTS_IN_FLIGHT)]


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Asks for a pong with the same nonce: is the peer alive, how far away is it."""

    number = 2
    frame = FrameType.NOTICE

    nonce: Annotated[int, _U32]


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Answers a ping."""

    number = 3
    frame = FrameType.NOTICE

    nonce: Annotated[int, _U32]


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """The last message: the sender closes now, and says why."""

    number = 4
    frame = FrameType.NOTICE

    code: Annotated[str, Code()]
    reason: Annotated[str, Text(512)]


@dataclass(frozen=True, slots=True)
class Ok(Message):
    """Done, and there is nothing to say about it."""

    number = 16
    frame = FrameType.REPLY


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """Not done; answers any request."""

    number = 17
    frame = FrameType.REPLY

    code: Annotated[str, Code()]
    reason: Annotated[str, Text(512)]
    retry_after_ms: Annotated[int, Integer(0, 3_600_000)]


@dataclass(frozen=True, slots=True)
class Announce(Message):
    """What the sender holds of a model, and whether it serves it. Each announcement replaces the one before.

    `max_rows`: the most (row, expert) pairs that it takes in one request. 1 is as good as any, and means fewer rows:
    how many requests a layer becomes is the asker's to bound (DispatchConfig.max_pieces). `capacity_bytes`: what
    experts may take now.
    """

    number = 32
    frame = FrameType.REQUEST
    replies = (Ok,)

    model: Annotated[bytes, _MODEL]
    state: Annotated[str, Choice(c.HOLDING_STATES)]
    holdings: Annotated[Ranges3, _RANGES]
    max_rows: Annotated[int, Integer(1, c.MAX_PAIRS)]
    device: Annotated[str, Text(128)]
    capacity_bytes: Annotated[int, _CAPACITY]
    seq: Annotated[int, _U32]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model in `models`. Not a message of its own."""

    id: Annotated[bytes, _MODEL]
    name: Annotated[str, Text(96)]
    architecture: Annotated[str, Text(32)]
    n_layer: Annotated[int, Integer(1, c.MAX_LAYER + 1)]
    n_expert: Annotated[int, Integer(1, c.MAX_EXPERT + 1)]
    expert_bytes: Annotated[int, Integer(1, 3 * c.MAX_SLAB_BYTES)]


@dataclass(frozen=True, slots=True)
class Models(Message):
    """The models a node serves."""

    number = 49
    frame = FrameType.REPLY

    models: Annotated[tuple[ModelEntry, ...], Items(Schema(ModelEntry), c.MAX_MODELS)]


@dataclass(frozen=True, slots=True)
class ModelsGet(Message):
    """Which models do you serve?"""

    number = 48
    frame = FrameType.REQUEST
    replies = (Models,)


@dataclass(frozen=True, slots=True)
class ManifestReply(Message):
    """The manifest, as its encoded bytes, in the body; its SHA-256 is the model id."""

    number = 51
    frame = FrameType.REPLY
    body_cap_bytes = c.MAX_MANIFEST_BYTES
    traffic_class = TrafficClass.BULK

    model: Annotated[bytes, _MODEL]

    def check_body_untrusted(self, body_bytes: int) -> None:
        """A manifest is never empty."""
        if body_bytes == 0:
            raise ProtocolError("bad_body", "an empty manifest")


@dataclass(frozen=True, slots=True)
class ManifestGet(Message):
    """Asks for a model's manifest."""

    number = 50
    frame = FrameType.REQUEST
    replies = (ManifestReply,)

    model: Annotated[bytes, _MODEL]


@dataclass(frozen=True, slots=True)
class Slice(Message):
    """Bytes `offset .. offset + length` of one expert's slab of `total` bytes, in the body."""

    number = 67
    frame = FrameType.REPLY
    body_cap_bytes = c.MAX_SLICE_BLOCK_BYTES
    traffic_class = TrafficClass.BULK

    offset: Annotated[int, Integer(0, c.MAX_SLAB_BYTES)]
    length: Annotated[int, Integer(1, c.MAX_SLICE_BLOCK_BYTES)]
    total: Annotated[int, Integer(1, c.MAX_SLAB_BYTES)]

    def check_body_untrusted(self, body_bytes: int) -> None:
        """The body has `length` bytes and lies within the slab."""
        if body_bytes != self.length:
            raise ProtocolError("bad_body", f"{body_bytes} bytes for a block of {self.length}")
        if self.offset + self.length > self.total:
            raise ProtocolError("bad_body", "a block that ends behind its slab")


@dataclass(frozen=True, slots=True)
class SliceGet(Message):
    """Asks for a block of one expert's slab of one stacked tensor."""

    number = 66
    frame = FrameType.REQUEST
    replies = (Slice,)
    traffic_class = TrafficClass.BULK

    model: Annotated[bytes, _MODEL]
    layer: Annotated[int, _LAYER]
    expert: Annotated[int, _EXPERT]
    kind: Annotated[str, Choice(c.SLICE_KINDS)]
    offset: Annotated[int, Integer(0, c.MAX_SLAB_BYTES)]
    length: Annotated[int, Integer(1, c.MAX_SLICE_BLOCK_BYTES)]

    def reply_bytes(self, body_bytes: int) -> int:
        """The block, no byte more."""
        return self.length


@dataclass(frozen=True, slots=True)
class Rows(Message):
    """Computed rows in the body: one a pair (form `experts`) or one a row (form `partial`), in the asked order."""

    number = 81
    frame = FrameType.REPLY
    body_cap_bytes = c.MAX_BODY_BYTES
    traffic_class = TrafficClass.DECODE

    encoding: Annotated[str, Choice(c.REPLY_ENCODINGS)]
    n_rows: Annotated[int, Integer(1, c.MAX_PAIRS)]
    compute_us: Annotated[int, Integer(0, 2**40)]
    """On the compute thread, with everything computed in the same batch: a part of the round trip, not a share
    of the work."""

    def check_body_untrusted(self, body_bytes: int) -> None:
        """The body is `n_rows` rows of one width."""
        row_width_untrusted(body_bytes, self.n_rows, self.encoding)


@dataclass(frozen=True, slots=True)
class Experts(Message):
    """Asks for rows through experts of one layer.

    The body: rows | u32 row index of each pair | u16 expert id of each pair | f32 weight of each pair (only `partial`).
    """

    number = 80
    frame = FrameType.REQUEST
    body_cap_bytes = c.MAX_BODY_BYTES
    replies = (Rows,)
    traffic_class = TrafficClass.DECODE

    model: Annotated[bytes, _MODEL]
    layer: Annotated[int, _LAYER]
    form: Annotated[str, Choice(c.FORMS)]
    encoding: Annotated[str, _ENCODING]
    n_rows: Annotated[int, Integer(1, c.MAX_ROWS)]
    n_pairs: Annotated[int, Integer(1, c.MAX_PAIRS)]

    @property
    def reply_encoding(self) -> str:
        """Encoding of the computed rows."""
        return ROW_ENCODINGS[self.encoding].reply

    @property
    def pair_bytes(self) -> int:
        """Bytes of the body behind the rows."""
        weight_bytes = c.PAIR_WEIGHT_BYTES if self.form == "partial" else 0
        return self.n_pairs * (c.PAIR_ROW_BYTES + c.PAIR_EXPERT_BYTES + weight_bytes)

    def check_body_untrusted(self, body_bytes: int) -> None:
        """The rows have one width, and the reply asked for is under the cap of a body (a small request must not ask for
        gigabytes)."""
        row_width_untrusted(body_bytes - self.pair_bytes, self.n_rows, self.encoding)
        reply_bytes = self.reply_bytes(body_bytes)
        if reply_bytes > c.MAX_BODY_BYTES:
            raise ProtocolError(
                "too_large", f"asks for a reply of {reply_bytes} bytes, at most {c.MAX_BODY_BYTES}"
            )

    def reply_bytes(self, body_bytes: int) -> int:
        """As many rows as the form gives, as wide as those that came."""
        reply_rows = self.n_pairs if self.form == "experts" else self.n_rows
        n_embd = row_width_untrusted(body_bytes - self.pair_bytes, self.n_rows, self.encoding)
        return reply_rows * row_bytes(self.reply_encoding, n_embd)


@dataclass(frozen=True, slots=True)
class GossipLink(Message):
    """Be my neighbour, and tell me of new records: all, some, or none any more.

    `some` are records of nodes with one of the roles, or that hold experts of one of the models (in one of the layers,
    if layers are named); a node's leave is always told.
    """

    number = 96
    frame = FrameType.REQUEST
    replies = (Ok,)

    scope: Annotated[str, Choice(c.GOSSIP_SCOPES)]
    roles: Annotated[tuple[str, ...], Items(Choice(c.ROLES), len(c.ROLES))]
    models: Annotated[tuple[bytes, ...], Items(_MODEL, c.MAX_VIEW_MODELS)]
    layers: Annotated[tuple[int, ...], Items(_LAYER, c.MAX_VIEW_LAYERS)]


@dataclass(frozen=True, slots=True)
class GossipHave(Message):
    """New records that the sender has: 8-byte id and u8 age of each, in the body."""

    number = 97
    frame = FrameType.REQUEST
    body_cap_bytes = c.MAX_GOSSIP_IDS * c.GOSSIP_OFFER_BYTES
    replies = (Ok,)
    traffic_class = TrafficClass.PREFILL

    def check_body_untrusted(self, body_bytes: int) -> None:
        """One entry or more."""
        _check_entries(body_bytes, c.GOSSIP_OFFER_BYTES)


@dataclass(frozen=True, slots=True)
class GossipRecords(Message):
    """Those of the wanted records that the sender has: u16 length, u8 age and the record's bytes, in the body."""

    number = 99
    frame = FrameType.REPLY
    body_cap_bytes = c.MAX_GOSSIP_RECORDS_BYTES
    traffic_class = TrafficClass.PREFILL


@dataclass(frozen=True, slots=True)
class GossipWant(Message):
    """Asks for records by their 8-byte ids, in the body."""

    number = 98
    frame = FrameType.REQUEST
    body_cap_bytes = c.MAX_GOSSIP_WANTED * c.GOSSIP_ID_BYTES
    replies = (GossipRecords,)
    traffic_class = TrafficClass.PREFILL

    def check_body_untrusted(self, body_bytes: int) -> None:
        """One id or more."""
        _check_entries(body_bytes, c.GOSSIP_ID_BYTES)

    def reply_bytes(self, body_bytes: int) -> int:
        """Every record may be of the largest size."""
        n_ids = body_bytes // c.GOSSIP_ID_BYTES
        return min(n_ids * (3 + c.MAX_GOSSIP_RECORD_BYTES), c.MAX_GOSSIP_RECORDS_BYTES)


@dataclass(frozen=True, slots=True)
class GossipDifferences(Message):
    """The records of buckets that differ: u16 bucket, u16 count and the entries of each, in the body.

    `left`: buckets that differ too and did not fit.
    """

    number = 101
    frame = FrameType.REPLY
    body_cap_bytes = c.MAX_GOSSIP_DIFFERENCES_BYTES
    traffic_class = TrafficClass.PREFILL

    left: Annotated[int, Integer(0, c.MAX_GOSSIP_BUCKETS)]


@dataclass(frozen=True, slots=True)
class GossipDigest(Message):
    """Which of these buckets of records differ from yours? The body: 8 bytes a bucket.

    There are 2**k buckets, by the first bits of an id. Their bytes are the first of SHA-256(salt | the sorted ids of
    the bucket's records, of those in the view).
    """

    number = 100
    frame = FrameType.REQUEST
    body_cap_bytes = c.MAX_GOSSIP_BUCKETS * c.GOSSIP_ID_BYTES
    replies = (GossipDifferences,)
    traffic_class = TrafficClass.PREFILL

    salt: Annotated[bytes, Binary(c.GOSSIP_SALT_BYTES)]
    scope: Annotated[str, Choice(c.GOSSIP_SCOPES)]
    roles: Annotated[tuple[str, ...], Items(Choice(c.ROLES), len(c.ROLES))]
    models: Annotated[tuple[bytes, ...], Items(_MODEL, c.MAX_VIEW_MODELS)]
    layers: Annotated[tuple[int, ...], Items(_LAYER, c.MAX_VIEW_LAYERS)]

    def check_body_untrusted(self, body_bytes: int) -> None:
        """A power of two of buckets."""
        _check_entries(body_bytes, c.GOSSIP_ID_BYTES)
        n_buckets = body_bytes // c.GOSSIP_ID_BYTES
        if n_buckets & (n_buckets - 1):
            raise ProtocolError("bad_body", f"{n_buckets} buckets")


def _check_entries(body_bytes: int, entry_bytes: int) -> None:
    if body_bytes % entry_bytes or body_bytes == 0:
        raise ProtocolError("bad_body", f"{body_bytes} bytes are no list of entries of {entry_bytes}")


MESSAGES: dict[int, type[Message]] = {
    cls.number: cls
    for cls in (
        Settings,
        Ping,
        Pong,
        Bye,
        Ok,
        Refused,
        Announce,
        ModelsGet,
        Models,
        ManifestGet,
        ManifestReply,
        SliceGet,
        Slice,
        Experts,
        Rows,
        GossipLink,
        GossipHave,
        GossipWant,
        GossipRecords,
        GossipDigest,
        GossipDifferences,
    )
}
"""All messages by number."""

SCHEMAS: dict[type[Message], Schema] = {cls: Schema(cls) for cls in MESSAGES.values()}


def encode_header(message: Message) -> bytes:
    """The header of our own message. Raises UsageError if a field breaks its cap: the peer would hang up."""
    try:
        return _encoded(message)
    except ProtocolError as error:
        raise UsageError(f"{type(message).__name__} is over its own caps: {error.reason}") from error


def decode_header_untrusted(number: int, header: bytes | memoryview) -> Message:
    """The message of a peer's header. Raises ProtocolError `bad_frame`, `bad_header` or `bad_field`."""
    if len(header) <= CACHED_HEADER_BYTES:
        return _decoded_cached(number, bytes(header))
    return _decoded(number, header)


CACHED_HEADER_BYTES = 160
"""Expert calls repeat their headers (one a layer and share), so short ones are read and written once: 5 of 30 us."""


@lru_cache(maxsize=256)
def _encoded(message: Message) -> bytes:
    header = pack_map(SCHEMAS[type(message)].encode(message))
    if len(header) > c.MAX_HEADER_BYTES:
        raise ProtocolError("bad_header", f"{len(header)} bytes, at most {c.MAX_HEADER_BYTES}")
    return header


def _decoded(number: int, header: bytes | memoryview) -> Message:
    cls = MESSAGES.get(number)
    if cls is None:
        raise ProtocolError("bad_frame", f"unknown message number {number}")
    fields = unpack_map_untrusted(header)
    try:
        message: Message = SCHEMAS[cls].decode(fields)
    except ProtocolError as error:
        raise ProtocolError(error.code, f"{cls.__name__}: {error.reason}") from None
    return message


_decoded_cached = lru_cache(maxsize=256)(_decoded)
