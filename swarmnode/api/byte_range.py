"""The header `Range` (RFC 9110, section 14) for one range of bytes. Pure."""

from __future__ import annotations

import re

from swarmnode.errors import UsageError

_RANGE = re.compile(r"bytes\s*=\s*([0-9]{0,19})\s*-\s*([0-9]{0,19})", re.IGNORECASE | re.ASCII)


def parse_range(value: str, n_bytes: int) -> range | None:
    """The bytes asked for of a file of `n_bytes` (> 0), or None: answer with all of it.

    None for other units than bytes and for several ranges at once, which a server may ignore. UsageError for a
    range that is malformed or lies behind the end: the answer is 416.
    """
    unit, equals, ranges = value.partition("=")
    if not equals or unit.strip().lower() != "bytes" or "," in ranges:
        return None
    match = _RANGE.fullmatch(value.strip())
    if match is None or match[1] == match[2] == "":
        raise UsageError(f"{value[:80]!r} is no range of bytes; write bytes=FIRST-LAST")
    if match[1] == "":
        return range(n_bytes - min(int(match[2]), n_bytes), n_bytes) or _none(n_bytes)
    first = int(match[1])
    last = n_bytes - 1 if match[2] == "" else min(int(match[2]), n_bytes - 1)
    if match[2] != "" and int(match[2]) < first:
        raise UsageError(f"{value[:80]!r} ends before it begins")
    return range(first, last + 1) or _none(n_bytes)


def _none(n_bytes: int) -> range:
    raise UsageError(f"no such bytes: there are {n_bytes}")


def is_fresh(if_none_match: str, etag: str) -> bool:
    """Whether the header `If-None-Match` says that the client has this version."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
