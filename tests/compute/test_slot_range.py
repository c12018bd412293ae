"""A bank's experts on the CPU: one tensor, one graph, and memory for those that are held only."""

from __future__ import annotations

import gc
import mmap
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.compute import ggml, slot_range
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.graph import Graph
from swarmnode.compute.self_test import check_expert
from swarmnode.compute.slot_range import SlotRange, can_reserve
from swarmnode.config import ComputeConfig
from swarmnode.errors import BudgetError, DeviceError
from tests.compute.layers import RandomLayer, random_layer

PAGE = mmap.PAGESIZE
PAGEMAP = Path("/proc/self/pagemap")
STATM = Path("/proc/self/statm")

TINY = [random_layer((ggml.Q8_0, ggml.Q8_0), n_embd=32, n_ff=32, layer=number) for number in range(2)]
"""Several slots share a page."""
SMALL = [random_layer((ggml.Q4_K, ggml.Q6_K), layer=number) for number in range(2)]
"""Slabs of 9 pages, and of 13 and an eighth."""


def ranges_of(bank: ExpertBank) -> list[SlotRange]:
    return [found for ranges in bank._pool._ranges.values() for found in ranges]


def check_pages(bank: ExpertBank) -> None:
    """There are the pages in which a taken slot has a part, and no other, where the kernel says so."""
    for found in ranges_of(bank):
        taken = set(range(found.capacity)) - set(found.free)
        for tensor, n_bytes in zip(found.tensors, found.slab_bytes, strict=True):
            expected: set[int] = set()
            for slot in taken:
                expected.update(range(slot * n_bytes // PAGE, -(-(slot + 1) * n_bytes // PAGE)))
            if PAGEMAP.exists():
                assert pages_in_memory(tensor.address, tensor.n_bytes) == expected


def pages_in_memory(address: int, n_bytes: int) -> set[int]:
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(address // PAGE * 8)
        entries = np.frombuffer(file.read(-(-n_bytes // PAGE) * 8), np.uint64)
    return set(np.flatnonzero(entries >> np.uint64(63)).tolist())


def add(bank: ExpertBank, layer: RandomLayer, *experts: int) -> None:
    for expert in experts:
        bank.add(layer.layout, expert, layer.slabs(expert))


def bank_of(device: Device, layer: RandomLayer, n_experts: int, slots_per_range: int = 1024) -> ExpertBank:
    budget_bytes = n_experts * layer.layout.expert_bytes
    return ExpertBank(
        device, budget_bytes=budget_bytes, config=ComputeConfig(slots_per_range=slots_per_range)
    )


def check_results(bank: ExpertBank, whole: ExpertBank) -> None:
    """What is held comes out as in a bank that has everything bound, in all forms."""
    for layer, experts in bank.holdings.items():
        held = np.array(sorted(experts), np.int32)
        n_embd = bank.layout(layer).n_embd
        rows = np.random.default_rng(held.size).standard_normal((held.size, n_embd), np.float32)
        pairs, weights = np.arange(held.size, dtype=np.int32), np.full(held.size, 0.5, np.float32)
        assert (
            bank.experts(layer, rows, pairs, held).tobytes()
            == whole.experts(layer, rows, pairs, held).tobytes()
        )
        zeros = np.zeros_like(pairs)
        assert (
            bank.partial(layer, rows, zeros, held, weights).tobytes()
            == whole.partial(layer, rows, zeros, held, weights).tobytes()
        )


@pytest.fixture(scope="module")
def wholes(device: Device) -> Iterator[dict[int, ExpertBank]]:
    """By n_embd: everything bound."""
    made: dict[int, ExpertBank] = {}
    for layers in (TINY, SMALL):
        bank = made[layers[0].layout.n_embd] = ExpertBank(device)
        for layer in layers:
            bank.bind(layer.layout, range(8), layer.stacked)
    yield made
    for bank in made.values():
        bank.close()


@pytest.fixture
def n_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the graphs that are computed."""
    counted = [0]
    compute = Graph.compute

    def counting(self: Graph) -> None:
        counted[0] += 1
        compute(self)

    monkeypatch.setattr(Graph, "compute", counting)
    return counted


@pytest.mark.parametrize(("slots_per_range", "is_one"), [(1024, True), (0, False)])
def test_any_pairs_of_a_layer_are_one_graph(
    device: Device, wholes: dict[int, ExpertBank], n_graphs: list[int], slots_per_range: int, is_one: bool
) -> None:
    """However its experts came, others between them, and came and went. In segments they are not."""
    bank = bank_of(device, SMALL[0], 13, slots_per_range)
    for expert in (6, 1, 7, 3, 0):
        add(bank, SMALL[0], expert)
        add(bank, SMALL[1], (3 * expert + 1) % 8)
    for gone in (1, 0, 6):
        bank.remove(0, gone)
        add(bank, SMALL[1], min(set(range(8)) - bank.holdings[1]))
    add(bank, SMALL[0], 6, 5, 2)
    assert bank.holdings == {0: {2, 3, 5, 6, 7}, 1: set(range(8))}
    check_results(bank, wholes[256])
    row = np.ones((1, 256), np.float32)
    for layer, chosen in ((0, [7, 2, 6, 3, 5]), (1, [0, 7, 4, 2, 5]), (1, [1, 1, 6])):
        experts = np.array(chosen, np.int32)
        zeros, weights = np.zeros_like(experts), np.ones(experts.size, np.float32)
        n_graphs[0] = 0
        bank.partial(layer, row, zeros, experts, weights)
        assert (n_graphs[0] == 1) == is_one
    bank.close()


@pytest.mark.parametrize("layers", [TINY, SMALL], ids=["tiny", "small"])
def test_memory_is_there_for_what_is_held_only(device: Device, layers: list[RandomLayer]) -> None:
    layer = layers[0]
    size = layer.layout.expert_bytes
    bank = bank_of(device, layer, 100)
    bank.reserve(layer.layout, 100)
    assert (bank.used_bytes, bank.free_bytes) == (0, 0)
    for expert in range(8):
        add(bank, layer, expert)
        add(bank, layers[1], expert)
        assert (bank.used_bytes, bank.free_bytes) == ((2 * expert + 2) * size, 0)
        check_pages(bank)
    for expert in (3, 0, 4, 7, 1):
        bank.remove(0, expert)
        check_pages(bank)
        assert not bank.compact(0), "nothing is left to give back"
    assert (bank.used_bytes, bank.free_bytes) == (11 * size, 0)
    add(bank, layer, 7)
    check_pages(bank)
    for number in range(2):
        for expert in bank.holdings[number]:
            slabs = layers[number].slabs(expert)
            assert {kind: bytes(bank.slab(number, expert, kind)) for kind in slabs} == slabs
            bank.remove(number, expert)
    assert bank.used_bytes == 0
    check_pages(bank)
    (only,) = ranges_of(bank)
    assert len(only.free) == only.capacity == 100
    bank.close()


def test_slots_without_an_expert_are_not_read(device: Device, wholes: dict[int, ExpertBank]) -> None:
    """A page that is only read is there as well, of zeros."""
    bank = bank_of(device, SMALL[0], 40)
    add(bank, SMALL[1], *range(8))
    for gone in (0, 2, 5):
        bank.remove(1, gone)
    add(bank, SMALL[0], 4)
    check_results(bank, wholes[256])
    assert check_expert(bank, 0, 4, widths=(1, 9)).passed
    assert bank.stacked(1, 1) is None
    bank.moe(
        1, np.ones((2, 256), np.float32), np.array([[1, 3], [6, 7]], np.int32), np.ones((2, 2), np.float32)
    )
    check_pages(bank)
    bank.close()


def test_the_process_becomes_smaller(device: Device) -> None:
    layer = random_layer(n_embd=1024, n_ff=256, n_expert=16)
    bank = bank_of(device, layer, 16)
    before = resident()
    add(bank, layer, *range(16))
    full = resident()
    for expert in range(0, 16, 2):
        bank.remove(0, expert)
    half = resident()
    if STATM.exists():
        size = layer.layout.expert_bytes
        assert full - before > 15 * size
        assert full - half > 7 * size
    bank.close()


def resident() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * PAGE if STATM.exists() else 0


def test_an_expert_that_does_not_fit_changes_nothing(device: Device) -> None:
    size = SMALL[0].layout.expert_bytes
    other = random_layer((ggml.Q8_0, ggml.Q8_0), layer=2)
    bank = bank_of(device, SMALL[0], 3)
    add(bank, SMALL[0], 1, 2, 3)
    for refused in (SMALL[0], SMALL[1], other):
        with pytest.raises(BudgetError, match="budget"):
            add(bank, refused, 0)
    assert bank.holdings == {0: {1, 2, 3}}
    assert bank.used_bytes == 3 * size
    bank.remove(0, 2)
    add(bank, SMALL[1], 0)
    check_pages(bank)
    bank.close()


def test_further_ranges_follow_and_a_layer_stays_in_the_one_it_is_in(
    device: Device, wholes: dict[int, ExpertBank]
) -> None:
    bank = bank_of(device, SMALL[0], 8, slots_per_range=3)
    add(bank, SMALL[0], 0, 1, 2)
    add(bank, SMALL[1], 0, 1)
    bank.remove(0, 1)
    add(bank, SMALL[1], 2)
    assert [set(found.free) for found in ranges_of(bank)] == [{1}, set()]
    add(bank, SMALL[1], 3, 4, 5)
    assert [found.capacity for found in ranges_of(bank)] == [3, 3, 2], "as many as the budget could pay for"
    with pytest.raises(BudgetError):
        add(bank, SMALL[1], 6)
    check_results(bank, wholes[256])
    check_pages(bank)
    bank.close()


@pytest.mark.parametrize("n_good", [0, 1, 3, 5])
def test_without_address_space_there_are_segments(
    device: Device, wholes: dict[int, ExpertBank], n_good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever reservation fails: of a range's first tensor or a later one, of the first range or a further one."""
    reserved, left = slot_range._reserved, [n_good]

    def failing(n_bytes: int) -> mmap.mmap:
        if not left[0]:
            raise OSError(12, "Cannot allocate memory")
        left[0] -= 1
        return reserved(n_bytes)

    monkeypatch.setattr(slot_range, "_reserved", failing)
    size = SMALL[0].layout.expert_bytes
    bank = bank_of(device, SMALL[0], 10, slots_per_range=3)
    add(bank, SMALL[0], *range(8))
    add(bank, SMALL[1], 5)
    assert len(ranges_of(bank)) == n_good // 3
    bank.reserve(SMALL[0].layout, 1)
    assert bank.used_bytes == 10 * size - (0 if bank.free_bytes else size)
    add(bank, SMALL[1], 6)
    assert (bank.used_bytes, bank.free_bytes) == (10 * size, 0)
    with pytest.raises(BudgetError, match="budget"):
        add(bank, SMALL[1], 7)
    for gone in (0, 3, 4, 5, 7):
        bank.remove(0, gone)
        check_results(bank, wholes[256])
    while bank.compact(5 * size):
        check_results(bank, wholes[256])
    assert (bank.used_bytes, bank.free_bytes) == (5 * size, 0)
    check_pages(bank)
    bank.close()


def test_where_address_space_is_bounded_nothing_is_reserved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slot_range, "LIMITS", ())
    monkeypatch.setattr(slot_range, "OVERCOMMIT", tmp_path / "overcommit_memory")
    assert can_reserve(), "no such file: not Linux"
    for mode, is_good in (("0\n", True), ("1\n", True), ("2\n", False)):
        slot_range.OVERCOMMIT.write_text(mode)
        assert can_reserve() == is_good
    slot_range.OVERCOMMIT.unlink()
    for limit, is_good in ((resource.RLIM_INFINITY, True), (1 << 40, False)):
        with monkeypatch.context() as patch:
            patch.setattr(slot_range, "LIMITS", (resource.RLIMIT_AS,))
            patch.setattr(resource, "getrlimit", lambda which, soft=limit: (soft, soft))
            assert can_reserve() == is_good
    monkeypatch.setattr(slot_range, "_GIVE_BACK", None)
    assert not can_reserve()


def test_more_than_there_are_addresses_is_an_error(device: Device) -> None:
    layout = random_layer(n_expert=1).layout
    with pytest.raises(DeviceError, match="address space"):
        SlotRange(layout, 1 << 32)


def test_memory_is_there_as_long_as_its_tensors_are(device: Device) -> None:
    """A graph that somebody still has must not run into what is gone, nor keep it for ever."""
    found = SlotRange(SMALL[0].layout, 4)
    maps = [weakref.ref(pages) for pages in found._maps]
    found.write(found.free.pop(), SMALL[0].slabs(0))
    tensors = found.tensors
    del found
    gc.collect()
    assert all(pages() is not None for pages in maps)
    assert all(tensor.address for tensor in tensors)
    tensors.clear()
    gc.collect()
    assert all(pages() is None for pages in maps)


@settings(max_examples=40, deadline=None)
@given(
    layers=st.sampled_from([TINY, SMALL]),
    slots_per_range=st.sampled_from([1, 3, 5, 1024]),
    n_experts=st.integers(1, 12),
    steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=40),
)
def test_experts_come_and_go_in_any_order(
    device: Device,
    wholes: dict[int, ExpertBank],
    layers: list[RandomLayer],
    slots_per_range: int,
    n_experts: int,
    steps: list[tuple[int, int]],
) -> None:
    """Named once it comes, named again it goes; who finds the budget full is refused."""
    bank = bank_of(device, layers[0], n_experts, slots_per_range)
    held: set[tuple[int, int]] = set()
    for layer, expert in steps:
        if (layer, expert) in held:
            bank.remove(layer, expert)
            held.remove((layer, expert))
        elif len(held) < n_experts:
            add(bank, layers[layer], expert)
            held.add((layer, expert))
        else:
            with pytest.raises(BudgetError):
                add(bank, layers[layer], expert)
        assert {(n, e) for n, experts in bank.holdings.items() for e in experts} == held
        assert bank.used_bytes == len(held) * layers[0].layout.expert_bytes
    check_results(bank, wholes[layers[0].layout.n_embd])
    check_pages(bank)
    bank.close()


def test_memory_that_cannot_be_given_back_is_kept_and_used_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all memory of the process is locked."""
    monkeypatch.setattr(slot_range, "_GIVE_BACK", 10**6)  # no such advice: the system refuses it
    layer = SMALL[0]
    bank = bank_of(device, layer, 4)
    for _ in range(2):
        add(bank, layer, 1)
        assert bank.used_bytes == layer.layout.expert_bytes
        bank.remove(layer.layout.layer, 1)
        assert bank.used_bytes == 0
    bank.close()
