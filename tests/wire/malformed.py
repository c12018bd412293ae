"""What an authenticated peer may send wrong: plaintexts of one record each, with the code of the error they give."""

from __future__ import annotations

from swarmnode.wire import constants as c
from swarmnode.wire.constants import FrameType
from swarmnode.wire.messages import (
    Announce,
    Bye,
    Experts,
    ManifestReply,
    Ok,
    Ping,
    Pong,
    Rows,
    Settings,
    encode_header,
)

from .pairs import EXPERTS_BODY, MODEL, raw_frame, raw_request, raw_start

REQUEST, REPLY, DATA = FrameType.REQUEST, FrameType.REPLY, FrameType.DATA
CANCEL, ABORT, NOTICE = FrameType.CANCEL, FrameType.ABORT, FrameType.NOTICE
NO_BODY = Experts(MODEL, 0, "partial", "f16", 1, 1)
SETTINGS = encode_header(Settings((1,), "again", (), (), c.MAX_BODY_BYTES, 1))
ANNOUNCE = encode_header(Announce(MODEL, "serving", (), 1, "", 0, 0))
ROWS = encode_header(Rows("f16", 1, 0))
GREEDY = encode_header(Experts(MODEL, 0, "experts", "f16", 1, 65_536))
EMPTY_MANIFEST = raw_start(ManifestReply.number, {"model": MODEL})
LATE_SLICE = raw_start(67, {"offset": 9, "length": 2, "total": 10}, 2, b"xx")
LONG_SLICE = raw_start(67, b"\x80", c.MAX_SLICE_BLOCK_BYTES + 1)
ROWS_REPLY = raw_frame(REPLY, raw_start(81, ROWS, 2, bytes(2)), request_id=2)
HUNDRED = encode_header(Experts(MODEL, 1, "experts", "f16", 100, 1))
OPENED = raw_frame(REQUEST, raw_start(Experts.number, HUNDRED, 20_006, bytes(1000)))
"""A request of which 1,000 of 20,006 body bytes have come."""


def notice(number: int, header: object, **frame: int) -> bytes:
    return raw_frame(NOTICE, raw_start(number, header), **{"request_id": 0, "traffic_class": 0, **frame})


