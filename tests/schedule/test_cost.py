"""What is learned from times: it follows changes, forgets bad luck, and guesses sensibly before."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import DispatchConfig
from swarmnode.schedule.cost import CostModel, Estimate, LocalCost, WorkerCost

CONFIG = DispatchConfig()
EXPERT_BYTES = 6_000_000
seconds = st.floats(1e-5, 10.0)


def local(n: int = 20, n_pairs: int = 8, each_s: float = 1e-4) -> LocalCost:
    cost = LocalCost(CONFIG, EXPERT_BYTES)
    for number in range(n):
        cost.add(n_pairs, 0, n_pairs * each_s, number)
    return cost


def worker(times: list[float], n_pairs: int = 4) -> WorkerCost:
    cost = WorkerCost(CONFIG)
    for number, value in enumerate(times):
        cost.add(n_pairs, value, number)
    return cost


@given(st.lists(seconds, min_size=1, max_size=60))
def test_an_estimate_stays_within_its_samples(values: list[float]) -> None:
    estimate = Estimate(values[0], 0.0, 0.0)
    for number, value in enumerate(values[1:], 1):
        estimate = estimate.with_sample(value, number, 0.1)
    assert min(values) * 0.999 <= estimate.mean <= max(values) * 1.001
    assert estimate.deviation >= 0
    assert estimate.n == len(values)


@pytest.mark.parametrize(("before", "after"), [(0.003, 0.04), (0.04, 0.003)])
def test_a_change_is_followed(before: float, after: float) -> None:
    cost = worker([before] * 50 + [after] * 60)
    assert cost.expect(4, 109) == pytest.approx(after, rel=0.1)


def test_one_hiccup_is_not_a_change() -> None:
    assert worker([0.003] * 50 + [0.4] + [0.003] * 3).expect(4, 54) < 0.0035


@given(st.integers(1, 4096), st.integers(1, 4096), seconds)
def test_sizes_never_seen_are_derived_from_those_that_were(known: int, asked: int, took_s: float) -> None:
    cost = worker([took_s] * 3, known)
    expected = cost.expect(asked, 3)
    assert expected >= took_s * 0.999
    assert expected <= took_s + (1 + asked) * CONFIG.pair_s


def test_before_anything_is_known_a_ping_counts() -> None:
    cost = WorkerCost(CONFIG)
    cost.rtt_s = 0.04
    assert not cost.is_known
    assert cost.expect(4, 0.0) == pytest.approx(0.04 + 4 * CONFIG.pair_s)
    assert cost.late_after_s(4, 0.0, 0.01) == pytest.approx(3 * 0.04 + 0.01)
    assert WorkerCost(CONFIG).late_after_s(4, 0.0, 0.01) is None, "not even a ping"


def test_a_probe_tells_what_to_expect_and_makes_up_for_no_work() -> None:
    cost = WorkerCost(CONFIG)
    cost.unanswered = 0.5
    cost.probed(0.06, 1.0)
    assert cost.is_known
    assert cost.expect(1, 1.0) == pytest.approx(0.06)
    assert 0.06 < cost.expect(8, 1.0) < 0.07, "and nearly the same of a few more"
    assert cost.late_after_s(8, 1.0, 0.016) == pytest.approx(3 * 0.06 + 0.016)
    assert cost.unanswered == 0.5


def test_what_was_slow_and_is_not_asked_is_believed_to_be_faster_later() -> None:
    cost = worker([0.003] * 20 + [0.2] * 60)
    slow_s = cost.expect(4, 80)
    assert cost.expect(4, 80 + CONFIG.estimate_half_life_s) < 0.6 * slow_s
    assert cost.expect(4, 80 + 100 * CONFIG.estimate_half_life_s) < 0.01


def test_a_change_for_the_better_is_followed_after_a_few_answers() -> None:
    cost = worker([0.04 + 0.001 * (number % 3) for number in range(50)])
    for number in range(4):
        cost.add(4, 0.003, 50 + number)
    assert cost.expect(4, 54) < 0.014, "27 ms if it counted as any other"


def test_what_was_believed_meanwhile_is_not_forgotten_with_an_answer_that_confirms_it() -> None:
    """And one that does not confirm it counts against what was there before: not asked again and again."""
    later_s = 20 + 2 * CONFIG.estimate_half_life_s
    for took_s in (0.003, 0.2):
        cost = worker([0.003] + [0.2] * 20)
        believed_s = cost.expect(4, later_s)
        cost.add(4, took_s, later_s)
        assert (cost.expect(4, later_s) <= believed_s) is (took_s == 0.003)
        if took_s == 0.2:
            assert cost.expect(4, later_s) > 0.15


@pytest.mark.parametrize("n_pairs", [1, 2, 8, 16])
def test_one_size_tells_of_a_change_of_the_others(n_pairs: int) -> None:
    cost = WorkerCost(CONFIG)
    for number in range(20):
        for size in (1, 2, 4, 8, 16):
            cost.add(size, 0.04, number)
    for number in range(20):
        cost.add(4, 0.001, 21 + number)
    assert cost.expect(n_pairs, 41) < 0.006
    assert cost.expect(256, 41) > 0.02, "but not of one that is far away"


def test_late_is_behind_nearly_all_answers() -> None:
    times = [0.02 + 0.001 * (number % 5) for number in range(60)]
    after_s = worker(times).late_after_s(4, 59, 1.0)
    assert after_s is not None
    assert max(times) < after_s < 0.04
    assert worker([0.0001] * 20).late_after_s(4, 19, 1.0) == CONFIG.hedge_min_s
    few = worker([0.001] * (CONFIG.hedge_samples - 1)).late_after_s(4, 6, 1.0)
    assert few == pytest.approx(1.003), "and before that, what the slowest may take"
    assert worker([0.001] * 20).late_after_s(4096, 19, 8.0) == pytest.approx(8.003), "of such shares as well"


def test_what_is_late_fades_as_what_is_expected_does() -> None:
    """A worker that grows slower by a little each time, until it is not asked any more."""
    times = [0.02 * 1.02**number for number in range(150)]
    cost = WorkerCost(CONFIG)
    for number, took_s in enumerate(times):
        cost.add(4, took_s, 0.1 * number)
    at_s = 0.1 * len(times)
    slow_s, late_s = cost.expect(4, at_s), cost.late_after_s(4, at_s, 0.0)
    assert late_s is not None
    assert slow_s > 0.2
    assert late_s > 0.2
    later_s = at_s + 5 * CONFIG.estimate_half_life_s
    assert cost.expect(4, later_s) < 0.2 * slow_s
    faded_s = cost.late_after_s(4, later_s, 0.0)
    assert faded_s is not None
    assert faded_s < 0.2 * late_s


def test_requests_under_way_make_a_worker_look_slower() -> None:
    cost = worker([0.01] * 5)
    idle_s = cost.score_s(1, 5)
    cost.in_flight = 2
    assert cost.score_s(1, 5) == pytest.approx(3 * idle_s)


def test_a_share_that_was_given_up_counts_as_that_long_at_least() -> None:
    cost = worker([0.003] * 20)
    cost.gave_up(4, 0.05, 21, 0.5)
    assert cost.expect(4, 21) > 0.003
    assert cost.unanswered == pytest.approx(0.1)
    cost.gave_up(4, 0.001, 21, 0.5)
    assert cost.unanswered == pytest.approx(0.102)
    cost.refused(4, 0.1, 21)
    assert cost.unanswered == pytest.approx(0.102), "a refusal is no answer"
    cost.add(4, 0.003, 22)
    assert cost.unanswered == 0


def test_waits_are_compared_with_the_deadline_that_they_had() -> None:
    """A prompt's share is waited for as long as 30 s: half a second of that is no reason to leave a worker."""
    cost = worker([0.2] * 20, 512)
    cost.gave_up(512, 1.2, 21, 6.0)
    assert cost.unanswered == pytest.approx(0.2)


