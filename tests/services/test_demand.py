"""A backbone's demand: some passes are counted, and a sketch is told now and then."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import trio

from swarmnode.config import MarketConfig
from swarmnode.gossip.records import ModelDemand
from swarmnode.gossip.shape import MarketShape
from swarmnode.gossip.sketch import SHARE_UNIT, DemandSketch
from swarmnode.services.demand import DemandWatch

CONFIG = MarketConfig()
SHAPE = MarketShape(2, 8, {0: 1000, 1: 1000})
MODEL = bytes(32)


def ids(*experts: int) -> npt.NDArray[np.int32]:
    return np.array(experts, np.int32)


async def test_one_pass_in_so_many_is_counted() -> None:
    watch = DemandWatch(SHAPE, CONFIG, trio.current_time)
    wanted = [watch.wants_pass() for _ in range(10 * CONFIG.count_every_pass)]
    assert sum(wanted) == 10


async def test_what_the_gate_chose_is_counted() -> None:
    watch = DemandWatch(SHAPE, CONFIG, trio.current_time)
    watch.count([(0, np.array([[1, 2], [1, 3]], np.int32)), (1, ids(7))], [(0, ids(3))])
    assert watch.counts[0, :4] == pytest.approx([0, 2, 1, 1])
    assert watch.counts[1, 7] == pytest.approx(1)
    await trio.sleep(CONFIG.demand_half_life_s)
    assert watch.counts[0, 1] == pytest.approx(1)


async def test_it_is_told_at_intervals_in_which_something_was_counted() -> None:
    watch = DemandWatch(SHAPE, CONFIG, trio.current_time)
    told: list[tuple[float, tuple[ModelDemand, ...]]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run, MODEL, lambda demand: told.append((trio.current_time(), demand)))
        await trio.sleep(10 * CONFIG.demand_interval_s)
        assert told == []
        for _ in range(100):
            watch.count([(1, ids(5, 5, 5, 6))], [(1, ids(6))])
            await trio.sleep(CONFIG.demand_interval_s / 50)
        await trio.sleep(10 * CONFIG.demand_interval_s)
        nursery.cancel_scope.cancel()
    *told, (_, last) = told
    assert DemandSketch.decode_untrusted(last[0].sketch, SHAPE.size).unmet == {}, "nobody asks any more"
    assert 2 <= len(told) <= 4
    assert told[1][0] - told[0][0] == pytest.approx(CONFIG.demand_interval_s)
    ((entry,),) = [demand for _, demand in told[-1:]]
    sketch = DemandSketch.decode_untrusted(entry.sketch, SHAPE.size)
    assert entry.model == MODEL
    assert sketch.hot[8 + 5] == pytest.approx(0.75 * SHARE_UNIT, rel=0.01)
    assert set(sketch.unmet) == {8 + 6}


async def test_only_unmet_pairs_is_no_news_by_itself() -> None:
    watch = DemandWatch(SHAPE, CONFIG, trio.current_time)
    told: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run, MODEL, told.append)
        watch.count([], [])
        await trio.sleep(3 * CONFIG.demand_interval_s)
        nursery.cancel_scope.cancel()
    assert told == []


async def test_a_hole_is_forgotten_though_nobody_asks_for_that_expert_again() -> None:
    """One pair that found nobody, before there were workers, must not talk their replicas away for ever."""
    watch = DemandWatch(SHAPE, CONFIG, trio.current_time)
    told: list[tuple[ModelDemand, ...]] = []
    watch.count([(0, ids(1))], [(0, ids(1))])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run, MODEL, told.append)
        for _ in range(10):
            watch.count([(1, ids(5))], [])
            await trio.sleep(CONFIG.unmet_half_life_s)
        nursery.cancel_scope.cancel()
    shares = [DemandSketch.decode_untrusted(d[0].sketch, SHAPE.size).unmet.get(1, 0) for d in told]
    assert shares[0] > SHARE_UNIT / 2
    assert shares[-1] < SHARE_UNIT / 100
