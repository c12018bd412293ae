"""Sealed records: u16 length of the ciphertext, ciphertext (at most 65,535 bytes with its 16-byte tag).

Records of a direction are numbered by their nonce, so a lost, repeated, swapped or changed one breaks the seal. The key
of a direction is replaced (Noise REKEY) after every 2**20 records, on both sides at the same count.
"""

from __future__ import annotations

from swarmnode.errors import ProtocolError
from swarmnode.wire.constants import (
    MAX_RECORD_PLAIN_BYTES,
    MIN_RECORD_BYTES,
    RECORD_LENGTH_BYTES,
    REKEY_RECORDS,
    TAG_BYTES,
)
from swarmnode.wire.noise import CipherState

LARGE_RECORD_BYTES = 16 * 1024
"""From this size on a record is one of many of a large body, as a rule."""


class RecordWriter:
    """Seals plaintext for one direction."""

    def __init__(self, cipher: CipherState, rekey_records: int = REKEY_RECORDS) -> None:
        self._cipher = cipher
        self._rekey_records = rekey_records

    def seal(self, plain: bytes) -> bytearray:
        """One whole record of `plain` (12 to 65,519 bytes)."""
        length = len(plain) + TAG_BYTES
        record = bytearray(RECORD_LENGTH_BYTES + length)
        record[:RECORD_LENGTH_BYTES] = length.to_bytes(RECORD_LENGTH_BYTES, "little")
        self._cipher.seal_into(plain, memoryview(record)[RECORD_LENGTH_BYTES:])
        _rekey_if_due(self._cipher, self._rekey_records)
        return record


class RecordReader:
    """Collects the bytes of one direction and opens each record as soon as it is whole."""

    def __init__(self, cipher: CipherState, rekey_records: int = REKEY_RECORDS) -> None:
        self._cipher = cipher
        self._rekey_records = rekey_records
        self._buffer = bytearray()
        self._start = 0
        self._scratch: memoryview | None = None
        """For the plaintext of large records: fresh memory for each costs twice what the cipher does."""

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take what came. Holds at most one incomplete record beside it."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    @property
    def has_partial(self) -> bool:
        """True when the stream must not end here."""
        return self._start < len(self._buffer)

    def next_record_untrusted(self) -> bytes | memoryview | None:
        """The plaintext of the next record, or None if it is not whole yet. Raises ProtocolError `bad_record`.

        A writable view is of memory that the next call uses again; bytes stay.
        """
        buffer, body = self._buffer, self._start + RECORD_LENGTH_BYTES
        if len(buffer) < body:
            return None
        length = buffer[body - 2] | buffer[body - 1] << 8
        if length < MIN_RECORD_BYTES:
            raise ProtocolError("bad_record", f"a record of {length} bytes, at least {MIN_RECORD_BYTES}")
        if len(buffer) < body + length:
            return None
        with memoryview(buffer) as view:
            plain = self._open_untrusted(view[body : body + length])
        self._start = body + length
        _rekey_if_due(self._cipher, self._rekey_records)
        return plain

    def _open_untrusted(self, sealed: memoryview) -> bytes | memoryview:
        if len(sealed) < LARGE_RECORD_BYTES:
            return self._cipher.open_untrusted(sealed)
        if self._scratch is None:
            self._scratch = memoryview(bytearray(MAX_RECORD_PLAIN_BYTES))
        plain = self._scratch[: len(sealed) - TAG_BYTES]
        self._cipher.open_into_untrusted(sealed, plain)
        return plain


def _rekey_if_due(cipher: CipherState, rekey_records: int) -> None:
    if cipher.nonce % rekey_records == 0:
        cipher.rekey()
