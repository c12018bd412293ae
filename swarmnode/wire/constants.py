"""The protocol's registry: every number and name that travels, and every cap. docs/protocol.md is held to this file."""

from __future__ import annotations

import enum

KIB = 1024
MIB = 1024 * KIB

PROTOCOL_VERSION = 2
"""Raised by every change that an older node would take for a malformed peer. 2: settings may list q8, and others."""
PROTOCOL_NAME = b"swarmnode/%d" % PROTOCOL_VERSION
"""First part of the prologue: whoever changes the version of a hello on its way changes the keys."""
HELLO_MAGIC = b"SN"
"""The dialer's first bytes: magic, version (u8), connection class (u8). All integers on the wire are little-endian."""
PRIVATE_HELLO_MAGIC = b"SP"
"""The magic on a private network, where message 1 is longer: neither side ever waits for bytes that do not come."""
HELLO_BYTES = 4
MAX_NETWORK_NAME_BYTES = 64


class ConnectionClass(enum.IntEnum):
    """What a connection is for; part of the handshake's prologue."""

    LATENCY = 1
    """Control, decode and prefill, in short chunks."""
    BULK = 2
    """Slices and manifests."""


class FrameType(enum.IntEnum):
    """First byte of every frame."""

    REQUEST = 1
    """Start of a message that wants exactly one reply."""
    REPLY = 2
    """Start of the message that answers the request of the same id."""
    DATA = 3
    """More bytes of the body that was started last in this traffic class."""
    CANCEL = 4
    """From the asker: the reply is no longer wanted. A reply (or ABORT) still ends the request."""
    ABORT = 5
    """From the answerer, after a CANCEL: the reply that was being sent ends here."""
    NOTICE = 6
    """A message without a reply; its request id is 0."""


class TrafficClass(enum.IntEnum):
    """Strict order of sending: a lower number goes first. Second byte of every frame."""

    CONTROL = 0
    DECODE = 1
    PREFILL = 2
    BULK = 3


FRAME_HEADER = "<BBHII"
"""type, traffic class, flags (0), request id, length of what follows in this frame."""
FRAME_HEADER_BYTES = 12
MESSAGE_START = "<HHI"
"""What REQUEST, REPLY and NOTICE frames begin with: message number, header bytes, body bytes of the whole message."""
MESSAGE_START_BYTES = 8

TAG_BYTES = 16
RECORD_LENGTH_BYTES = 2
MAX_RECORD_BYTES = 65_535
"""Ciphertext with its tag: the limit of a Noise message."""
MAX_RECORD_PLAIN_BYTES = MAX_RECORD_BYTES - TAG_BYTES
MIN_RECORD_BYTES = FRAME_HEADER_BYTES + TAG_BYTES
REKEY_RECORDS = 2**20
"""Records of one direction under one key."""
MAX_NONCE = 2**64 - 2
"""2**64 - 1 is Noise's own, for rekeying."""

MAX_HEADER_BYTES = 4 * KIB
MAX_BODY_BYTES = 64 * MIB
MAX_MANIFEST_BYTES = 16 * MIB
MAX_SLICE_BLOCK_BYTES = 1 * MIB
MAX_SLAB_BYTES = 1024 * MIB
MAX_REQUEST_ID = 2**32 - 1
"""The dialer's requests have odd ids, the acceptor's even ones; 0 is for notices."""
MAX_REQUESTS_IN_FLIGHT = 1024
"""Upper bound for `settings.max_requests`."""
UNKNOWN_REPLY_BUDGET = 16
"""Replies to ids that are not in flight that a connection survives."""
MAX_PONGS_WAITING = 16

MAX_LAYER = 1023
MAX_EXPERT = 65_535
MAX_ROWS = 8192
MAX_PAIRS = 65_536
MAX_EMBD = 65_536
MAX_RANGES = 512
MAX_MODELS = 16

