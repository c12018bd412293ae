"""Whose sketches are counted: few, whoever floods, and decoded once."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import pytest

from swarmnode.gossip.demand import aggregate
from swarmnode.gossip.records import ModelDemand, OwnState, sign_demand, sign_record
from swarmnode.gossip.sketch import SHARE_UNIT, DemandSketch
from swarmnode.gossip.table import RecordTable
from swarmnode.gossip.votes import DemandVotes, choose_sketches
from tests.gossip.market import CONFIG, even_shape

from .samples import CONFIG as GOSSIP
from .samples import MODEL, NETWORK_ID, OTHER_MODEL, key_of, table_of

SHAPE = even_shape()
SILENT = DemandSketch(0.0, {}, {}).encode()


def asking(number: int) -> bytes:
    """A sketch like no other one."""
    return DemandSketch(1.0 + number, {number % SHAPE.size: SHARE_UNIT // 2}, {}).encode()


class Backbones:
    """What they say comes into a table."""

    def __init__(self) -> None:
        self.table: RecordTable = table_of(replace(GOSSIP, max_per_prefix=10**6))
        self._counters = count(1)

    def say(self, number: int, site: int, sketch: bytes, model: bytes = MODEL) -> None:
        """Node `number`, one of a /24, wants this."""
        key, version = key_of(number), (1, next(self._counters))
        state = OwnState((f"8.7.{site}.{number % 250}:7",), roles=("backbone",))
        self.table.offer(sign_record(key, NETWORK_ID, version, 600, 0, state), 0.0, key.node_id)
        demand = (ModelDemand(model, sketch),)
        self.table.offer(sign_demand(key, NETWORK_ID, version, 600, 0, demand), 0.0, key.node_id)

    def votes(self, salt: bytes = b"us") -> DemandVotes:
        return DemandVotes(self.table, MODEL, SHAPE, CONFIG, salt)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was decoded."""
    found: list[bytes] = []
    decode = DemandSketch.decode_untrusted

    def noting(data: bytes, size: int) -> DemandSketch:
        found.append(data)
        return decode(data, size)

    monkeypatch.setattr(DemandSketch, "decode_untrusted", noting)
    return found


def test_a_flood_of_one_site_is_decoded_for_a_small_part(decoded: list[bytes]) -> None:
    backbones = Backbones()
    for number in range(1, 101):
        backbones.say(number, 5, asking(number))
    flooded = backbones.votes()
    assert flooded.renew()
    first = [asking(number) for number in range(1, 1 + CONFIG.max_site_sketches)]
    assert decoded == first, "those known for the longest"
    assert flooded.n_sketches == CONFIG.max_site_sketches
    for number in range(101, 0, -1):
        backbones.say(number, 5, asking(1000 + number))
    assert flooded.renew()
    assert set(decoded[len(first) :]) == {asking(1000 + number) for number in range(1, 5)}


def test_a_flood_of_sites_is_decoded_for_a_small_part(decoded: list[bytes]) -> None:
    backbones = Backbones()
    for number in range(1, 201):
        backbones.say(number, number, asking(number))
    flooded = backbones.votes()
    assert flooded.renew()
    assert len(decoded) == len(set(decoded)) == flooded.n_sketches == CONFIG.max_demand_sites


def test_every_node_counts_other_sites() -> None:
    backbones = Backbones()
    for number in range(1, 201):
        backbones.say(number, number, asking(number))
    ours, theirs = (choose_sketches(backbones.table, MODEL, CONFIG, salt) for salt in (b"us", b"them"))
    assert ours == choose_sketches(backbones.table, MODEL, CONFIG, b"us")
    assert 0 < len(set(ours) & set(theirs)) < CONFIG.max_demand_sites / 2


def test_who_asks_for_nothing_takes_nobodys_place() -> None:
    backbones = Backbones()
    for number in range(1, 20):
        backbones.say(number, 5, SILENT)
        backbones.say(100 + number, 5, asking(number), OTHER_MODEL)
    backbones.say(50, 5, asking(7))
    assert choose_sketches(backbones.table, MODEL, CONFIG, b"") == [("8.7.5.0/24", asking(7))]


def test_what_is_said_once_more_is_put_together_once(
    decoded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Mock(side_effect=aggregate)
    monkeypatch.setattr("swarmnode.gossip.votes.aggregate", together)
    backbones = Backbones()
    told = backbones.votes()
    assert not told.renew(), "nobody has said anything"
    for number in range(1, 11):
        backbones.say(number, number, asking(number))
    assert told.renew()
    before = told.demand
    for number in range(10, 0, -1):
        backbones.say(number, number, asking(number))  # a newer record
    backbones.say(99, 99, asking(99), OTHER_MODEL)
    assert not told.renew()
    assert told.demand is before
    backbones.say(3, 3, asking(33))
    assert told.renew()
    assert together.call_count == 2
    assert decoded == [*decoded[:10], asking(33)]
    assert len(told._decoded) == 10, "what is not chosen any more is forgotten"


def test_a_node_without_a_record_has_no_vote() -> None:
    backbones = Backbones()
    key = key_of(1)
    demand = (ModelDemand(MODEL, asking(1)),)
    backbones.table.offer(sign_demand(key, NETWORK_ID, (1, 1), 600, 0, demand), 0.0, key.node_id)
    assert choose_sketches(backbones.table, MODEL, CONFIG, b"") == []
