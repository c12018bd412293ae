"""One step of everybody or several in turns: whichever gives more tokens a second, found by trying both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarmnode.config import EngineConfig
from swarmnode.schedule.step_pace import StepPace

N = 12
SUGGESTED = 3
Took = Callable[[int], float]
"""Seconds of a round (a token of every sequence) in so many steps."""


def shared(n_steps: int) -> float:
    """Workers on the backbone's own cores: each step reads its experts again."""
    return 0.3 + 0.1 * n_steps


def far_away(n_steps: int) -> float:
    """A link's delay is what is waited for."""
    return 0.1 + 1.2 / n_steps


def same(n_steps: int) -> float:
    return 0.4


class Engine:
    """Runs rounds as a pace has them."""

    def __init__(self, took: Took, n: int = N) -> None:
        self.pace = StepPace(EngineConfig())
        self.took = took
        self.n = n
        self.now_s = 0.0

    def rounds(self, count: int, suggested: int = SUGGESTED) -> list[int]:
        """The numbers of steps that these rounds had."""
        counts: list[int] = []
        for _ in range(count):
            n_steps = self.pace.n_steps(suggested)
            counts.append(n_steps)
            for _ in range(n_steps):
                self.now_s += self.took(n_steps) / n_steps
                self.pace.ended(self.n // n_steps, self.n, suggested, self.now_s)
        return counts


def test_several_are_kept_where_they_are_faster() -> None:
    engine = Engine(far_away)
    counts = engine.rounds(2000)
    assert counts[-1] == SUGGESTED
    assert 1 in counts, "it was tried"
    lost_s = engine.now_s - 2000 * far_away(SUGGESTED)
    assert lost_s < 0.025 * engine.now_s + 2 * 5 * far_away(1), "2 % and the first trial"


def test_one_is_kept_where_it_is_faster() -> None:
    engine = Engine(shared)
    counts = engine.rounds(2000)
    assert counts[0] == SUGGESTED, "what times suggest comes first"
    assert counts[20] == counts[-1] == 1
    lost_s = engine.now_s - 2000 * shared(1)
    assert lost_s < 0.025 * engine.now_s + 10 * shared(SUGGESTED)


def test_what_makes_no_difference_stays_as_suggested() -> None:
    counts = Engine(same).rounds(100)
    assert counts[-1] == SUGGESTED


@pytest.mark.parametrize(("before", "after", "kept"), [(shared, far_away, SUGGESTED), (far_away, shared, 1)])
def test_a_change_is_followed(before: Took, after: Took, kept: int) -> None:
    engine = Engine(before)
    engine.rounds(200)
    engine.took = after
    engine.rounds(2000)
    assert engine.rounds(1) == [kept]


def test_without_waits_there_is_one_and_nothing_is_tried() -> None:
    engine = Engine(shared)
    assert set(engine.rounds(100, suggested=1)) == {1}
    assert engine.rounds(1) == [SUGGESTED], "and nothing was learned from it"
    assert engine.pace._rates == {}


def test_another_number_of_sequences_is_another_question() -> None:
    engine = Engine(shared)
    engine.rounds(100)
    engine.n = 15
    engine.rounds(1)
    assert engine.rounds(1) == [1], "a few more are not"
    engine.n = 30
    engine.rounds(1)
    assert engine.rounds(1) == [SUGGESTED]


def test_prompts_between_end_a_trial() -> None:
    engine = Engine(far_away)
    while engine.rounds(1) == [SUGGESTED]:
        pass
    engine.pace.interrupted(engine.now_s)
    assert engine.rounds(1) == [SUGGESTED]
    for _ in range(100):
        engine.rounds(2)
        engine.pace.interrupted(engine.now_s)
    assert engine.pace.n_steps(SUGGESTED) == SUGGESTED


@pytest.mark.parametrize("every", range(4, 16))
def test_trials_that_prompts_end_are_paid_for_too(every: int) -> None:
    engine = Engine(far_away)
    for _ in range(3000 // every):
        engine.rounds(every)
        engine.pace.interrupted(engine.now_s)
    lost_s = engine.now_s - 3000 // every * every * far_away(SUGGESTED)
    assert lost_s < 0.03 * engine.now_s + 2 * 5 * far_away(1)


@pytest.mark.parametrize("every", range(5, 16))
def test_between_prompts_it_is_found_what_is_faster(every: int) -> None:
    engine = Engine(shared)
    for _ in range(3000 // every):
        engine.rounds(every)
        engine.pace.interrupted(engine.now_s)
    assert engine.rounds(1) == [1]


def test_a_suggestion_that_comes_and_goes_does_not_start_all_over() -> None:
    engine = Engine(shared)
    engine.rounds(100)
    for _ in range(100):
        engine.rounds(3, suggested=1)
        assert engine.rounds(1) == [1]


def test_time_that_stands_still_says_nothing() -> None:
    engine = Engine(lambda n_steps: 0.0)
    assert set(engine.rounds(100)) == {SUGGESTED}
