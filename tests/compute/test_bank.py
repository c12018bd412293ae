"""The bank's three forms agree bit by bit, however the experts came in and the batches are cut."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.combine import combine_top_k
from swarmnode.compute.devices import Device, open_device
from swarmnode.config import MIB, ComputeConfig
from swarmnode.errors import BudgetError, DeviceError, UsageError
from tests.compute.layers import TYPES, Routing, random_layer, random_routing

RANGES, SEGMENTS = ComputeConfig(), ComputeConfig(slots_per_range=0)
SLOTS = pytest.mark.parametrize("config", [RANGES, SEGMENTS], ids=["ranges", "segments"])


def combined(bank: ExpertBank, routing: Routing) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    y = bank.experts(0, routing.rows, routing.pair_row, routing.pair_expert)
    return combine_top_k(y.reshape(*routing.ids.shape, -1), routing.weights)


@SLOTS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("types", TYPES)
def test_the_three_forms_are_bit_equal(
    device: Device, types: tuple[int, int], fused: bool, config: ComputeConfig
) -> None:
    layer = random_layer(types, fused=fused)
    whole = layer.bound(device)
    slots = ExpertBank(device, budget_bytes=8 * layer.layout.expert_bytes, config=config)
    for expert in (5, 2, 7, 0, 1, 3, 4, 6):
        slots.add(layer.layout, expert, layer.slabs(expert))
    routing = random_routing(layer.layout, 13)
    moe = whole.moe(0, routing.rows, routing.ids, routing.weights)
    assert np.isfinite(moe).all()
    assert moe.any()
    for bank in (whole, slots):
        for max_rows in (512, 5, 2):
            bank.limit_rows(max_rows)
            assert bank.moe(0, routing.rows, routing.ids, routing.weights).tobytes() == moe.tobytes()
            assert combined(bank, routing).tobytes() == moe.tobytes()
            partial = bank.partial(
                0, routing.rows, routing.pair_row, routing.pair_expert, routing.pair_weight
            )
            assert partial.tobytes() == moe.tobytes()
    whole.close()
    slots.close()


def test_a_row_comes_out_the_same_in_any_company(device: Device) -> None:
    """Case 15: batch 1, 2, 8 and 64 give the same floats."""
    layer = random_layer((ggml.Q4_K, ggml.Q6_K))
    bank = layer.bound(device)
    routing = random_routing(layer.layout, 64)
    whole = bank.moe(0, routing.rows, routing.ids, routing.weights)
    for width in (1, 2, 8, 33):
        for start in range(0, 64, width):
            piece = slice(start, start + width)
            part = bank.moe(0, routing.rows[piece], routing.ids[piece], routing.weights[piece])
            assert part.tobytes() == whole[piece].tobytes()
    bank.close()


def test_one_graph_serves_all_layers(device: Device) -> None:
    layers = [random_layer((ggml.Q4_K, ggml.Q6_K), layer=number) for number in range(3)]
    bank = ExpertBank(device)
    for layer in layers:
        bank.bind(layer.layout, range(8), layer.stacked)
    routing = random_routing(layers[0].layout, 4)
    first = [bank.moe(n, routing.rows, routing.ids, routing.weights) for n in range(3)]
    after_one_round = bank.graph_bytes
    again = [bank.moe(n, routing.rows, routing.ids, routing.weights) for n in range(3)]
    assert bank.graph_bytes == after_one_round
    assert [a.tobytes() for a in first] == [a.tobytes() for a in again]
    for number, layer in enumerate(layers):
        alone = ExpertBank(device)
        alone.bind(layer.layout, range(8), layer.stacked)
        expected = alone.moe(number, routing.rows, routing.ids, routing.weights)
        assert first[number].tobytes() == expected.tobytes()
        alone.close()
    assert first[0].tobytes() != first[1].tobytes()
    bank.close()


def test_graph_memory_is_bounded(device: Device) -> None:
    layer = random_layer()
    bank = ExpertBank(device, config=ComputeConfig(graph_cache_bytes=MIB))
    bank.bind(layer.layout, range(8), layer.stacked)
    rows = np.ones((300, 256), np.float32)
    for n_pairs in range(1, 300, 7):
        pairs = np.arange(n_pairs, dtype=np.int32)
        bank.experts(0, rows, pairs, pairs % 8)
        assert 0 < bank.graph_bytes <= MIB
    bank.close()


@SLOTS
def test_budget_is_hard_and_counts_real_bytes(device: Device, config: ComputeConfig) -> None:
    """Case 4: layers of two quantisations are priced at their own sizes."""
    small = random_layer((ggml.Q4_K, ggml.Q4_K), layer=0)
    large = random_layer((ggml.Q4_K, ggml.Q6_K), layer=1)
    assert small.layout.expert_bytes < large.layout.expert_bytes
    budget = 3 * small.layout.expert_bytes + 2 * large.layout.expert_bytes
    bank = ExpertBank(device, budget_bytes=budget, config=config)
    for expert in range(3):
        bank.add(small.layout, expert, small.slabs(expert))
    for expert in range(2):
        bank.add(large.layout, expert, large.slabs(expert))
    assert bank.used_bytes == budget
    with pytest.raises(BudgetError, match="budget"):
        bank.add(small.layout, 3, small.slabs(3))
    assert bank.used_bytes == budget
    assert bank.holdings == {0: {0, 1, 2}, 1: {0, 1}}
    bank.remove(0, 1)
    bank.add(small.layout, 3, small.slabs(3))
    assert bank.used_bytes == budget
    bank.close()
    assert bank.used_bytes == 0


@SLOTS
def test_reserve_takes_all_or_nothing(device: Device, config: ComputeConfig) -> None:
    layer = random_layer()
    size = layer.layout.expert_bytes
    bank = ExpertBank(device, budget_bytes=4 * size, config=config)
    with pytest.raises(BudgetError):
        bank.reserve(layer.layout, 5)
    assert bank.used_bytes == 0
    bank.reserve(layer.layout, 4)
    assert bank.used_bytes == (4 * size if config is SEGMENTS else 0)
    for expert in (7, 3, 0, 5):
        bank.add(layer.layout, expert, layer.slabs(expert))
    assert bank.used_bytes == 4 * size
    with pytest.raises(BudgetError, match="budget"):
        bank.reserve(layer.layout, 1)
    bank.close()


@SLOTS
def test_experts_come_and_go_while_serving(device: Device, config: ComputeConfig) -> None:
    layer = random_layer((ggml.Q8_0, ggml.Q8_0))
    whole = layer.bound(device)
    bank = ExpertBank(device, budget_bytes=3 * layer.layout.expert_bytes, config=config)
    rng = np.random.default_rng(5)
    held: list[int] = []
    for _ in range(40):
        if len(held) == 3 or (held and rng.random() < 0.4):
            gone = held.pop(int(rng.integers(len(held))))
            bank.remove(0, gone)
            with pytest.raises(UsageError, match="held"):
                bank.experts(
                    0, np.ones((1, 256), np.float32), np.zeros(1, np.int32), np.array([gone], np.int32)
                )
        else:
            fresh = int(rng.choice([e for e in range(8) if e not in held]))
            bank.add(layer.layout, fresh, layer.slabs(fresh))
            held.append(fresh)
        assert set(bank.holdings.get(0, ())) == set(held)
        assert bank.used_bytes <= 3 * layer.layout.expert_bytes
        if held:
            rows = rng.standard_normal((4, 256), np.float32)
            pairs = rng.integers(0, 4, 6).astype(np.int32)
            chosen = rng.choice(held, 6).astype(np.int32)
            expected = whole.experts(0, rows, pairs, chosen)
            assert bank.experts(0, rows, pairs, chosen).tobytes() == expected.tobytes()
            assert bytes(bank.slab(0, held[0], "ffn_down_exps")) == layer.slabs(held[0])["ffn_down_exps"]
    for expert in held:
        bank.remove(0, expert)
    assert bank.used_bytes == 0
    assert bank.holdings == {}
    bank.close()
    whole.close()


def check_rows(bank: ExpertBank, whole: ExpertBank, layer: int) -> None:
    """What is held in a layer comes out as in a bank that was never compacted."""
    held = np.array(sorted(bank.holdings[layer]), np.int32)
    rows = np.random.default_rng(3).standard_normal((held.size, 256), np.float32)
    pairs = np.arange(held.size, dtype=np.int32)
    expected = whole.experts(layer, rows, pairs, held)
    assert bank.experts(layer, rows, pairs, held).tobytes() == expected.tobytes()
    one = bank.moe(layer, rows[:1], held[None, :1], np.ones((1, 1), np.float32))
    assert one.tobytes() == expected[:1].tobytes()


def test_free_slots_are_given_back(device: Device) -> None:
    """The experts stay computable at every step, and the budget holds while they are moved."""
    layers = [random_layer((ggml.Q4_K, ggml.Q6_K), layer=number) for number in range(3)]
    whole = ExpertBank(device)
    size = layers[0].layout.expert_bytes
    bank = ExpertBank(device, budget_bytes=24 * size, config=SEGMENTS)
    for number, layer in enumerate(layers):
        whole.bind(layer.layout, range(8), layer.stacked)
        bank.reserve(layer.layout, 8)
        for expert in range(8):
            bank.add(layer.layout, expert, layer.slabs(expert))
        check_rows(bank, whole, number)
    gone = [(0, 1), (0, 2), (0, 3), (0, 6), (1, 0), (1, 7), (2, 4), (2, 5), (2, 6)]
    for number, expert in gone:
        bank.remove(number, expert)
    assert (bank.used_bytes, bank.free_bytes) == (24 * size, 9 * size)
    holdings, n_steps = bank.holdings, 0
    while bank.compact(15 * size):
        n_steps += 1
        assert bank.used_bytes <= 24 * size
        assert bank.holdings == holdings
        for number in range(3):
            check_rows(bank, whole, number)
    assert (bank.used_bytes, bank.free_bytes) == (15 * size, 0)
    assert n_steps <= 15, "each expert is copied once at most"
    assert not bank.compact(0), "nothing is left to give back"
    for number in range(3):
        for expert in bank.holdings[number]:
            slabs = layers[number].slabs(expert)
            assert {kind: bytes(bank.slab(number, expert, kind)) for kind in slabs} == slabs
    bank.close()
    whole.close()


def test_compacting_stops_where_it_is_told_to_and_where_the_budget_has_no_room(device: Device) -> None:
    layer = random_layer()
    size = layer.layout.expert_bytes
    bank = ExpertBank(device, budget_bytes=10 * size, config=SEGMENTS)
    bank.reserve(layer.layout, 8)
    for expert in range(8):
        bank.add(layer.layout, expert, layer.slabs(expert))
    for expert in range(4):
        bank.remove(0, expert)
        assert not bank.compact(8 * size), "it is within that"
    bank.reserve(layer.layout, 6)
    assert bank.used_bytes == 10 * size, "beside 4 experts"
    assert bank.compact(9 * size), "what was reserved is free, and goes"
    assert not bank.compact(9 * size)
    assert (bank.used_bytes, bank.free_bytes) == (8 * size, 4 * size)
    assert not bank.compact(7 * size), "4 copies beside 8 slots are more than the budget"
    assert (bank.used_bytes, bank.free_bytes) == (8 * size, 4 * size)
    for expert in (4, 5):
        bank.remove(0, expert)
    while bank.compact(7 * size):
        assert bank.used_bytes <= 10 * size
    assert (bank.used_bytes, bank.free_bytes) == (2 * size, 0)
    bank.close()


def test_holdings_are_snapshots(device: Device) -> None:
    layer = random_layer()
    bank = ExpertBank(device)
    bank.add(layer.layout, 2, layer.slabs(2))
    before = bank.holdings
    bank.add(layer.layout, 4, layer.slabs(4))
    assert before == {0: {2}}
    assert bank.holdings == {0: {2, 4}}
    bank.close()


def test_a_pair_named_twice_is_computed_twice(device: Device) -> None:
    """Case 25, in all forms."""
    layer = random_layer()
    bank = layer.bound(device)
    row = np.random.default_rng(1).standard_normal((1, 256), np.float32)
    twice = np.array([3, 3], np.int32)
    zeros = np.zeros(2, np.int32)
    y = bank.experts(0, row, zeros, twice)
    assert y[0].tobytes() == y[1].tobytes()
    weights = np.array([0.25, 0.5], np.float32)
    expected = np.float32(0.25) * y[0] + np.float32(0.5) * y[0]
    assert bank.partial(0, row, zeros, twice, weights)[0].tobytes() == expected.tobytes()
    assert bank.moe(0, row, twice[None], weights[None])[0].tobytes() == expected.tobytes()
    bank.close()


def test_rows_without_a_pair_are_zero_and_no_pairs_is_fine(device: Device) -> None:
    layer = random_layer()
    bank = layer.bound(device)
    rows = np.ones((3, 256), np.float32)
    none = np.zeros(0, np.int32)
    assert bank.experts(0, rows, none, none).shape == (0, 256)
    assert not bank.partial(0, rows, none, none, np.zeros(0, np.float32)).any()
    one = bank.partial(0, rows, np.array([1], np.int32), np.array([2], np.int32), np.ones(1, np.float32))
    assert one[1].any()
    assert not one[[0, 2]].any()
    assert bank.moe(0, rows[:0], np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)).shape == (0, 256)
    bank.close()


def test_infinite_and_nan_rows_spoil_only_themselves(device: Device) -> None:
    layer = random_layer((ggml.Q4_K, ggml.Q6_K))
    bank = layer.bound(device)
    rows = np.random.default_rng(2).standard_normal((4, 256), np.float32)
    pairs, chosen = np.arange(4, dtype=np.int32), np.array([1, 1, 1, 2], np.int32)
    good = bank.experts(0, rows, pairs, chosen)
    rows[1] = np.nan
    rows[2, 7] = np.inf
    spoiled = bank.experts(0, rows, pairs, chosen)
    assert spoiled[[0, 3]].tobytes() == good[[0, 3]].tobytes()
    bank.close()


ROWS = np.ones((2, 256), np.float32)
ROW_0, EXPERT_1, WEIGHT = np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("rows", "pair_row", "pair_expert"),
    [
        (ROWS.astype(np.float64), ROW_0, EXPERT_1),
        (ROWS[:, :255], ROW_0, EXPERT_1),
        (ROWS[0], ROW_0, EXPERT_1),
        (ROWS, ROW_0.astype(np.int64), EXPERT_1),
        (ROWS, ROW_0, EXPERT_1.astype(np.uint16)),
        (ROWS, ROW_0[None], EXPERT_1[None]),
        (ROWS, ROW_0, np.ones(2, np.int32)),
        (ROWS, np.array([2], np.int32), EXPERT_1),
        (ROWS, np.array([10**6], np.int32), EXPERT_1),
        (ROWS, np.array([-1], np.int32), EXPERT_1),
        (ROWS, ROW_0, np.array([-1], np.int32)),
        (ROWS, ROW_0, np.array([8], np.int32)),
        (ROWS, ROW_0, np.array([2**30], np.int32)),
        (ROWS[:0], ROW_0, EXPERT_1),
    ],
)
def test_bad_pairs_are_refused_before_ggml(
    device: Device,
    rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    pair_row: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    pair_expert: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
) -> None:
    """Cases 5 and 26: ggml would abort the process or read outside its tensors."""
    bank = random_layer().bound(device)
    with pytest.raises(UsageError):
        bank.experts(0, rows, pair_row, pair_expert)
    with pytest.raises(UsageError):
        bank.partial(0, rows, pair_row, pair_expert, np.ones(pair_row.shape, np.float32))
    assert bank.experts(0, ROWS, ROW_0, EXPERT_1).any()
    bank.close()


def test_other_bad_calls_are_refused(device: Device) -> None:
    layer = random_layer()
    bank = layer.bound(device)
    with pytest.raises(UsageError, match="layer 3"):
        bank.experts(3, ROWS, ROW_0, EXPERT_1)
    with pytest.raises(UsageError, match="pair_weight"):
        bank.partial(0, ROWS, ROW_0, EXPERT_1, WEIGHT.astype(np.float64))
    with pytest.raises(UsageError, match="ids"):
        bank.moe(0, ROWS, np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
    with pytest.raises(UsageError, match="weights"):
        bank.moe(0, ROWS, np.zeros((2, 2), np.int32), np.zeros((2, 3), np.float32))
    with pytest.raises(UsageError, match=r"experts 0\.\.7"):
        bank.moe(0, ROWS, np.full((2, 2), 8, np.int32), np.zeros((2, 2), np.float32))
    with pytest.raises(UsageError):
        bank.remove(0, 9)
    with pytest.raises(UsageError):
        bank.limit_rows(0)
    with pytest.raises(UsageError, match="no ffn_norm"):
        bank.slab(0, 0, "ffn_norm")
    bank.close()


def test_bad_slabs_and_layouts_are_refused(device: Device) -> None:
    layer = random_layer((ggml.Q4_K, ggml.Q6_K))
    layout, slabs = layer.layout, layer.slabs(0)
    bank = ExpertBank(device)
    short = {**slabs, "ffn_up_exps": slabs["ffn_up_exps"][:-1]}
    with pytest.raises(UsageError, match="ffn_up_exps"):
        bank.add(layout, 0, short)
    with pytest.raises(UsageError, match="not"):
        bank.add(layout, 0, {"ffn_up_exps": slabs["ffn_up_exps"]})
    for expert in (-1, 8):
        with pytest.raises(UsageError, match=r"experts 0\.\.7"):
            bank.add(layout, expert, slabs)
    bank.add(layout, 0, slabs)
    with pytest.raises(UsageError, match="held already"):
        bank.add(layout, 0, slabs)
    other = random_layer((ggml.Q8_0, ggml.Q8_0))
    with pytest.raises(UsageError, match="another layout"):
        bank.add(other.layout, 1, other.slabs(1))
    assert bank.holdings == {0: {0}}
    bank.close()


def test_a_closed_device_is_refused() -> None:
    layer = random_layer()
    opened = open_device("CPU", n_threads=1)
    bank = layer.bound(opened)
    bank.experts(0, ROWS, ROW_0, EXPERT_1)
    opened.close()
    with pytest.raises(DeviceError, match="closed"):
        bank.experts(0, ROWS, ROW_0, EXPERT_1)
    bank.close()
