"""Demand: counted with decay, told in a sketch, put together so that liars move little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError
from swarmnode.gossip.demand import DemandCounter, aggregate, even_demand
from swarmnode.gossip.shape import MarketShape
from swarmnode.gossip.sketch import MAX_HOT, MAX_SKETCH_BYTES, MAX_UNMET, SHARE_UNIT, DemandSketch
from tests.gossip.market import CONFIG, even_shape


def ids(*experts: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(experts, np.int32)


def test_counts_halve_every_half_life() -> None:
    counter = DemandCounter(even_shape(), CONFIG)
    for _ in range(600):  # more than one fold
        counter.add(1, ids(3, 5), 100.0)
    assert counter.counts(100.0)[1, 3] == pytest.approx(600)
    later = counter.counts(100.0 + CONFIG.demand_half_life_s)
    assert later[1, 5] == pytest.approx(300)
    assert later.sum() == pytest.approx(600)


def test_what_is_added_is_copied() -> None:
    counter = DemandCounter(even_shape(), CONFIG)
    buffer = ids(1, 2)
    counter.add(0, buffer, 0.0)
    buffer[:] = 9
    assert counter.counts(0.0)[0, 1] == 1


def test_a_clock_that_goes_back_changes_nothing() -> None:
    counter = DemandCounter(even_shape(), CONFIG)
    counter.add(0, ids(1), 1000.0)
    counter.counts(1000.0)
    counter.add(0, ids(1), 10.0)
    assert counter.counts(10.0)[0, 1] == pytest.approx(2)


def test_the_rate_of_a_steady_load() -> None:
    counter = DemandCounter(even_shape(), CONFIG)
    for second in range(6000):
        counter.add(0, ids(0, 1, 2, 3), float(second))
    assert counter.sketch(6000.0).per_s == pytest.approx(4.0, rel=0.02)


def test_a_sketch_names_the_most_wanted() -> None:
    shape = even_shape(4, 64)
    counter = DemandCounter(shape, CONFIG)
    for layer in range(4):
        counter.add(layer, np.arange(64, dtype=np.int32), 0.0)
    counter.add(2, ids(*[7] * 100), 0.0)
    sketch = counter.sketch(0.0)
    assert len(sketch.hot) == MAX_HOT
    assert max(sketch.hot, key=lambda flat: sketch.hot[flat]) == 2 * 64 + 7
    assert sketch.hot[2 * 64 + 7] == int(101 / 356 * SHARE_UNIT)
    assert sketch.unmet == {}


def test_unmet_pairs_are_told_and_soon_forgotten() -> None:
    counter = DemandCounter(even_shape(), CONFIG)
    counter.add(0, ids(1, 2, 3, 3, 3, 4), 0.0)
    counter.add_unmet(0, ids(3, 4), 0.0)
    assert counter.sketch(0.0).unmet == {3: SHARE_UNIT // 3, 4: SHARE_UNIT}
    for second in range(600):
        counter.add(0, ids(1, 2, 3, 4), float(second))
    assert counter.sketch(600.0).unmet == {}


shares = st.dictionaries(st.integers(0, 47), st.integers(1, SHARE_UNIT // 48), max_size=48)


@given(shares, shares, st.integers(0, 2**32 - 1))
def test_sketches_survive_the_wire(hot: dict[int, int], unmet: dict[int, int], rate: int) -> None:
    sketch = DemandSketch(rate / 1024, hot, unmet)
    data = sketch.encode()
    assert len(data) <= MAX_SKETCH_BYTES
    assert DemandSketch.decode_untrusted(data, 48) == sketch


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_canonical(data: bytes) -> None:
    try:
        sketch = DemandSketch.decode_untrusted(data, 48)
    except ProtocolError:
        return
    assert sketch.encode() == data


@given(shares, st.data())
def test_a_changed_byte_is_refused_or_another_sketch(hot: dict[int, int], data: st.DataObject) -> None:
    good = bytearray(DemandSketch(2.0, hot, {}).encode())
    place = data.draw(st.integers(0, len(good) - 1))
    good[place] ^= data.draw(st.integers(1, 255))
    try:
        sketch = DemandSketch.decode_untrusted(bytes(good), 48)
    except ProtocolError:
        return
    assert sketch.encode() == good


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02" + bytes(6),
        bytes([1, 0, 0, 0, 0, MAX_HOT + 1]),
        bytes([1, 0, 0, 0, 0, 0, MAX_UNMET + 1]),
        bytes([1, 0, 0, 0, 0, 1, 48, 1, 0, 0]),  # an expert behind the last
        bytes([1, 0, 0, 0, 0, 1, 3, 0, 0, 0]),  # a share of nothing
        bytes([1, 0, 0, 0, 0, 1, 0x83, 0, 1, 0, 0]),  # a long form of 3
        bytes([1, 0, 0, 0, 0, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0, 0]),
        bytes([1, 0, 0, 0, 0, 2, 0, 255, 255, 0, 1, 0, 0]),  # more than the whole
        bytes([1, 0, 0, 0, 0, 0, 0, 0]),  # a byte left over
        bytes(MAX_SKETCH_BYTES + 1),
    ],
)
def test_lies_in_sketches(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        DemandSketch.decode_untrusted(data, 48)


def test_without_sketches_all_experts_are_wanted_alike() -> None:
    shape = MarketShape(3, 4, {1: 10, 2: 10})
    demand = aggregate([("a", DemandSketch(0.0, {5: SHARE_UNIT}, {}))], shape)
    assert demand.weight.tolist() == [0] * 4 + [1] * 8 == even_demand(shape).weight.tolist()


def honest(flat: int) -> DemandSketch:
    return DemandSketch(10.0, {flat: SHARE_UNIT // 10}, {})


def test_one_liar_moves_nothing_beyond_what_honest_ones_say() -> None:
    shape = even_shape(3, 16)
    votes = [(f"site {i}", honest(7)) for i in range(4)]
    without = aggregate(votes, shape)
    for lie in (
        DemandSketch(4e6, {40: SHARE_UNIT}, dict.fromkeys(range(48), SHARE_UNIT // 48)),
        DemandSketch(1e-3, {7: 1}, {}),
    ):
        told = aggregate([*votes, ("liar", lie)], shape)
        np.testing.assert_allclose(told.weight, without.weight, rtol=1e-5)
        assert not told.unmet.any()
        assert told.per_s == 10.0


def test_many_backbones_of_one_site_have_one_vote() -> None:
    shape = even_shape(3, 16)
    liar = DemandSketch(10.0, {40: SHARE_UNIT}, {})
    votes = [(f"site {i}", honest(7)) for i in range(3)]
    told = aggregate([*votes, *[("liars", liar)] * 100], shape)
    np.testing.assert_allclose(told.weight, aggregate(votes, shape).weight, rtol=1e-5)


def test_unmet_experts_need_more_than_a_liar() -> None:
    shape = even_shape(3, 16)
    hole, lie = DemandSketch(1.0, {}, {3: SHARE_UNIT}), DemandSketch(1.0, {}, {3: SHARE_UNIT, 4: SHARE_UNIT})
    assert aggregate([("a", hole)], shape).unmet.nonzero()[0].tolist() == [3]
    demand = aggregate([("a", hole), ("b", hole), ("c", lie), ("d", hole)], shape)
    assert demand.unmet[3] == 1
    assert demand.unmet[4] == 0


def test_sketches_of_experts_that_do_not_exist_count_nothing() -> None:
    shape = MarketShape(2, 4, {1: 10})
    demand = aggregate([("a", DemandSketch(1.0, {0: 1000, 5: 1000, 10**6: 9}, {1: 5}))], shape)
    assert not demand.weight[:4].any()
    assert demand.weight[4:].mean() == pytest.approx(1.0)
    assert not demand.unmet.any()
