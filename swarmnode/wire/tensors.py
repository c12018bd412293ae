"""Rows as bytes: little-endian `f32`, `f16` (half the bytes, 11 bits of precision, up to 65,504) or `q8` (q8.py).

Bodies are described in messages.Experts and messages.Rows. Everything a peer sent is checked for lengths, indices,
pairs named twice and numbers that are not finite before a single number is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from swarmnode.errors import BadReplyError, ProtocolError, RequestRefusedError, UsageError
from swarmnode.wire import q8
from swarmnode.wire.constants import (
    ENCODINGS,
    MAX_BODY_BYTES,
    MAX_EMBD,
    MAX_EXPERT,
    MAX_PAIRS,
    PAIR_EXPERT_BYTES,
    PAIR_ROW_BYTES,
)
from swarmnode.wire.encodings import ROW_ENCODINGS, row_bytes
from swarmnode.wire.messages import Experts, Rows

F32: TypeAlias = npt.NDArray[np.float32]
I32: TypeAlias = npt.NDArray[np.int32]
WireRows: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | q8.Blocks
"""Rows as they travelled, one an index, until they are computed (`widened`): q8 is blocks [T, n_embd / 256]."""

MAX_F16 = 65_504.0
_FEW_NUMBERS = 64
"""Up to so many are looked at in Python: numpy's reductions cost 30 us each when their code is out of the caches."""
_F16_INF_BITS = 0x7C00
_ROWS_AT_ONCE = 64
"""Rows checked in one numpy operation: bounds its temporary arrays."""
_ROW_DTYPES: dict[str, np.dtype[np.float16] | np.dtype[np.float32] | np.dtype[np.void]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "q8": q8.BLOCK,
}


def fits_f16(rows: F32) -> bool:
    """True when every number is finite and at most 65,504 in size, so that f16 holds it."""
    # One pass, no temporary array; a NaN makes both comparisons false.
    return rows.size == 0 or bool(rows.min() >= -MAX_F16 and rows.max() <= MAX_F16)


def encode_rows_or_f32(
    rows: F32, preferred: str, spoken: Collection[str] = ENCODINGS
) -> tuple[str, memoryview]:
    """(encoding, `encode_rows` in it): the preferred one, or for rows that it cannot hold the next that can.

    For a width without whole blocks that is the encoding of its replies, if the peer reads it (`spoken`); for numbers
    that are too large, or too small (in f16, a block too small for q8 would be zeros), it is `f32`.
    """
    item = ROW_ENCODINGS[preferred]
    if rows.shape[1] % item.item_numbers and item.reply in spoken:
        preferred = item.reply
    data = _encoded(rows, preferred)
    return ("f32", _flat(_contiguous(rows))) if data is None else (preferred, data)


def encode_rows(rows: F32, encoding: str) -> memoryview:
    """Rows [T, n_embd] as flat bytes; for f32 a view of `rows`, which must not change until it is sent.

    Raises UsageError for another dtype or rank, an unknown encoding, or rows that the encoding cannot hold.
    """
    if rows.dtype != np.float32 or rows.ndim != 2:
        raise UsageError(f"rows are f32 [T, n_embd], not {rows.dtype} with {rows.ndim} dimensions")
    if encoding not in _ROW_DTYPES:
        raise UsageError(f"unknown row encoding {encoding!r}")
    data = _encoded(rows, encoding)
    if data is None:
        raise UsageError(f"a number does not fit {encoding} (over 65,504 or not finite), or n_embd; send f32")
    return data


def _encoded(rows: F32, encoding: str) -> memoryview | None:
    """None for rows that the encoding cannot hold."""
    if encoding == "f32":
        return _flat(_contiguous(rows))
    if encoding == "q8":
        blocks = q8.quantise(rows)
        return None if blocks is None else _flat(blocks)
    return _flat(rows.astype("<f2", order="C")) if fits_f16(rows) else None


def _contiguous(rows: F32) -> F32:
    return rows.astype("<f4", order="C", copy=False)


def widened(rows: WireRows) -> F32:
    """Rows as they travelled, as f32 [T, n_embd]: the same array if they are f32."""
    if rows.dtype == q8.BLOCK:
        return q8.dequantise(cast(q8.Blocks, rows))
    return rows.astype(np.float32, copy=False)


def decode_rows_untrusted(
    data: bytes | memoryview, n_rows: int, n_embd: int, encoding: str, *, finite: bool = True
) -> F32:
    """Rows [n_rows, n_embd] of a peer: aligned, C order, read-only if they are a view of `data`.

    Raises ProtocolError `bad_tensor` unless `data` is exactly n_rows rows of n_embd numbers, if `finite` all finite and
    (q8) within its bounds.
    """
    rows = view_rows_untrusted(data, n_rows, n_embd, encoding, finite=finite)
    return widened(rows)


