"""The market as a node shows it: records, holders with a lease, lost nodes, demand, and what it would take."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from swarmnode.config import Config
from swarmnode.errors import UsageError
from swarmnode.gossip.demand import aggregate
from swarmnode.gossip.sketch import SHARE_UNIT, DemandSketch
from swarmnode.identity import NodeId
from swarmnode.services.market_watch import MarketWatch, choose_ranges, holder_id_of, scarcest_runs
from swarmnode.weights.slices import ExpertRange
from tests.services.market_news import OWN, News, key_of, manifest_of, node

N_LAYER, N_EXPERT = 3, 8
MANIFEST = manifest_of(N_LAYER, N_EXPERT, first_layer=1)
ALL = (ExpertRange(1, 0, 8), ExpertRange(2, 0, 8))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.lost: frozenset[NodeId] = frozenset()


def watch_of(config: Config | None = None) -> tuple[MarketWatch, News, Clock]:
    clock = Clock()
    news = News(MANIFEST.model_id, N_LAYER, N_EXPERT)
    watch = MarketWatch(
        MANIFEST, OWN.node_id, news, config or Config(), lambda: clock.now_s, lambda: clock.lost
    )
    return watch, news, clock


def at(values: np.ndarray, layer: int, expert: int) -> float:
    return float(values[layer * N_EXPERT + expert])


def test_records_become_replicas_and_go_with_their_nodes() -> None:
    watch, news, _ = watch_of()
    news.says(key_of(1), "203.0.113.1:1", (ExpertRange(1, 0, 4),), (ExpertRange(2, 0, 4),))
    news.says(key_of(2), "198.51.100.1:1", (ExpertRange(1, 2, 4),))
    snapshot = watch.snapshot()
    assert snapshot.n_nodes == 2
    assert [at(snapshot.holders, 1, expert) for expert in range(8)] == [1, 1, 2, 2, 1, 1, 0, 0]
    assert [at(snapshot.fetching, 2, expert) for expert in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert at(snapshot.replicas, 1, 2) == 2
    assert at(snapshot.replicas, 2, 0) == 0.5
    assert at(snapshot.scarcity, 2, 4) > at(snapshot.scarcity, 2, 0) > at(snapshot.scarcity, 1, 0)
    assert at(snapshot.scarcity, 0, 0) == 0  # a dense layer has no experts
    news.says(key_of(2), "198.51.100.1:1", leaving=True)
    news.expires(10_000)
    snapshot = watch.snapshot()
    assert snapshot.n_nodes == snapshot.holders.sum() == snapshot.fetching.sum() == 0


def test_neighbours_of_our_own_network_count_one_by_one() -> None:
    watch, news, _ = watch_of()
    for number in (1, 2):
        news.says(key_of(number), f"192.168.1.{number}:1", ALL)
    assert at(watch.snapshot().replicas, 1, 0) < 1.1
    news.says(OWN, "192.168.1.9:1")
    assert at(watch.snapshot().replicas, 1, 0) == 2


def test_who_went_without_a_word_does_not_come_back_when_we_learn_where_we_are() -> None:
    watch, news, clock = watch_of()
    news.says(key_of(1), "192.168.1.1:1", ALL)
    news.says(key_of(2), "192.168.1.2:1", ALL)
    clock.now_s = 280.0  # neither record was renewed
    news.says(key_of(2), "192.168.1.2:1", ALL)
    assert at(watch.snapshot().replicas, 1, 0) == 1
    clock.lost = frozenset({node(2)})
    news.says(OWN, "192.168.1.9:1")
    assert at(watch.snapshot().replicas, 1, 0) == pytest.approx(0.1, abs=0.01)
    clock.lost = frozenset()
    assert at(watch.snapshot().replicas, 1, 0) == 1


def test_lost_nodes_are_no_holders() -> None:
    watch, news, clock = watch_of()
    news.says(key_of(1), "203.0.113.1:1", ALL)
    clock.lost = frozenset({node(1)})
    snapshot = watch.snapshot()
    assert at(snapshot.holders, 1, 0) == 0
    assert at(snapshot.replicas, 1, 0) == pytest.approx(0.1, abs=0.01)
    news.says(key_of(1), "203.0.113.1:1", ALL)  # whoever lost it knows better when it is back
    assert at(watch.snapshot().holders, 1, 0) == 0
    clock.lost = frozenset()
    snapshot = watch.snapshot()
    assert at(snapshot.holders, 1, 0) == at(snapshot.replicas, 1, 0) == 1


def test_a_holder_without_gossip_weighs_little_and_lapses() -> None:
    watch, _, clock = watch_of()
    holder = watch.announce(("192.0.2.1:80",), (ExpertRange(1, 0, 2), ExpertRange(1, 1, 3)), 60)
    assert holder is not None
    assert holder.ranges == (ExpertRange(1, 0, 4),)
    snapshot = watch.snapshot()
    assert at(snapshot.replicas, 1, 0) == pytest.approx(0.1, abs=0.01)
    assert at(snapshot.announced, 1, 0) == 1
    assert at(snapshot.holders, 1, 0) == 0
    clock.now_s = 59
    watch.announce(("192.0.2.1:80",), (ExpertRange(2, 0, 4),), 60)  # says anew, and something else
    snapshot = watch.snapshot()
    assert snapshot.announced.sum() == 4
    assert at(snapshot.announced, 2, 0) == 1
    clock.now_s = 119
    snapshot = watch.snapshot()
    assert snapshot.announced.sum() == 0
    assert snapshot.replicas.sum() == 0
    assert not snapshot.announced_by


def test_holders_are_withdrawn_bounded_and_checked() -> None:
    config = replace(Config(), node_api=replace(Config().node_api, max_holders=2))
    watch, _, _ = watch_of(config)
    places = [(f"192.0.2.{number}:80",) for number in range(3)]
    assert watch.announce(places[0], ALL, 60)
    assert watch.announce(places[1], ALL, 60)
    assert watch.announce(places[2], ALL, 60) is None
    assert watch.announce(places[1], ALL, 60)  # a known one may
    assert watch.withdraw(holder_id_of(places[0]))
    assert not watch.withdraw(holder_id_of(places[0]))
    assert watch.announce(places[2], ALL, 60)
    for wrong in (ExpertRange(0, 0, 1), ExpertRange(3, 0, 1), ExpertRange(1, 7, 2)):
        with pytest.raises(UsageError):
            watch.announce(places[2], (wrong,), 60)


def test_many_holders_of_one_network_are_hardly_more_than_one() -> None:
    watch, _, _ = watch_of()
    for number in range(64):
        watch.announce((f"192.0.2.{number}:80",), ALL, 60)
    assert at(watch.snapshot().replicas, 1, 0) < 1.5


def test_demand_of_backbones() -> None:
    watch, news, _ = watch_of()
    assert watch.snapshot().n_sketches == 0
    assert at(watch.snapshot().demand.weight, 1, 0) == 1
    news.says(key_of(3), "203.0.113.3:1")
    hot = DemandSketch(per_s=10.0, hot={8: SHARE_UNIT // 2}, unmet={})
    news.wants(key_of(3), hot.encode())
    snapshot = watch.snapshot()
    assert snapshot.n_sketches == 1
    assert at(snapshot.demand.weight, 1, 0) > 7
    assert at(snapshot.demand.weight, 1, 1) < 1
    assert scarcest_runs(snapshot, Config().market, 1)[0][1] == ExpertRange(1, 0, 4)
    news.wants(key_of(3), b"\xff")  # nonsense counts as nothing
    assert watch.snapshot().n_sketches == 0


def test_demand_is_put_together_once_for_what_is_said_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Mock(side_effect=aggregate)
    monkeypatch.setattr("swarmnode.gossip.votes.aggregate", together)
    watch, news, _ = watch_of()
    sketch = DemandSketch(per_s=10.0, hot={8: SHARE_UNIT // 2}, unmet={})
    news.says(key_of(3), "203.0.113.3:1")
    for _ in range(3):
        news.wants(key_of(3), sketch.encode())
        for _ in range(3):
            assert watch.snapshot().n_sketches == 1
    assert together.call_count == 1


def test_a_backbone_whose_demand_came_before_its_record_has_a_vote() -> None:
    watch, news, _ = watch_of()
    news.wants(key_of(3), DemandSketch(per_s=10.0, hot={8: SHARE_UNIT // 2}, unmet={}).encode())
    assert watch.snapshot().n_sketches == 0
    news.says(key_of(3), "203.0.113.3:1")
    assert watch.snapshot().n_sketches == 1


def test_what_is_taken_is_scarce_and_fits_in_real_bytes() -> None:
    watch, news, _ = watch_of()
    news.says(key_of(1), "203.0.113.1:1", (ExpertRange(1, 0, 8), ExpertRange(2, 0, 4)))
    snapshot = watch.snapshot()
    small, large = (MANIFEST.layers[layer].layout.expert_bytes for layer in (1, 2))
    assert choose_ranges(snapshot, (), 4 * large, b"seed") == (ExpertRange(2, 4, 4),)
    assert choose_ranges(snapshot, (), 3 * large + 1, b"seed") == (ExpertRange(2, 4, 3),)
    taken = choose_ranges(snapshot, (ExpertRange(2, 4, 4),), 4 * large + 2 * small, b"seed")
    assert snapshot.shape.range_bytes(taken) <= 2 * small
    assert choose_ranges(snapshot, (), small - 1, b"seed") == ()
    watch.announce(("192.0.2.1:80",), (ExpertRange(2, 4, 4),), 60)
    first = choose_ranges(watch.snapshot(), (), 4 * large, b"seed")
    assert first == (ExpertRange(2, 4, 4),)  # a claim of little weight: less than a replica


def test_the_scarcest_runs() -> None:
    watch, news, _ = watch_of()
    news.says(key_of(1), "203.0.113.1:1", (ExpertRange(1, 0, 8), ExpertRange(2, 4, 4)))
    found = scarcest_runs(watch.snapshot(), Config().market, 2)
    assert [item for _, item in found] == [ExpertRange(2, 0, 4), ExpertRange(1, 0, 4)]
    assert found[0][0] > found[1][0]
    assert len(scarcest_runs(watch.snapshot(), Config().market, 99)) == 4
