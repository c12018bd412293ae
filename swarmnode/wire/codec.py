"""Message headers: msgpack maps with text keys, read strictly.

`unpack_map_untrusted` raises ProtocolError and nothing else. It is only ever given what passed the 4 KiB cap, so the
hostile inputs that hurt msgpack readers (depth, counts of 2**32) are small here, and each limit below is set anyway.
"""

from __future__ import annotations

from typing import Any

import msgpack

from swarmnode.errors import ProtocolError
from swarmnode.wire.constants import MAX_HEADER_BYTES

MAX_DEPTH = 3
"""Deepest nesting any message has: a map, a list in it, a list or map in that."""
MAX_FIELDS = 16
MAX_ITEMS = 1024
MAX_VALUE_BYTES = 1024


def pack_map(fields: dict[str, Any]) -> bytes:
    """The header of `fields`, in their order."""
    return bytes(msgpack.packb(fields, use_bin_type=True))


def unpack_map_untrusted(data: bytes | memoryview) -> dict[str, object]:
    """Read one map with text keys from all of `data`; lists come as tuples.

    Raises ProtocolError `bad_header`: over 4 KiB, truncated, trailing bytes, a duplicate or non-text key, broken UTF-8,
    extension types, more than 16 fields or 1,024 items, text or bytes over 1 KiB, nesting over 3.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError("bad_header", f"{len(data)} bytes, at most {MAX_HEADER_BYTES}")
    value = _unpack_untrusted(data, MAX_VALUE_BYTES)
    if type(value) is not dict:
        raise ProtocolError("bad_header", "not a map")
    for item in value.values():
        if type(item) is tuple or type(item) is dict:
            _check_depth(item, 2)
    return value


def unpack_list_untrusted(data: bytes | memoryview, max_bytes: int) -> tuple[object, ...]:
    """Read one list from all of `data`; lists come as tuples. Text and bytes may be as long as `max_bytes` allows.

    Raises ProtocolError `bad_header`: over `max_bytes`, and what `unpack_map_untrusted` refuses.
    """
    if len(data) > max_bytes:
        raise ProtocolError("bad_header", f"{len(data)} bytes, at most {max_bytes}")
    value = _unpack_untrusted(data, max_bytes)
    if type(value) is not tuple:
        raise ProtocolError("bad_header", "not a list")
    _check_depth(value, 1)
    return value


def _unpack_untrusted(data: bytes | memoryview, max_value_bytes: int) -> object:
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_unique_map,
            ext_hook=_no_extension,
            max_str_len=max_value_bytes,
            max_bin_len=max_value_bytes,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_FIELDS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError("bad_header", f"not strict msgpack: {str(error)[:100]}") from None


def _unique_map(pairs: list[tuple[object, object]]) -> dict[object, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("duplicate key")
    for key in fields:
        if type(key) is not str:
            raise ValueError("a key that is not text")
    return fields


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _check_depth(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ProtocolError("bad_header", f"nested deeper than {MAX_DEPTH}")
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    for item in items:
        if type(item) is tuple or type(item) is dict:
            _check_depth(item, depth + 1)