def view_rows_untrusted(
    data: bytes | memoryview, n_rows: int, n_embd: int, encoding: str, *, finite: bool = True
) -> WireRows:
    """The same without the conversion: rows of the encoding's dtype, a view of `data` if that is aligned."""
    dtype = _ROW_DTYPES.get(encoding)
    if dtype is None:
        raise ProtocolError("bad_tensor", "unknown row encoding")
    n_items, odd = divmod(n_embd, ROW_ENCODINGS[encoding].item_numbers)
    if odd or n_rows < 1 or not 1 <= n_embd <= MAX_EMBD or len(data) != n_rows * n_items * dtype.itemsize:
        raise ProtocolError("bad_tensor", f"{len(data)} bytes are not {n_rows} x {n_embd} {encoding} numbers")
    rows = cast(WireRows, np.frombuffer(data, dtype).reshape(n_rows, n_items))
    if not rows.flags.aligned:
        rows = rows.copy()
    if finite and not all(_are_good(rows[at : at + _ROWS_AT_ONCE]) for at in range(0, n_rows, _ROWS_AT_ONCE)):
        problem = "a block out of bounds" if encoding == "q8" else "a number that is not finite"
        raise ProtocolError("bad_tensor", problem)
    return rows


def _are_good(rows: WireRows) -> bool:
    if rows.dtype == q8.BLOCK:
        return q8.are_good(cast(q8.Blocks, rows))
    if rows.dtype == np.float16:  # its bits: a fifth of the time of isfinite
        return bool((rows.view(np.uint16) & 0x7FFF).max() < _F16_INF_BITS)
    return bool(np.isfinite(rows).all())


def experts_body_bytes(message: Experts, n_embd: int) -> int:
    """Length of the body that belongs to this header in a model of this width."""
    return message.n_rows * row_bytes(message.encoding, n_embd) + message.pair_bytes


def encode_experts_body(
    rows: F32, pair_row: I32, pair_expert: I32, pair_weight: F32 | None, encoding: str
) -> tuple[memoryview, ...]:
    """The body of Experts, in parts. `pair_weight` [P] for form `partial`, None for `experts`.

    Raises UsageError if lengths differ, an id does not fit u16, or a number does not fit `encoding`.
    """
    return (encode_rows(rows, encoding), *encode_pairs(len(rows), pair_row, pair_expert, pair_weight))


def encode_pairs(
    n_rows: int, pair_row: I32, pair_expert: I32, pair_weight: F32 | None
) -> tuple[memoryview, ...]:
    """What follows the rows in the body of Experts; arguments and errors as `encode_experts_body`."""
    n_pairs = len(pair_row)
    weights_match = pair_weight is None or (len(pair_weight) == n_pairs and pair_weight.dtype == np.float32)
    if not 1 <= n_pairs <= MAX_PAIRS or len(pair_expert) != n_pairs or not weights_match:
        raise UsageError(
            "pair_row, pair_expert and pair_weight [P] go together, 1 to 65,536 of them, weights f32"
        )
    if not _in_range(pair_row, n_rows):
        raise UsageError(f"a pair names a row outside 0 .. {n_rows - 1}")
    if not _in_range(pair_expert, MAX_EXPERT + 1):
        raise UsageError(f"a pair names an expert outside 0 .. {MAX_EXPERT}")
    parts = [_flat(pair_row.astype("<u4")), _flat(pair_expert.astype("<u2"))]
    if pair_weight is not None:
        parts.append(_flat(pair_weight.astype("<f4", order="C", copy=False)))
    return tuple(parts)


def parse_experts_body_untrusted(
    message: Experts, body: bytes | memoryview, n_embd: int, n_expert: int
) -> tuple[WireRows, I32, I32, F32 | None]:
    """(T rows, pair_row i32 [P], pair_expert i32 [P], pair_weight f32 [P] or None) of a request.

    Rows are as they came (`WireRows`), and may be a read-only view of `body`. Raises RequestRefusedError `bad_tensor`
    (`too_large` if the reply would be over the cap of a body) and nothing else.
    """
    try:
        return _parse_experts(message, body, n_embd, n_expert)
    except ProtocolError as error:
        raise RequestRefusedError(error.code, error.reason) from None


def encode_rows_body(rows: F32, encoding: str) -> tuple[memoryview, ...]:
    """The body of Rows. Raises RequestRefusedError `overflow` for numbers that the asked encoding cannot hold."""
    try:
        return (encode_rows(rows, encoding),)
    except UsageError:
        if encoding != "f16" or fits_f16(rows):
            raise
        raise RequestRefusedError("overflow", "a result does not fit f16; ask for f32") from None


def check_reply_encoding(message: Rows, sent: str) -> None:
    """BadReplyError unless a reply to rows `sent` in that encoding has the one that belongs to it."""
    if message.encoding != ROW_ENCODINGS[sent].reply:
        raise BadReplyError(f"asked in {sent} for {ROW_ENCODINGS[sent].reply} rows, got {message.encoding}")


