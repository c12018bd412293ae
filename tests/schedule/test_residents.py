"""What is kept in memory: within the budget, the most wanted, and not moved for little."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.schedule.residents import Residents

N_EXPERT = 16
SIZE = 100


def counted(residents: Residents, layer: int, *experts: int, times: int = 1) -> None:
    for _ in range(times):
        residents.count(layer, np.array([experts], np.int32))


def placed(residents: Residents) -> set[tuple[int, int]]:
    placing = residents.place()
    assert placing is not None
    residents.publish(placing)
    return held(residents)


def held(residents: Residents) -> set[tuple[int, int]]:
    return {
        (layer, expert) for layer, mask in residents.masks.items() for expert in np.flatnonzero(mask).tolist()
    }


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    budget=st.integers(0, 10_000),
    chosen=st.lists(st.tuples(st.integers(0, 3), st.integers(0, N_EXPERT - 1)), max_size=80),
)
def test_never_over_budget_and_changes_are_told(
    sizes: list[int], budget: int, chosen: list[tuple[int, int]]
) -> None:
    residents = Residents(dict(enumerate(sizes)), N_EXPERT, budget)
    before: set[tuple[int, int]] = set()
    for start in range(0, len(chosen) + 1, 20):
        for layer, expert in chosen[start : start + 20]:
            counted(residents, layer, expert)
        placing = residents.place()
        assert placing is not None
        assert held(residents) == before, "nothing counts before it is published"
        residents.publish(placing)
        after = held(residents)
        assert sum(sizes[layer] for layer, _ in after) <= budget
        assert set(placing.enter) == after - before
        assert set(placing.leave) == before - after
        assert after <= {(layer, expert) for layer, expert in chosen}
        assert all(0 <= share <= 1 for share in residents.cold_share.values())
        before = after


def test_the_hottest_are_kept_whatever_their_layer() -> None:
    residents = Residents({0: SIZE, 3: SIZE}, N_EXPERT, 3 * SIZE)
    counted(residents, 0, 1, 2, times=5)
    counted(residents, 3, 7, times=9)
    counted(residents, 3, 8, times=2)
    assert placed(residents) == {(0, 1), (0, 2), (3, 7)}
    assert residents.cold_share[0] == 0
    assert 0 < residents.cold_share[3] < 0.5


def test_a_large_expert_has_to_be_wanted_more() -> None:
    residents = Residents({0: SIZE, 1: 4 * SIZE}, N_EXPERT, 4 * SIZE)
    counted(residents, 1, 0, times=3)
    counted(residents, 0, 0, 1, 2, 3, times=1)
    assert placed(residents) == {(0, 0), (0, 1), (0, 2), (0, 3)}


def test_the_next_prompt_takes_over_and_a_little_more_does_not() -> None:
    residents = Residents({0: SIZE}, N_EXPERT, SIZE)
    counted(residents, 0, 1, times=10)
    assert placed(residents) == {(0, 1)}
    counted(residents, 0, 2, times=6)
    assert placed(residents) == {(0, 1)}, "6 against 5 that are left is not worth a move"
    counted(residents, 0, 2, times=20)
    assert placed(residents) == {(0, 2)}


def test_without_a_budget_what_was_computed_is_in_memory() -> None:
    residents = Residents({0: SIZE}, N_EXPERT, None)
    assert residents.place() is None
    some = np.array([1, 2, 2, 5], np.int32)
    assert residents.n_cold(0, some) == 3
    residents.computed(0, some)
    assert residents.n_cold(0, some) == 0
    assert residents.n_cold(0, np.array([5, 6], np.int32)) == 1
    residents.computed(0, np.arange(N_EXPERT, dtype=np.int32))
    assert residents.cold_share[0] == 0


def test_with_a_budget_computing_changes_nothing() -> None:
    residents = Residents({0: SIZE}, N_EXPERT, SIZE)
    residents.computed(0, np.array([1], np.int32))
    assert not held(residents)


def test_masks_are_frozen() -> None:
    residents = Residents({0: SIZE}, N_EXPERT, SIZE)
    before = residents.masks[0]
    counted(residents, 0, 1)
    placed(residents)
    assert not before.any()
    assert not residents.masks[0].flags.writeable
