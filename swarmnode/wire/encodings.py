"""How long rows are in each encoding, and which encoding answers which."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from swarmnode.errors import ProtocolError
from swarmnode.wire.constants import COMMON_ENCODING, ENCODINGS, MAX_EMBD, Q8_BLOCK_BYTES, Q8_BLOCK_NUMBERS


@dataclass(frozen=True, slots=True)
class RowEncoding:
    """A row is a whole number of items, of `item_bytes` bytes and `item_numbers` numbers each."""

    item_bytes: int
    item_numbers: int
    reply: str
    """Encoding of the computed rows when a request's rows are in this one."""


# A sum of experts is used as it is, not quantised again by a kernel: 8 bits would be an error there, f16 is next.
ROW_ENCODINGS = {
    "f32": RowEncoding(4, 1, "f32"),
    "f16": RowEncoding(2, 1, "f16"),
    "q8": RowEncoding(Q8_BLOCK_BYTES, Q8_BLOCK_NUMBERS, "f16"),
}
assert tuple(ROW_ENCODINGS) == ENCODINGS


def row_bytes(encoding: str, n_embd: int) -> int:
    """Bytes of one row; of the last item it takes the whole."""
    item = ROW_ENCODINGS[encoding]
    return -(-n_embd // item.item_numbers) * item.item_bytes


def spoken_encoding(preferred: str, spoken: Collection[str]) -> str:
    """The first that a peer which reads `spoken` understands: the preferred one, that of its replies, f32."""
    wanted = (preferred, ROW_ENCODINGS[preferred].reply)
    return next((encoding for encoding in wanted if encoding in spoken), COMMON_ENCODING)


def row_width_untrusted(rows_bytes: int, n_rows: int, encoding: str) -> int:
    """n_embd of `n_rows` rows in `rows_bytes` bytes. Raises ProtocolError `bad_body` if there is no such n_embd."""
    item = ROW_ENCODINGS[encoding]
    bytes_each, rest = divmod(rows_bytes, n_rows)
    n_items, odd = divmod(bytes_each, item.item_bytes)
    n_embd = n_items * item.item_numbers
    if rest or odd or not 1 <= n_embd <= MAX_EMBD:
        raise ProtocolError("bad_body", f"{rows_bytes} bytes are not {n_rows} {encoding} rows of one width")
    return n_embd