def test_cold_experts_cost_what_they_took_beyond_the_warm_ones() -> None:
    cost = local()
    assert cost.cold_s(20) == EXPERT_BYTES / CONFIG.disk_bytes_per_s, "a guess"
    for number in range(20):
        cost.add(8, 3, 8e-4 + 3 * 0.002, 20 + number)
    assert cost.expect(8, 3, 39) == pytest.approx(8e-4 + 3 * 0.002, rel=0.05)
    assert cost.expect(8, 0, 39) == pytest.approx(8e-4)
    assert cost.expect(0, 0, 39) == 0
    assert cost.cold_s(39 + CONFIG.estimate_half_life_s) < 0.6 * cost.cold_s(39)


def test_larger_calls_are_cheaper_by_pair_once_that_is_known() -> None:
    cost = local()
    assert cost.expect(1024, 0, 20) == pytest.approx(1024 * 1e-4)
    cost.add(1024, 0, 1024 * 1e-5, 20)
    assert cost.expect(1024, 0, 20) == pytest.approx(1024 * 1e-5)
    assert cost.expect(8, 0, 20) == pytest.approx(8e-4)


def test_nodes_are_remembered_and_only_so_many() -> None:
    cost = CostModel(CONFIG, EXPERT_BYTES, lambda: 0.0)
    first, second = cost.worker("first"), cost.worker("second")
    assert cost.worker("first") is first
    for number in range(CONFIG.max_known_workers - 1):
        cost.worker(number)
    assert cost.worker("first") is first, "somebody asks for it"
    assert cost.worker("second") is not second
    assert cost.cut_s == CONFIG.cut_s
    cost.add_cut(-1.0, 0.0)
    assert cost.cut_s == 0


def test_two_threads_may_ask_for_costs_of_more_workers_than_are_kept() -> None:
    cost = CostModel(replace(CONFIG, max_known_workers=2), EXPERT_BYTES, lambda: 0.0)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            for number in range(30_000):
                cost.worker(number % 7)
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
