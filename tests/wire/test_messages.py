"""Message headers: fixed bytes, round trips, and every field's type and cap."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.wire import constants as c
from swarmnode.wire.codec import unpack_map_untrusted
from swarmnode.wire.messages import (
    MESSAGES,
    SCHEMAS,
    Announce,
    Bye,
    Experts,
    GossipDifferences,
    GossipDigest,
    GossipHave,
    GossipLink,
    GossipRecords,
    GossipWant,
    ManifestGet,
    ManifestReply,
    Message,
    ModelEntry,
    Models,
    ModelsGet,
    Ok,
    Ping,
    Pong,
    Refused,
    Rows,
    Settings,
    Slice,
    SliceGet,
    decode_header_untrusted,
    encode_header,
)

from .pairs import protocol_error

MODEL = bytes(range(32))
EXAMPLES: list[tuple[Message, str]] = [
    (Ping(7), "81a56e6f6e636507"),
    (Pong(2**32 - 1), "81a56e6f6e6365ceffffffff"),
    (Bye("leaving", "shut down"), "82a4636f6465a76c656176696e67a6726561736f6ea97368757420646f776e"),
    (Ok(), "80"),
    (ModelsGet(), "80"),
    (
        Refused("busy", "", 200),
        "83a4636f6465a462757379a6726561736f6ea0ae72657472795f61667465725f6d73ccc8",
    ),
    (Rows("f16", 2, 300), "83a8656e636f64696e67a3663136a66e5f726f777302aa636f6d707574655f7573cd012c"),
    (
        Slice(0, 262_144, 5_300_000),
        "83a66f666673657400a66c656e677468ce00040000a5746f74616cce0050df20",
    ),
]
"""Messages with their headers as they travel: a change here breaks every other version."""

MORE: list[Message] = [
    Settings((1,), "swarmnode 0.1", ("backbone", "relay"), ("f32", "f16"), c.MAX_BODY_BYTES, 256),
    Announce(MODEL, "serving", ((0, 0, 2), (47, 248, 8)), 512, "CPU (Phöne)", 300_000_000, 9),
    Models((ModelEntry(MODEL, "Qwen3.5-122B", "qwen35moe", 48, 256, 5_300_000),)),
    Models(()),
    ManifestGet(MODEL),
    ManifestReply(MODEL),
    SliceGet(MODEL, 3, 255, "ffn_gate_up_exps", 0, c.MAX_SLICE_BLOCK_BYTES),
    Experts(MODEL, 47, "partial", "f32", c.MAX_ROWS, c.MAX_PAIRS),
    GossipLink("some", ("backbone",), (MODEL,), (0, 47)),
    GossipHave(),
    GossipWant(),
    GossipRecords(),
    GossipDigest(bytes(8), "all", (), (), ()),
    GossipDifferences(3),
]


@pytest.mark.parametrize(("message", "header"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_headers_as_bytes(message: Message, header: str) -> None:
    assert encode_header(message).hex() == header
    assert decode_header_untrusted(message.number, bytes.fromhex(header)) == message


@pytest.mark.parametrize("message", MORE, ids=lambda value: type(value).__name__)
def test_headers_are_read_back(message: Message) -> None:
    assert decode_header_untrusted(message.number, encode_header(message)) == message


def test_every_message_is_among_the_examples() -> None:
    assert {type(message) for message, _ in EXAMPLES} | {type(message) for message in MORE} == set(SCHEMAS)


def code_of(number: int, header: bytes) -> str:
    with pytest.raises(ProtocolError) as error:
        decode_header_untrusted(number, header)
    return error.value.code


GOOD: dict[str, Any] = {
    "model": MODEL, "layer": 0, "form": "partial", "encoding": "f32", "n_rows": 1, "n_pairs": 1,
}  # fmt: skip


def experts_with(**fields: object) -> bytes:
    return bytes(msgpack.packb({**GOOD, **fields}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n_rows", value) for value in (0, -1, -5, 8193, 2**28, 2**30, 2**63, 1.0, "1", None, True, [1], b"1")],
        *[("n_pairs", value) for value in (0, -1, 65_537, 2**30, 2**64 - 1, False)],
        *[("layer", value) for value in (-1, 1024, 2**40, 0.5)],
        *[("model", value) for value in (b"", bytes(31), bytes(33), "x" * 32, None, 5)],
        *[("form", value) for value in ("Partial", "", b"partial", 1, None, ["partial"])],
        *[("encoding", value) for value in ("q4", "f64", "F16", None)],
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_or_over_its_cap_is_named(field: str, value: object) -> None:
    with pytest.raises(ProtocolError) as error:
        decode_header_untrusted(Experts.number, experts_with(**{field: value}))
    assert error.value.code == "bad_field"
    assert error.value.reason.startswith(f"Experts: {field}: ")


@pytest.mark.parametrize(
    "ranges",
    [
        [[0, 0]], [[0, 0, 0]], [[0, 0, 65_537]], [[0, 65_535, 2]], [[1024, 0, 1]], [[0, -1, 1]], [[0, 0, -1]],
        [[0, 0, 1, 1]], [0], "abc", None, [[0, 0, True]], [[0.0, 0, 1]], [["0", 0, 1]], [{}], [[0, 0, 1]] * 513,
    ],
)  # fmt: skip
def test_ranges_are_refused_and_never_clamped(ranges: object) -> None:
    good = Announce(MODEL, "serving", (), 1, "", 0, 0)
    fields = {**msgpack.unpackb(encode_header(good)), "holdings": ranges}
    assert code_of(Announce.number, bytes(msgpack.packb(fields))) in ("bad_field", "bad_header")


@pytest.mark.parametrize("max_rows", [0, -1, 65_537, 2**40])
def test_a_batch_width_that_cannot_be_is_refused_with_its_bounds(max_rows: int) -> None:
    good = Announce(MODEL, "serving", (), 1, "", 0, 0)
    fields = {**msgpack.unpackb(encode_header(good)), "max_rows": max_rows}
    with pytest.raises(ProtocolError) as error:
        decode_header_untrusted(Announce.number, bytes(msgpack.packb(fields)))
    assert error.value.reason == f"Announce: max_rows: {max_rows} is not within 1 .. 65536"


@pytest.mark.parametrize(
    "text", ["a" * 65, "tab\t", "line\n", "\x1b[2Jclear", "é" * 33, "\u202eright to left"]
)
def test_text_that_is_too_long_or_would_mess_up_a_terminal(text: str) -> None:
    fields = {
        "versions": [1],
        "agent": text,
        "roles": [],
        "encodings": [],
        "max_body_bytes": 10**6,
        "max_requests": 1,
    }
    assert code_of(Settings.number, bytes(msgpack.packb(fields))) == "bad_field"


@pytest.mark.parametrize("code", ["", "a" * 33, "Busy", "no way", "x1", "ü", 5])
def test_codes_are_plain_words(code: object) -> None:
    assert code_of(Bye.number, bytes(msgpack.packb({"code": code, "reason": ""}))) == "bad_field"


def pack_pairs(*pairs: tuple[object, object]) -> bytes:
    return b"".join(
        [bytes([0x80 | len(pairs)]), *[bytes(msgpack.packb(item)) for pair in pairs for item in pair]]
    )


BOMBS = [
    ("empty", b""),
    ("not a map", bytes(msgpack.packb([1]))),
    ("a number", b"\x01"),
    ("truncated", experts_with()[:-1]),
    ("trailing byte", experts_with() + b"\xc0"),
    ("two maps", experts_with() * 2),
    ("reserved 0xc1", b"\xc1"),
    ("reserved 0xc1 as a value", b"\x81\xa5nonce\xc1"),
    ("duplicate field", pack_pairs(("nonce", 1), ("nonce", 1))),
    ("number as key", pack_pairs((1, 1))),
    ("bytes as key", pack_pairs((b"nonce", 1))),
    ("list as key", pack_pairs(([1], 1))),
    ("map as key", pack_pairs(({}, 1))),
    ("nil as key", pack_pairs((None, 1))),
    ("broken UTF-8", b"\x81\xa5nonce\xa2\xff\xfe"),
    ("broken UTF-8 as key", b"\x81\xa2\xff\xfe\x01"),
    ("surrogate", b"\x81\xa5nonce\xa3\xed\xa0\x80"),
    ("extension", b"\x81\xa5nonce\xd4\x05\x00"),
    ("timestamp", b"\x81\xa5nonce\xd6\xff\x00\x00\x00\x00"),
    ("array of 2**32 - 1", b"\x81\xa5nonce\xdd\xff\xff\xff\xff"),
    ("map of 2**32 - 1", b"\xdf\xff\xff\xff\xff"),
    ("text of 2**32 - 1", b"\x81\xa5nonce\xdb\xff\xff\xff\xff"),
    ("bytes of 2**32 - 1", b"\x81\xa5nonce\xc6\xff\xff\xff\xff"),
    ("extension of 2**32 - 1", b"\x81\xa5nonce\xc9\xff\xff\xff\xff\x01"),
    ("4,000 arrays in each other", b"\x81\xa5nonce" + b"\x91" * 4000 + b"\xc0"),
    ("1,000 arrays in each other", b"\x81\xa5nonce" + b"\x91" * 1000 + b"\xc0"),
    ("five arrays in each other", b"\x81\xa5nonce" + b"\x91" * 5 + b"\xc0"),
    ("maps in each other", b"\x81\xa1a" * 1000 + b"\xc0"),
    ("2,000 empty maps", b"\x81\xa5nonce\xdc\x07\xd0" + b"\x80" * 2000),
    ("1,025 items", b"\x81\xa5nonce\xdc\x04\x01" + b"\x00" * 1025),
    ("17 fields", b"\xde\x00\x11" + b"".join(b"\xa1" + bytes([97 + n]) + b"\x00" for n in range(17))),
    ("over 4 KiB", b"\x81\xa5nonce\xda\x10\x00" + b"a" * 4096),
    ("text over 1 KiB", b"\x81\xa5nonce\xda\x04\x01" + b"a" * 1025),
]


@pytest.mark.parametrize("header", [item[1] for item in BOMBS], ids=[item[0] for item in BOMBS])
def test_what_is_not_a_strict_map_is_refused_at_once(header: bytes) -> None:
    started_s = time.process_time()
    assert code_of(Ping.number, header) == "bad_header"
    assert time.process_time() - started_s < 0.05  # a default unpackb of 1 MB of such bytes stalls for 250 ms


def test_missing_and_unknown_fields_are_named() -> None:
    with pytest.raises(ProtocolError, match=r"Ping: missing fields \['nonce'\], unknown fields \['nonse'\]"):
        decode_header_untrusted(Ping.number, bytes(msgpack.packb({"nonse": 1})))
    with pytest.raises(ProtocolError, match=r"unknown fields \['more'\]"):
        decode_header_untrusted(Ping.number, bytes(msgpack.packb({"nonce": 1, "more": 1})))


@pytest.mark.parametrize("number", [0, 5, 33, 255, 65_535])
def test_unknown_numbers(number: int) -> None:
    assert code_of(number, b"\x80") == "bad_frame"


@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_error(number: int, header: bytes) -> None:
    code = protocol_error(lambda: decode_header_untrusted(number, header))
    assert code is None or code in c.PROTOCOL_ERRORS


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(st.sampled_from([*EXAMPLES, *[(message, "") for message in MORE]]), st.data())
def test_any_value_in_any_field_is_taken_or_one_error(
    example: tuple[Message, str], data: st.DataObject
) -> None:
    message, _ = example
    fields: dict[str, object] = SCHEMAS[type(message)].encode(message)
    if not fields:
        return
    fields = {**fields, data.draw(st.sampled_from(sorted(fields))): data.draw(JSON_LIKE)}
    header = bytes(msgpack.packb(fields))
    code = protocol_error(lambda: decode_header_untrusted(message.number, header))
    assert code in (None, "bad_field", "bad_header")
    if code is None:
        taken = decode_header_untrusted(message.number, header)
        assert decode_header_untrusted(message.number, encode_header(taken)) == taken


@given(JSON_LIKE)
def test_maps_come_back_as_they_were(value: object) -> None:
    try:
        fields = unpack_map_untrusted(bytes(msgpack.packb({"value": value})))
    except ProtocolError:
        return
    assert list(fields) == ["value"]


def test_our_own_mistakes_are_told_to_us_and_not_sent() -> None:
    with pytest.raises(UsageError, match="Ping is over its own caps: nonce"):
        encode_header(Ping(-1))
    many = tuple((layer + 300, expert + 300, 1) for layer in range(100) for expert in range(0, 10, 2))
    with pytest.raises(UsageError, match="at most 4096"):
        encode_header(Announce(MODEL, "serving", many, 1, "", 0, 0))


@pytest.mark.parametrize(
    ("message", "body_bytes"),
    [
        (Ping(1), 1),
        (ManifestReply(MODEL), 0),
        (Slice(0, 10, 10), 9),
        (Slice(0, 10, 10), 11),
        (Slice(1, 10, 10), 10),
        (Slice(c.MAX_SLAB_BYTES, 1, 1), 1),
        (Rows("f16", 2, 0), 6),
        (Rows("f16", 2, 0), 0),
        (Rows("f32", 1, 0), 2),
        (Rows("f32", 1, 0), 4 * 65_537),
        (Experts(MODEL, 0, "experts", "f16", 1, 1), 6),
        (Experts(MODEL, 0, "experts", "f16", 1, 1), 7),
        (Experts(MODEL, 0, "experts", "f16", 3, 1), 6 + 8),
        (Experts(MODEL, 0, "partial", "f16", 1, 1), 9),
        (Experts(MODEL, 0, "experts", "f32", 1, c.MAX_PAIRS), 4096 * 4),
    ],
    ids=str,
)
def test_a_body_that_cannot_belong_to_its_header(message: Message, body_bytes: int) -> None:
    with pytest.raises(ProtocolError) as error:
        message.check_body_untrusted(body_bytes)
    assert error.value.code == "bad_body"


def test_a_small_request_cannot_ask_for_a_reply_over_the_cap() -> None:
    """65,536 pairs of a row of 3,072 numbers: 400 KB that ask for 402 MB."""
    message = Experts(MODEL, 0, "experts", "f16", 1, c.MAX_PAIRS)
    with pytest.raises(ProtocolError) as error:
        message.check_body_untrusted(6144 + message.pair_bytes)
    assert error.value.code == "too_large"
    Experts(MODEL, 0, "partial", "f16", 1, c.MAX_PAIRS).check_body_untrusted(6144 + 10 * c.MAX_PAIRS)
