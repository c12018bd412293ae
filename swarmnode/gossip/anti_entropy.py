"""Comparing two sets of records by the hashes of their buckets: what news did not bring, this brings. Pure.

A bucket holds the ids with the same first bits. Its hash is salted by the asker, anew each time, so that nobody can
prepare records whose buckets look alike and differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from swarmnode.wire.constants import GOSSIP_ID_BYTES, MAX_GOSSIP_BUCKETS

MIN_BUCKETS = 64
"""Even of a node that knows nothing: the answer is cut at whole buckets, so there have to be some."""


def buckets_for(n_records: int, bucket_records: int) -> int:
    """A power of two of buckets, of about `bucket_records` each, between MIN_BUCKETS and MAX_GOSSIP_BUCKETS."""
    wanted = n_records // bucket_records
    return max(MIN_BUCKETS, min(MAX_GOSSIP_BUCKETS, 1 << wanted.bit_length()))


def bucket_of(record_id: bytes, n_buckets: int) -> int:
    """By the first bits of the id; `n_buckets` is a power of two of at most 2**16."""
    return int.from_bytes(record_id[:2], "big") * n_buckets >> 16


def in_buckets(ids: Iterable[bytes], n_buckets: int) -> list[list[bytes]]:
    """The sorted ids of every bucket."""
    buckets: list[list[bytes]] = [[] for _ in range(n_buckets)]
    for record_id in sorted(ids):
        buckets[bucket_of(record_id, n_buckets)].append(record_id)
    return buckets


def digest(buckets: Sequence[Sequence[bytes]], salt: bytes) -> bytes:
    """8 bytes a bucket: the first of SHA-256(salt | sorted ids)."""
    return b"".join([_bucket_hash(bucket, salt) for bucket in buckets])


def differing(buckets: Sequence[Sequence[bytes]], theirs: bytes, salt: bytes) -> list[int]:
    """Numbers of our buckets whose hash is another than in `theirs` (8 bytes for each of ours)."""
    n_bytes = GOSSIP_ID_BYTES
    return [
        number
        for number, bucket in enumerate(buckets)
        if _bucket_hash(bucket, salt) != theirs[number * n_bytes : (number + 1) * n_bytes]
    ]


def _bucket_hash(bucket: Sequence[bytes], salt: bytes) -> bytes:
    return hashlib.sha256(salt + b"".join(bucket)).digest()[:GOSSIP_ID_BYTES]
