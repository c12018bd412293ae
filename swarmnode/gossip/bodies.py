"""The bodies of gossip messages: offers, ids and records, packed and read. Pure.

offer    8 B id | u8 age                        GossipHave, GossipDifferences
id       8 B                                    GossipWant
record   u16 length | u8 age | bytes            GossipRecords
bucket   u16 bucket | u16 count | offers        GossipDifferences
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from swarmnode.errors import ProtocolError
from swarmnode.wire import constants as c

Offer: TypeAlias = tuple[bytes, int]
"""An id, and the record's age in 255ths of its life."""

_OFFER = struct.Struct("<8sB")
_RECORD = struct.Struct("<HB")
_BUCKET = struct.Struct("<HH")


def _bad(reason: str) -> ProtocolError:
    return ProtocolError("bad_body", reason)


def pack_offers(offers: Iterable[Offer]) -> bytes:
    """The body of a GossipHave."""
    return b"".join([_OFFER.pack(record_id, age) for record_id, age in offers])


def read_offers_untrusted(body: bytes | memoryview) -> list[Offer]:
    """Raises ProtocolError `bad_body` for half an offer or more than MAX_GOSSIP_IDS."""
    if len(body) % _OFFER.size or len(body) > c.MAX_GOSSIP_IDS * _OFFER.size:
        raise _bad(f"{len(body)} bytes of offers")
    return list(_OFFER.iter_unpack(body))


def read_ids_untrusted(body: bytes | memoryview) -> list[bytes]:
    """The body of a GossipWant. Raises ProtocolError `bad_body` for half an id or more than MAX_GOSSIP_WANTED."""
    if len(body) % c.GOSSIP_ID_BYTES or len(body) > c.MAX_GOSSIP_WANTED * c.GOSSIP_ID_BYTES:
        raise _bad(f"{len(body)} bytes of ids")
    data = bytes(body)
    return [data[at : at + c.GOSSIP_ID_BYTES] for at in range(0, len(data), c.GOSSIP_ID_BYTES)]


def pack_records(records: Iterable[tuple[int, bytes]]) -> bytes:
    """(age, bytes) of each as the body of a GossipRecords: as many as fit, in order."""
    body = bytearray()
    for age, data in records:
        if len(body) + _RECORD.size + len(data) > c.MAX_GOSSIP_RECORDS_BYTES:
            break
        body += _RECORD.pack(len(data), age)
        body += data
    return bytes(body)


def read_records_untrusted(body: bytes | memoryview) -> list[tuple[int, bytes]]:
    """(age, bytes) of each. Raises ProtocolError `bad_body` for a record that is cut, too long or one too many."""
    data = bytes(body)
    records: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        if at + _RECORD.size > len(data) or len(records) == c.MAX_GOSSIP_WANTED:
            raise _bad("a record that is cut, or one too many")
        length, age = _RECORD.unpack_from(data, at)
        at += _RECORD.size + length
        if length > c.MAX_GOSSIP_RECORD_BYTES or at > len(data):
            raise _bad(f"a record of {length} bytes")
        records.append((age, data[at - length : at]))
    return records


def pack_buckets(buckets: Iterable[tuple[int, list[Offer]]]) -> tuple[bytes, int]:
    """The body of a GossipDifferences, whole buckets only; and how many did not fit."""
    body = bytearray()
    left = 0
    for bucket, offers in buckets:
        if len(body) + _BUCKET.size + len(offers) * _OFFER.size > c.MAX_GOSSIP_DIFFERENCES_BYTES:
            left += 1
            continue
        body += _BUCKET.pack(bucket, len(offers))
        body += pack_offers(offers)
    return bytes(body), left


def read_buckets_untrusted(body: bytes | memoryview, n_buckets: int) -> Mapping[int, list[Offer]]:
    """Bucket -> offers. Raises ProtocolError `bad_body`: cut, a bucket twice, or one that was not in the question."""
    data = memoryview(body)
    buckets: dict[int, list[Offer]] = {}
    at = 0
    while at < len(data):
        if at + _BUCKET.size > len(data):
            raise _bad("a bucket that is cut")
        bucket, count = _BUCKET.unpack_from(data, at)
        at += _BUCKET.size
        end = at + count * _OFFER.size
        if bucket >= n_buckets or bucket in buckets or end > len(data):
            raise _bad(f"bucket {bucket}, twice or not asked for, or cut")
        buckets[bucket] = list(_OFFER.iter_unpack(data[at:end]))
        at = end
    return buckets