MALFORMED: list[tuple[str, bytes, str]] = [
    # frames
    ("eleven bytes", bytes(12) + bytes(11), "bad_frame"),
    ("frame type 0", raw_frame(0), "bad_frame"),
    ("frame type 7", raw_frame(7), "bad_frame"),
    ("frame type 255", raw_frame(255), "bad_frame"),
    ("class 4", raw_request(traffic_class=4), "bad_frame"),
    ("class 255", raw_request(traffic_class=255), "bad_frame"),
    ("flag 1", raw_request(flags=1), "bad_frame"),
    ("all flags", raw_request(flags=0xFFFF), "bad_frame"),
    ("a length one over the record", raw_frame(DATA, b"x", length=2), "bad_frame"),
    ("a length of 2**32 - 1", raw_frame(DATA, b"x", length=2**32 - 1), "bad_frame"),
    ("a good frame and half a head", raw_request() + b"\x01", "bad_frame"),
    # message starts
    ("a start of seven bytes", raw_frame(REQUEST, bytes(7)), "bad_frame"),
    ("an empty start", raw_frame(REQUEST, b""), "bad_frame"),
    ("a header of 65,535 bytes", raw_frame(REQUEST, raw_start(80, b"", header_bytes=65_535)), "bad_header"),
    ("a header of 4,097 bytes", raw_frame(REQUEST, raw_start(80, bytes(4097))), "bad_header"),
    ("a header behind its frame", raw_frame(REQUEST, raw_start(80, b"\x80", header_bytes=2)), "bad_frame"),
    ("a body of 2**32 - 1 bytes", raw_frame(REQUEST, raw_start(80, b"\x80", 2**32 - 1)), "too_large"),
    ("a body one over the cap", raw_frame(REQUEST, raw_start(80, b"\x80", c.MAX_BODY_BYTES + 1)), "too_large"),
    ("a slice over its own cap", raw_frame(REPLY, LONG_SLICE, request_id=2), "too_large"),
    ("more body than declared", raw_frame(REQUEST, raw_start(80, b"\x80", 3, bytes(4))), "bad_frame"),
    ("a body where none may be", raw_frame(REQUEST, raw_start(Announce.number, ANNOUNCE, 1, b"x")), "bad_body"),
    ("a body in the control class", raw_request(traffic_class=0), "bad_body"),
    ("message number 0", raw_frame(REQUEST, raw_start(0, b"\x80")), "bad_frame"),
    ("message number 65,535", raw_frame(REQUEST, raw_start(65_535, b"\x80")), "bad_frame"),
    ("a reply's number in a request", raw_frame(REQUEST, raw_start(Ok.number, b"\x80")), "bad_frame"),
    ("a request's number in a notice", notice(80, b"\x80"), "bad_frame"),
    ("a notice's number in a request", raw_frame(REQUEST, raw_start(Ping.number, {"nonce": 1})), "bad_frame"),
    ("a request with id 0", raw_request(request_id=0), "duplicate_id"),
    ("a notice with an id", notice(Ping.number, {"nonce": 1}, request_id=1), "bad_frame"),
    ("a request with an id of the other side", raw_request(request_id=2), "duplicate_id"),
    # headers
    ("no msgpack", raw_frame(REQUEST, raw_start(80, b"\xc1", 22, EXPERTS_BODY)), "bad_header"),
    ("a list as header", raw_frame(REQUEST, raw_start(80, [1], 22, EXPERTS_BODY)), "bad_header"),
    ("an empty header", raw_frame(REQUEST, raw_start(80, b"", 22, EXPERTS_BODY)), "bad_header"),
    ("nothing in the map", raw_frame(REQUEST, raw_start(80, {}, 22, EXPERTS_BODY)), "bad_field"),
    ("an unknown field", raw_request({"more": 1}), "bad_field"),
    ("a key of bytes", raw_request({b"layer": 1}), "bad_header"),
    ("arrays in each other", raw_frame(REQUEST, raw_start(80, b"\x81\xa1a" + b"\x91" * 3000 + b"\xc0")), "bad_header"),
    ("an array of 2**32 - 1", raw_frame(REQUEST, raw_start(80, b"\x81\xa1a\xdd\xff\xff\xff\xff")), "bad_header"),
    # counts and products
    ("no rows", raw_request({"n_rows": 0}), "bad_field"),
    ("-5 rows", raw_request({"n_rows": -5}), "bad_field"),
    ("-1 pairs", raw_request({"n_pairs": -1}), "bad_field"),
    ("2**28 rows", raw_request({"n_rows": 2**28}), "bad_field"),
    ("2**30 pairs", raw_request({"n_pairs": 2**30}), "bad_field"),
    ("rows as text", raw_request({"n_rows": "1"}), "bad_field"),
    ("rows as a float", raw_request({"n_rows": 1.0}), "bad_field"),
    ("layer 10**6", raw_request({"layer": 10**6}), "bad_field"),
    ("a model id of 31 bytes", raw_request({"model": MODEL[:31]}), "bad_field"),
    ("an unknown encoding", raw_request({"encoding": "q4"}), "bad_field"),
    ("q8 rows of less than a block", raw_request({"encoding": "q8"}), "bad_body"),
    ("a body one byte short", raw_request(body=EXPERTS_BODY[:-1]), "bad_body"),
    ("a body without rows", raw_request(body=bytes(6)), "bad_body"),
    ("rows of 65,537 numbers", raw_frame(REQUEST, raw_start(80, encode_header(NO_BODY), 2 * 65_537 + 10)), "bad_body"),
    ("a reply over the cap", raw_frame(REQUEST, raw_start(80, GREEDY, 6144 + 6 * 65_536)), "too_large"),
    # order
    ("data without a start", raw_frame(DATA, b"x"), "bad_frame"),
    ("data of another request", OPENED + raw_frame(DATA, b"x", request_id=3), "bad_frame"),
    ("data in another class", OPENED + raw_frame(DATA, b"x", traffic_class=2), "bad_frame"),
    ("no data", OPENED + raw_frame(DATA, b""), "bad_frame"),
    ("data over the end", OPENED + raw_frame(DATA, bytes(19_007)), "bad_frame"),
    ("a second start in a class", OPENED + raw_request(request_id=3), "interleaved"),
    ("a request twice", raw_request() + raw_request(), "duplicate_id"),
    ("a request twice, one half", OPENED + raw_request(traffic_class=2), "duplicate_id"),
    ("settings twice", notice(Settings.number, SETTINGS), "bad_state"),
    ("a cancel with content", raw_request() + raw_frame(CANCEL, b"x"), "bad_frame"),
    ("a cancel of our own request", raw_frame(CANCEL, request_id=2), "bad_frame"),
    ("an abort of nothing", raw_frame(ABORT, request_id=2), "bad_frame"),
    ("seventeen pings at once", notice(Ping.number, {"nonce": 1}) * 17, "flood"),
    ("seventeen replies to nothing", ROWS_REPLY * 17, "unknown_reply"),
    ("257 requests", b"".join(raw_request(request_id=2 * n + 1) for n in range(257)), "too_many_requests"),
    ("bye with a wrong code", notice(Bye.number, {"code": "NO!", "reason": ""}), "bad_field"),
    ("pong with a text", notice(Pong.number, {"nonce": "1"}), "bad_field"),
    ("an empty manifest", raw_frame(REPLY, EMPTY_MANIFEST, request_id=2), "bad_body"),
    ("a slice that ends behind its slab", raw_frame(REPLY, LATE_SLICE, request_id=2), "bad_body"),
]  # fmt: skip