MAX_GOSSIP_RECORD_BYTES = 4 * KIB
GOSSIP_ID_BYTES = 8
"""First bytes of the SHA-256 of a record."""
GOSSIP_OFFER_BYTES = 9
"""A record's id and its age, in 255ths of its time to live."""
MAX_GOSSIP_IDS = 1024
"""Offers in one GossipHave."""
MAX_GOSSIP_WANTED = 256
MAX_GOSSIP_RECORDS_BYTES = 256 * KIB
MAX_GOSSIP_BUCKETS = 1024
MAX_GOSSIP_DIFFERENCES_BYTES = 128 * KIB
GOSSIP_SALT_BYTES = 8
GOSSIP_SCOPES = ("all", "some", "none")
MAX_VIEW_MODELS = 4
MAX_VIEW_LAYERS = 256

MODEL_ID_BYTES = 32
ROLES = ("backbone", "worker", "relay")
ENCODINGS = ("f32", "f16", "q8")
REPLY_ENCODINGS = ("f32", "f16")
COMMON_ENCODING = "f32"
"""Every node reads it; the others only where its settings say so."""
FORMS = ("experts", "partial")
HOLDING_STATES = ("fetching", "serving", "leaving")
SLICE_KINDS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")

Q8_BLOCK_NUMBERS = 256
Q8_BLOCK_BYTES = 4 + Q8_BLOCK_NUMBERS
"""The number of largest magnitude in f32, and an int8 a number."""

PAIR_ROW_BYTES = 4
PAIR_EXPERT_BYTES = 2
PAIR_WEIGHT_BYTES = 4

PROTOCOL_ERRORS = {
    "bad_record": "a record is too short or too long, or its seal is broken (closed without an answer)",
    "bad_frame": "unknown frame type, class or flag, or a length that disagrees with its record or message",
    "bad_header": "a message header that is not the msgpack map its message type asks for",
    "bad_field": "a field is of the wrong type or over its cap",
    "bad_body": "a body whose length cannot be right for its header",
    "bad_tensor": "rows or pairs that cannot be right: lengths, indices, numbers that are not finite",
    "bad_manifest": "a manifest whose hash or content is not what its id promises",
    "bad_gossip": "a record that is malformed, forged, of another network or not asked for",
    "bad_state": "a message that is not allowed now: no settings yet, settings twice, anything after bye",
    "too_large": "a declared body over the cap of its message type or of the receiver's settings",
    "duplicate_id": "a request id that is in flight already, or of the wrong side",
    "too_many_requests": "more requests in flight than the receiver's settings allow",
    "interleaved": "a message began in a traffic class in which another one is incomplete",
    "wrong_reply": "a reply of a type that does not answer the request, or before all of the request was sent",
    "unknown_reply": "too many replies to ids that are not in flight",
    "flood": "pings faster than the answers can be written",
    "no_version": "no protocol version in common",
    "ended": "the stream ended inside a record or message, or without a bye",
}
"""Codes of ProtocolError: each ends the connection."""

CLOSE_REASONS = {
    "done": "nothing more to do on this connection",
    "leaving": "the node is shutting down",
    "replaced": "a newer connection of the same two nodes took over",
    "too_slow": "a message made no progress",
    "dead": "no answer to several pings",
    "not_wanted": "the node does not want this peer",
    "internal": "the node failed while it served this connection",
}
"""Codes of `bye`, next to the protocol errors."""

REFUSALS = {
    "busy": "the queue is full; try again after retry_after_ms",
    "cancelled": "the request was cancelled by the asker",
    "internal": "the answering node failed; its log says why",
    "unsupported": "the node has no such service",
    "not_owner": "an expert that is not held here",
    "wrong_model": "another model than the one served here",
    "no_such_slice": "a layer, expert or tensor that the model does not have, or that is not held here",
    "bad_range": "bytes or experts outside the model; never clamped",
    "bad_tensor": "rows or pairs that cannot be right",
    "too_many_pairs": "more pairs in one request than the worker takes",
    "too_large": "the reply would be over a cap",
    "overflow": "the result does not fit the asked row encoding",
    "not_allowed": "the node does not do this for this peer",
}
"""Codes of `refused`: each ends one request."""
