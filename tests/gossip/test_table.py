"""The table: merge laws, time, bounds, and what a flood cannot do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.config import GossipConfig
from swarmnode.gossip.places import GRACE_S
from swarmnode.gossip.records import NODE, OwnState, Record, network_id, sign_demand
from swarmnode.gossip.table import AGE_UNIT, Change, Heard, Outcome, RecordTable

from .samples import CONFIG, DEMAND, NETWORK_ID, contents, key_of, record_of, state_of, table_of

STATES = (state_of(layer=0), state_of(layer=1), OwnState(leaving=True))
POOL: list[Record] = [
    *[
        record_of(number, version, state)
        for number, version, state in itertools.product((1, 2, 3), ((1, 1), (1, 2), (2, 0)), STATES)
    ],
    *[sign_demand(key_of(1), NETWORK_ID, (1, counter), 600, 0, DEMAND) for counter in (1, 2)],
]
LISTS = st.lists(st.sampled_from(POOL), max_size=12)


def merged(records: Sequence[Record], table: RecordTable | None = None) -> RecordTable:
    table = table_of() if table is None else table
    for record in records:
        table.offer(record, 100.0, key_of(99).node_id)
    return table


@given(LISTS, st.randoms(use_true_random=False))
def test_merging_is_commutative(records: list[Record], rng: random.Random) -> None:
    shuffled = list(records)
    rng.shuffle(shuffled)
    assert contents(merged(records)) == contents(merged(shuffled))


@given(LISTS, LISTS, LISTS)
def test_merging_is_associative(a: list[Record], b: list[Record], c: list[Record]) -> None:
    bc = list(merged(c, merged(b)).records())
    ab = list(merged(b, merged(a)).records())
    assert contents(merged(bc, merged(a))) == contents(merged(c, merged(ab)))


@given(LISTS)
def test_merging_is_idempotent(records: list[Record]) -> None:
    table = merged(records)
    before = contents(table)
    again = merged(records, table)
    assert contents(again) == before
    for record in list(table.records()):
        assert table.offer(record, 100.0).outcome is Outcome.SAME


def test_outcomes() -> None:
    table = table_of()
    source = key_of(5).node_id
    first, second = record_of(1, (1, 1)), record_of(1, (1, 2))
    assert table.offer(first, 1.0, source).outcome is Outcome.NEW
    assert table.offer(first, 1.0, source).outcome is Outcome.SAME
    assert table.offer(second, 2.0, source).outcome is Outcome.NEWER
    old = table.offer(first, 3.0, source)
    assert (old.outcome, old.changed) == (Outcome.OLD, False)
    assert table.offer(record_of(2, network=network_id("other")), 3.0).outcome is Outcome.REFUSED
    assert table.get(key_of(1).node_id) == second
    assert table.hear(first.id, 0, 3.0) is Heard.PASSED, "an old record is not asked for again"
    assert table.take_changes() == [Change(key_of(1).node_id, NODE, second)]
    assert table.take_changes() == []


def test_a_higher_incarnation_wins_over_any_counter() -> None:
    table = merged([record_of(1, (1, 2**40)), record_of(1, (2, 0))])
    assert [record.version for record in table.live()] == [(2, 0)]


def test_one_version_with_two_contents_is_flagged_and_the_smaller_hash_stays() -> None:
    pair = sorted([record_of(1, state=STATES[0]), record_of(1, state=STATES[1])], key=lambda r: r.digest)
    for order in (pair, pair[::-1]):
        table = merged(order)
        assert contents(table) == {pair[0].data}
        assert table.conflicts == {key_of(1).node_id: 1}


# -- time


def test_a_record_ends_by_our_clock_whatever_it_says() -> None:
    for issued_s in (0, 1_800_000_000 - 86_400, 1_800_000_000 + 315_000_000, 2**63):
        table = table_of()
        table.offer(record_of(1, ttl_s=600, issued_s=issued_s), 1000.0, key_of(5).node_id)
        table.expire(1599.0)
        assert len(list(table.live())) == 1
        table.expire(1601.0)
        assert list(table.live()) == []
        assert table.take_changes() == [Change(key_of(1).node_id, NODE, None)]


def test_no_record_stands_longer_than_an_hour() -> None:
    table = table_of()
    table.offer(record_of(1, ttl_s=86_400), 0.0)
    table.expire(3599.0)
    assert len(table) == 1
    table.expire(3601.0)
    assert len(table) == 0


def test_what_expired_or_left_does_not_come_back() -> None:
    """Cases 6: a dead peer came back from stale gossip."""
    table = table_of()
    first, last = record_of(1, (1, 1)), record_of(1, (1, 2))
    table.offer(last, 0.0)
    table.expire(601.0)
    for stale in (first, last):
        assert table.offer(stale, 700.0).outcome is Outcome.OLD
        assert table.hear(stale.id, 0, 700.0) is Heard.PASSED
    assert list(table.live()) == []
    assert table.offer(record_of(1, (1, 3)), 700.0).outcome is Outcome.NEW
    table.offer(record_of(1, (1, 4), OwnState(leaving=True)), 701.0)
    assert list(table.live()) == []
    assert table.offer(record_of(1, (1, 3)), 702.0).outcome is Outcome.OLD
    assert table.offer(record_of(1, (2, 0)), 703.0).changed, "the node itself may come back"
    assert len(list(table.live())) == 1


def test_what_a_clock_slept_through_is_added_to_every_age() -> None:
    """As if every record had been seen so much earlier."""
    slept, awake = table_of(), table_of()
    records = [record_of(number, ttl_s=100 * number) for number in (1, 2, 3, 30)]
    for table, from_s in ((slept, 500.0), (awake, 0.0)):
        for record in records:
            table.offer(record, from_s, key_of(99).node_id, 20)
        table.expire(from_s + 150.0)  # the first one is remembered as gone
    slept.slept(500.0)
    for table in (slept, awake):
        for record in records:
            table.hear(record.id, 0, 620.0)  # nobody makes it younger than it was when it was seen
    for now_s in (160.0, 250.0, 620.0, 3000.0, 3800.0):
        for table in (slept, awake):
            table.expire(now_s)
        assert contents(slept) == contents(awake)
        assert [slept.age(r.id, now_s) for r in records] == [awake.age(r.id, now_s) for r in records]
        assert slept._gone == awake._gone


def test_versions_of_the_gone_are_forgotten_in_time_and_bounded() -> None:
    table = table_of(replace(CONFIG, max_gone=2))
    for number in (1, 2, 3):
        table.offer(record_of(number), float(number))
    table.expire(700.0)
    outcomes = [table.judge(record_of(number)).outcome for number in (1, 2, 3)]
    assert outcomes == [Outcome.NEW, Outcome.OLD, Outcome.OLD]
    table.expire(700.0 + CONFIG.gone_s)
    assert table.judge(record_of(3)).outcome is Outcome.NEW


def test_ages_add_up_over_hops() -> None:
    """A record handed on from node to node ends when it would have ended at the first."""
    record = record_of(1, ttl_s=600)
    table = table_of()
    table.offer(record, 0.0)
    now_s = 0.0
    for _ in range(8):
        now_s += 60.0
        age = table.age(record.id, now_s)
        assert age * 600 / AGE_UNIT >= now_s
        table = table_of()
        table.offer(record, now_s, key_of(5).node_id, age)
    table.expire(601.0)
    assert len(table) == 0
    assert table.age(record.id, 601.0) == AGE_UNIT


def test_nobody_ends_or_prolongs_anothers_record() -> None:
    record = record_of(1, ttl_s=600)
    table = table_of()
    table.offer(record, 1000.0, key_of(5).node_id, 250)  # "it is nearly over"
    table.expire(1000.0 + GRACE_S - 1.0)
    assert table.hear(record.id, 20, 1020.0) is Heard.YOUNGER  # an honest neighbour
    assert table.hear(record.id, 200, 1021.0) is Heard.OLDER
    assert table.hear(record.id, 22, 1021.0) is Heard.KNOWN
    assert table.hear(bytes(8), 0, 1021.0) is Heard.UNKNOWN
    table.expire(1000.0 + 500.0)
    assert len(table) == 1
    for now_s in range(1500, 1590, 10):
        table.hear(record.id, 0, float(now_s))  # "it is quite new"
        table.offer(record, float(now_s), key_of(6).node_id, 0)
    table.expire(1601.0)
    assert len(table) == 0


def test_a_record_at_its_end_is_not_taken() -> None:
    table = table_of()
    assert table.offer(record_of(1), 5.0, key_of(5).node_id, AGE_UNIT).outcome is Outcome.REFUSED
    assert table.offer(record_of(1), 5.0, key_of(6).node_id, 0).changed, (
        "and that says nothing about others' copies"
    )


def test_demand_goes_with_its_node() -> None:
    table = merged([record_of(1), sign_demand(key_of(1), NETWORK_ID, (1, 2), 600, 0, DEMAND)])
    assert [record.models for record in table.demands()] == [DEMAND]
    table.offer(record_of(1, (1, 3), OwnState(leaving=True)), 100.0)
    assert list(table.demands()) == []


# -- own key


def test_demand_is_read_in_the_order_in_which_it_came_to_be_known() -> None:
    table = table_of()
    for version, numbers in (((1, 1), (5, 3, 9, 1)), ((1, 2), (1, 9)), ((2, 0), (3,))):
        for number in numbers:
            record = sign_demand(key_of(number), NETWORK_ID, version, 600, 0, DEMAND)
            table.offer(record, 0.0, key_of(99).node_id)
    assert [record.node_id for record in table.demands()] == [key_of(n).node_id for n in (5, 3, 9, 1)]


def test_records_of_our_own_key_are_told_apart() -> None:
    table = table_of()
    ours = record_of(0, (5, 1))
    assert table.offer(record_of(0, (9, 9)), 0.0, key_of(5).node_id).outcome is Outcome.OWN_NEWER
    assert len(table) == 0
    assert table.offer(ours, 0.0).changed
    assert table.offer(ours, 0.0, key_of(5).node_id).outcome is Outcome.SAME
    assert table.offer(record_of(0, (5, 0)), 0.0, key_of(5).node_id).outcome is Outcome.OLD
    assert table.offer(record_of(0, (5, 2)), 0.0, key_of(5).node_id).outcome is Outcome.OWN_NEWER
    clone = record_of(0, (5, 1), STATES[1])
    assert table.offer(clone, 0.0, key_of(5).node_id).outcome is Outcome.OWN_NEWER
    assert contents(table) == {ours.data}


# -- bounds

SMALL = GossipConfig(max_records=100, max_per_prefix=10, max_source_share=0.5, max_passed=200, max_gone=50)


def test_the_table_is_bounded_and_old_acquaintances_stay() -> None:
    table = table_of(SMALL)
    honest = [record_of(number) for number in range(1, 13)]
    for number, record in enumerate(honest):
        table.offer(record, float(number), key_of(5000 + number).node_id)
    for number in range(100, 1100):
        table.offer(record_of(number), 100.0 + number, key_of(6000 + number % 50).node_id)
    assert len(table) == 100
    assert contents(table) >= {record.data for record in honest}
    assert len(table._passed) <= 200


def test_one_peer_brings_at_most_its_share() -> None:
    table = table_of(SMALL)
    flooder = key_of(7000).node_id
    for number in range(1, 300):
        table.offer(record_of(number), float(number), flooder)
    assert len(table) == 50
    for number in range(300, 330):
        assert table.offer(record_of(number), 400.0, key_of(7001).node_id).changed
    assert len(table) == 80


def test_one_prefix_has_at_most_its_share() -> None:
    table = table_of(SMALL)
    for number in range(1, 60):
        table.offer(record_of(number, state=state_of(f"198.51.100.{number}:7000")), float(number))
    assert len(table) == 10
    table.offer(record_of(100), 60.0)
    moved = record_of(100, (1, 2), state_of("198.51.100.200:7000"))
    assert table.offer(moved, 61.0).changed
    assert len(table) == 10, "moving into a crowded prefix pushes another out of it"


def test_connected_nodes_are_never_evicted() -> None:
    table = table_of(SMALL)
    for number in range(1, 101):
        table.offer(record_of(number), 0.0, key_of(7000 + number).node_id)
        table.pin(key_of(number).node_id, True)
    assert table.offer(record_of(200), 1.0, key_of(9).node_id).reason == "the table is full"
    table.pin(key_of(50).node_id, False)
    assert table.offer(record_of(201), 1.0, key_of(9).node_id).changed
    assert table.get(key_of(50).node_id) is None
    assert len(table) == 100


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3)), max_size=80),
    st.integers(0, 9),
)
def test_the_inner_lists_agree(offers: list[tuple[int, int, int]], seed: int) -> None:
    """After any offers, evictions and expiries the table's indexes hold exactly its entries."""
    table = table_of(replace(SMALL, max_records=12, max_per_prefix=4), seed)
    for step, (number, counter, place) in enumerate(offers):
        record = record_of(number, (1, counter), state_of(f"198.51.{place}.1:7000"))
        table.offer(record, 10.0 * step, key_of(100 + number % 3).node_id)
        table.expire(10.0 * step)
    places = table._places
    entries = places._entries
    assert len(entries) <= 12
    assert sorted(places._keys) == sorted(entries)
    assert all(places._keys[entry.place] == key for key, entry in entries.items())
    assert set(table._ids) == {entry.record.id for entry in entries.values()}
    grouped = sorted(key for group in places._by_prefix.values() for key in group)
    assert grouped == sorted(entries)
    assert places._by_source.total() == len(entries)
