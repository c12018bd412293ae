"""docs/protocol.md says what wire/constants.py and wire/messages.py say: same numbers, names, fields and caps."""

from __future__ import annotations

import inspect
import re
from enum import IntEnum
from pathlib import Path

import pytest

from swarmnode.wire import constants as c
from swarmnode.wire import handshake, noise
from swarmnode.wire.messages import MESSAGES, SCHEMAS, Message

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
Table = list[list[str]]


def tables_of(text: str) -> dict[str, Table]:
    """The body rows of the table under each heading, cells stripped, code marks removed."""
    found: dict[str, Table] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        elif line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            cells = [cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.setdefault(heading, []).append(cells)
    return {name: rows[1:] for name, rows in found.items()}


def summary(value: type) -> str:
    """The first line of a docstring, without its full stop."""
    return (inspect.getdoc(value) or "").splitlines()[0].rstrip(".")


def of_enum(members: type[IntEnum]) -> Table:
    return [[str(int(member)), member.name] for member in members]


def of_codes(codes: dict[str, str]) -> Table:
    return [[code, meaning] for code, meaning in codes.items()]


def of_fields(cls: type[Message]) -> Table:
    return [[name, str(check)] for name, check in SCHEMAS[cls].checks.items()]


def of_message(cls: type[Message]) -> list[str]:
    replies = ", ".join(reply.__name__ for reply in cls.replies) or "-"
    body = human_bytes(cls.body_cap_bytes) if cls.body_cap_bytes else "-"
    return [str(cls.number), cls.__name__, cls.frame.name, cls.traffic_class.name, body, replies]


def human_bytes(n_bytes: int) -> str:
    for unit, size in (("MiB", c.MIB), ("KiB", c.KIB)):
        if n_bytes >= size and n_bytes % size == 0:
            return f"{n_bytes // size:,} {unit}"
    return f"{n_bytes:,} B"


HANDSHAKE_BYTES = (
    f"{handshake.MESSAGE_1_BYTES} (private networks: {handshake.PRIVATE_MESSAGE_1_BYTES}), "
    f"{handshake.MESSAGE_2_BYTES}, {handshake.MESSAGE_3_BYTES} B"
)

EXPECTED: dict[str, Table] = {
    "Connection classes": of_enum(c.ConnectionClass),
    "Frame types": of_enum(c.FrameType),
    "Traffic classes": of_enum(c.TrafficClass),
    "Messages": [of_message(cls) for _, cls in sorted(MESSAGES.items())],
    "Protocol errors": of_codes(c.PROTOCOL_ERRORS),
    "Close reasons": of_codes(c.CLOSE_REASONS),
    "Refusals": of_codes(c.REFUSALS),
    "Caps": [
        ["network name", f"1 .. {c.MAX_NETWORK_NAME_BYTES} B of UTF-8"],
        ["handshake messages", HANDSHAKE_BYTES],
        ["record, with its tag", f"{c.MIN_RECORD_BYTES} .. {c.MAX_RECORD_BYTES:,} B"],
        ["records under one key", f"{c.REKEY_RECORDS:,}"],
        ["header of a message", human_bytes(c.MAX_HEADER_BYTES)],
        ["body of a message", human_bytes(c.MAX_BODY_BYTES)],
        ["requests in flight", f"{c.MAX_REQUESTS_IN_FLIGHT:,} or what settings say"],
        ["replies to unknown ids, a connection", str(c.UNKNOWN_REPLY_BUDGET)],
        ["pings without an answer", str(c.MAX_PONGS_WAITING)],
        ["rows of a request", f"{c.MAX_ROWS:,}"],
        ["(row, expert) pairs of a request", f"{c.MAX_PAIRS:,}"],
        ["numbers of a row (n_embd)", f"{c.MAX_EMBD:,}"],
        ["reply that a request may ask for", human_bytes(c.MAX_BODY_BYTES)],
    ],
    **{f"{cls.__name__} ({number})": of_fields(cls) for number, cls in MESSAGES.items() if SCHEMAS[cls].checks},
}  # fmt: skip

FOUND = tables_of(DOCUMENT.read_text())


@pytest.mark.parametrize("heading", EXPECTED)
def test_a_table_of_the_document_is_the_registry(heading: str) -> None:
    width = len(EXPECTED[heading][0])
    assert [row[:width] for row in FOUND.get(heading, [])] == EXPECTED[heading]


def test_the_document_has_no_other_tables() -> None:
    assert set(FOUND) == set(EXPECTED)


def test_the_numbers_of_the_text() -> None:
    text = DOCUMENT.read_text()
    assert noise.SUITE.decode() in text
    assert noise.PSK_SUITE.decode() in text
    assert f'"{c.PROTOCOL_NAME.decode()}"' in text
    assert f'"{c.HELLO_MAGIC.decode()}"' in text
    assert f'"{c.PRIVATE_HELLO_MAGIC.decode()}"' in text


def test_every_message_says_what_it_is() -> None:
    for cls in MESSAGES.values():
        assert summary(cls)


def test_codes_are_told_apart() -> None:
    codes = [*c.PROTOCOL_ERRORS, *c.CLOSE_REASONS]
    assert len(codes) == len(set(codes))


def test_codes_in_the_source_are_in_the_registry() -> None:
    """Every code that the package raises or sends is a row of a table."""
    package = DOCUMENT.parents[1] / "swarmnode"
    used: dict[str, set[str]] = {"ProtocolError": set(), "RequestRefusedError": set(), "Refused": set()}
    for path in package.rglob("*.py"):
        for name, code in re.findall(
            r'\b(ProtocolError|RequestRefusedError|Refused)\(\s*"([a-z_]+)"', path.read_text()
        ):
            used[name].add(code)
    assert used["ProtocolError"] <= set(c.PROTOCOL_ERRORS)
    assert used["RequestRefusedError"] | used["Refused"] <= set(c.REFUSALS)