def as_travelled(rows: F32, encoding: str) -> F32:
    """Rows as whoever was sent them in that encoding sees them; the same array for f32.

    Raises UsageError for rows that it cannot hold.
    """
    if encoding == "f32":
        return rows
    n_rows, n_embd = rows.shape
    return decode_rows_untrusted(encode_rows(rows, encoding), n_rows, n_embd, encoding, finite=False)


def parse_rows_body_untrusted(message: Rows, body: bytes | memoryview, n_rows: int, n_embd: int) -> F32:
    """The rows f32 [n_rows, n_embd] of a reply, where `n_rows` is what was asked for.

    Raises BadReplyError, and nothing else, for another number of rows, another width or numbers that are not finite.
    """
    if message.n_rows != n_rows:
        raise BadReplyError(f"asked for {n_rows} rows, got {message.n_rows}")
    try:
        return decode_rows_untrusted(body, n_rows, n_embd, message.encoding)
    except ProtocolError as error:
        raise BadReplyError(error.reason) from None


def _parse_experts(
    message: Experts, body: bytes | memoryview, n_embd: int, n_expert: int
) -> tuple[WireRows, I32, I32, F32 | None]:
    if len(body) != experts_body_bytes(message, n_embd):
        raise ProtocolError(
            "bad_tensor",
            f"{len(body)} bytes instead of {experts_body_bytes(message, n_embd)} for n_embd {n_embd}",
        )
    n_pairs = message.n_pairs
    reply_rows = n_pairs if message.form == "experts" else message.n_rows
    if reply_rows * row_bytes(message.reply_encoding, n_embd) > MAX_BODY_BYTES:
        raise ProtocolError("too_large", "the reply would be over the cap of a body")
    rows_end = len(body) - message.pair_bytes
    row_end = rows_end + n_pairs * PAIR_ROW_BYTES
    expert_end = row_end + n_pairs * PAIR_EXPERT_BYTES
    view = memoryview(body)
    pair_row = np.frombuffer(view[rows_end:row_end], "<u4")
    pair_expert = np.frombuffer(view[row_end:expert_end], "<u2")
    _check_pairs(pair_row, pair_expert, message.n_rows, n_expert)
    pair_weight = None
    if message.form == "partial":
        pair_weight = np.frombuffer(view[expert_end:], "<f4").astype(np.float32)
        if not _are_finite(pair_weight):
            raise ProtocolError("bad_tensor", "a weight that is not finite")
    rows = view_rows_untrusted(view[:rows_end], message.n_rows, n_embd, message.encoding)
    return rows, pair_row.astype(np.int32), pair_expert.astype(np.int32), pair_weight


def _check_pairs(
    pair_row: npt.NDArray[np.uint32], pair_expert: npt.NDArray[np.uint16], n_rows: int, n_expert: int
) -> None:
    if pair_row.size <= _FEW_NUMBERS:
        _check_few_pairs(pair_row.tolist(), pair_expert.tolist(), n_rows, n_expert)
        return
    _check_ends(int(pair_row.max()), int(pair_expert.max()), n_rows, n_expert)
    # Row and expert of a pair as one number: rows are below 2**13 by now, experts below 2**16.
    keys = np.sort(pair_row.astype(np.int64) << 16 | pair_expert)
    twice = keys[1:] == keys[:-1]
    if twice.any():
        key = int(keys[:-1][twice][0])
        raise _twice(key >> 16, key & 0xFFFF)


def _check_few_pairs(rows: list[int], experts: list[int], n_rows: int, n_expert: int) -> None:
    """The same in Python, for one token's pairs: numpy's dozen of operations take longer with cold caches."""
    _check_ends(max(rows), max(experts), n_rows, n_expert)
    if len(set(zip(rows, experts, strict=True))) < len(rows):
        row, expert = min(pair for pair, n in Counter(zip(rows, experts, strict=True)).items() if n > 1)
        raise _twice(row, expert)


def _check_ends(last_row: int, last_expert: int, n_rows: int, n_expert: int) -> None:
    if last_row >= n_rows:
        raise ProtocolError("bad_tensor", f"row {last_row} of {n_rows}")
    if last_expert >= n_expert:
        raise ProtocolError("bad_tensor", f"expert {last_expert} of {n_expert}")


def _twice(row: int, expert: int) -> ProtocolError:
    return ProtocolError("bad_tensor", f"expert {expert} twice for row {row}")


def _are_finite(numbers: F32) -> bool:
    if numbers.size <= _FEW_NUMBERS:
        return all(map(math.isfinite, numbers.tolist()))
    return bool(np.isfinite(numbers).all())


def _in_range(numbers: I32, end: int) -> bool:
    """Whether all of at least one number are 0 to end - 1."""
    if numbers.size <= _FEW_NUMBERS:
        few = numbers.tolist()
        return bool(min(few) >= 0 and max(few) < end)
    return bool(numbers.min() >= 0 and numbers.max() < end)


def _flat(array: npt.NDArray[np.generic]) -> memoryview:
    """The bytes of a C-contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data
