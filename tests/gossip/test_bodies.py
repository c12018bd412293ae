"""Bodies of gossip messages: round trips, and any bytes."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError
from swarmnode.gossip import anti_entropy
from swarmnode.gossip.bodies import (
    pack_buckets,
    pack_offers,
    pack_records,
    read_buckets_untrusted,
    read_ids_untrusted,
    read_offers_untrusted,
    read_records_untrusted,
)
from swarmnode.wire import constants as c
from swarmnode.wire.messages import GossipDigest, GossipHave, GossipWant
from tests.calls import count_lines

from .samples import error_code

IDS = st.binary(min_size=8, max_size=8)
OFFERS = st.lists(st.tuples(IDS, st.integers(0, 255)), max_size=50)


@given(OFFERS)
def test_offers(offers: list[tuple[bytes, int]]) -> None:
    assert read_offers_untrusted(pack_offers(offers)) == offers


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=4096)), max_size=20))
def test_records(records: list[tuple[int, bytes]]) -> None:
    assert read_records_untrusted(pack_records(records)) == records


@given(st.dictionaries(st.integers(0, 63), OFFERS, max_size=64))
def test_buckets(buckets: dict[int, list[tuple[bytes, int]]]) -> None:
    body, left = pack_buckets(buckets.items())
    assert left == 0
    assert read_buckets_untrusted(body, 64) == buckets


def test_what_does_not_fit_is_left_whole() -> None:
    records = [(0, bytes([number]) * 4096) for number in range(100)]
    body = pack_records(records)
    assert len(body) <= c.MAX_GOSSIP_RECORDS_BYTES
    assert read_records_untrusted(body) == records[:63]
    offers = [(bytes(8), 0)] * 10_000
    body, left = pack_buckets([(0, offers), (1, offers), (2, [])])
    assert left == 1
    assert list(read_buckets_untrusted(body, 64)) == [0, 2]


@given(st.binary(max_size=3000), st.integers(1, 1024))
def test_any_bytes(data: bytes, n_buckets: int) -> None:
    for code in (
        error_code(lambda: read_offers_untrusted(data)),
        error_code(lambda: read_ids_untrusted(data)),
        error_code(lambda: read_records_untrusted(data)),
        error_code(lambda: read_buckets_untrusted(data, n_buckets)),
    ):
        assert code in ("", "bad_body")


@pytest.mark.parametrize("fill", [0, 0xFF, 0x01])
def test_the_largest_bodies_cost_little(fill: int) -> None:
    """A few lines for each item that may be in it, and none for each byte."""
    for n_bytes in (c.MAX_GOSSIP_RECORDS_BYTES, c.MAX_GOSSIP_DIFFERENCES_BYTES):
        data = bytes([fill]) * n_bytes
        for read, most_items in (
            (read_records_untrusted, c.MAX_GOSSIP_WANTED),
            (partial(read_buckets_untrusted, n_buckets=1024), c.MAX_GOSSIP_BUCKETS),
        ):
            n_lines = count_lines(partial(error_code, partial(read, data)))
            assert n_lines < 50 + 12 * most_items
    most, left = pack_buckets([(bucket, [(bytes(8), 0)] * 10) for bucket in range(c.MAX_GOSSIP_BUCKETS)])
    assert left == 0
    n_lines = count_lines(partial(read_buckets_untrusted, most, c.MAX_GOSSIP_BUCKETS))
    assert c.MAX_GOSSIP_BUCKETS < n_lines < 50 + 12 * c.MAX_GOSSIP_BUCKETS


@pytest.mark.parametrize(
    ("read", "n_bytes"),
    [
        (read_offers_untrusted, 9 * (c.MAX_GOSSIP_IDS + 1)),
        (read_ids_untrusted, 8 * (c.MAX_GOSSIP_WANTED + 1)),
        (read_records_untrusted, 3 * (c.MAX_GOSSIP_WANTED + 1)),
    ],
)
def test_counts_are_bounded(read: object, n_bytes: int) -> None:
    assert callable(read)
    with pytest.raises(ProtocolError, match="bad_body"):
        read(bytes(n_bytes))


@pytest.mark.parametrize(
    ("message", "n_bytes"),
    [
        (GossipHave(), 0),
        (GossipHave(), 10),
        (GossipWant(), 0),
        (GossipWant(), 9),
        (GossipDigest(bytes(8), "all", (), (), ()), 0),
        (GossipDigest(bytes(8), "all", (), (), ()), 24),
        (GossipDigest(bytes(8), "all", (), (), ()), 12),
    ],
)
def test_the_wire_refuses_lengths_that_cannot_be(
    message: GossipHave | GossipWant | GossipDigest, n_bytes: int
) -> None:
    with pytest.raises(ProtocolError, match="bad_body"):
        message.check_body_untrusted(n_bytes)


def test_a_want_reserves_room_for_its_reply() -> None:
    assert GossipWant().reply_bytes(8) == 4096 + 3
    assert GossipWant().reply_bytes(8 * 256) == c.MAX_GOSSIP_RECORDS_BYTES


@given(st.sets(IDS, max_size=60), st.sets(IDS, max_size=60), IDS)
def test_buckets_that_differ_are_found(ours: set[bytes], theirs: set[bytes], salt: bytes) -> None:
    n_buckets = anti_entropy.buckets_for(len(ours), 1)
    mine = anti_entropy.in_buckets(ours, n_buckets)
    asked = anti_entropy.digest(anti_entropy.in_buckets(theirs, n_buckets), salt)
    expected = {anti_entropy.bucket_of(record_id, n_buckets) for record_id in ours ^ theirs}
    assert set(anti_entropy.differing(mine, asked, salt)) == expected


@pytest.mark.parametrize(("n_records", "n_buckets"), [(0, 64), (1000, 128), (10_000, 1024), (10**6, 1024)])
def test_how_many_buckets(n_records: int, n_buckets: int) -> None:
    assert anti_entropy.buckets_for(n_records, 8) == n_buckets
