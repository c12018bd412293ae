"""Sealed records: whole, in order, once; rekeyed at the same count on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError
from swarmnode.wire.constants import MAX_RECORD_PLAIN_BYTES
from swarmnode.wire.noise import CipherState
from swarmnode.wire.records import RecordReader, RecordWriter

from .pairs import protocol_error

KEY = bytes(range(32))


def writer(rekey_records: int = 1000) -> RecordWriter:
    return RecordWriter(CipherState(KEY), rekey_records)


def reader(rekey_records: int = 1000) -> RecordReader:
    return RecordReader(CipherState(KEY), rekey_records)


def read_all(reader: RecordReader) -> list[bytes]:
    records = []
    while (record := reader.next_record_untrusted()) is not None:
        records.append(bytes(record))
    return records


def test_a_record_as_bytes() -> None:
    """Fixed: a change here breaks every other version."""
    assert (
        writer().seal(b"twelve bytes").hex() == "1c006ccf275ddb8386b36a153912a41c7dd96b06b4586abcd418532c54cf"
    )


@given(st.lists(st.binary(min_size=12, max_size=300), max_size=8), st.integers(1, 40), st.integers(1, 3))
def test_records_come_out_as_they_went_in_however_the_bytes_are_cut(
    texts: list[bytes], step: int, rekey_records: int
) -> None:
    out, into = writer(rekey_records), reader(rekey_records)
    stream = b"".join(out.seal(text) for text in texts)
    found = []
    for start in range(0, len(stream), step):
        into.feed(stream[start : start + step])
        found += read_all(into)
    assert found == texts
    assert not into.has_partial


def test_the_longest_record() -> None:
    text = bytes(MAX_RECORD_PLAIN_BYTES)
    into = reader()
    into.feed(writer().seal(text))
    assert read_all(into) == [text]


def test_a_lost_repeated_or_swapped_record_breaks_the_seal() -> None:
    out = writer()
    first, second, third = (bytes(out.seal(bytes([n]) * 20)) for n in range(3))
    for stream in (second, first + first, first + third, first + third + second):
        into = reader()
        into.feed(stream)
        with pytest.raises(ProtocolError) as error:
            read_all(into)
        assert error.value.code == "bad_record"


@given(st.integers(0, 8 * 46 - 1))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    record = writer().seal(bytes(28))
    record[bit // 8] ^= 1 << bit % 8
    into = reader()
    into.feed(record)
    code = protocol_error(lambda: read_all(into))
    assert code == "bad_record" or (
        code is None and into.has_partial
    )  # the length grew: waiting for the rest


@pytest.mark.parametrize("length", [0, 1, 15, 16, 27])
def test_a_record_too_short_to_hold_a_frame_is_refused_from_its_length(length: int) -> None:
    into = reader()
    into.feed(length.to_bytes(2, "little"))
    with pytest.raises(ProtocolError, match="at least 28"):
        into.next_record_untrusted()


def test_both_sides_rekey_at_the_same_record() -> None:
    out, into = writer(2), reader(2)
    without = reader(1000)
    stream = b"".join(out.seal(bytes([n]) * 12) for n in range(5))
    into.feed(stream)
    assert read_all(into) == [bytes([n]) * 12 for n in range(5)]
    without.feed(stream)
    with pytest.raises(ProtocolError, match="seal is broken"):
        read_all(without)


def test_memory_is_one_record() -> None:
    """What was read is let go of, even if records never end where reads do."""
    out, into = writer(10**6), reader(10**6)
    for _ in range(200):
        record = out.seal(bytes(60_000))
        into.feed(record[:-1])
        read_all(into)
        into.feed(record[-1:])
        assert len(read_all(into)) == 1
    into.feed(b"")
    assert len(into._buffer) == 0
