"""Which sequences share a step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from swarmnode.config import EngineConfig
from swarmnode.schedule.batching import (
    StepLimits,
    StepTimes,
    Wanted,
    cut_step,
    may_begin,
    share_out,
    step_share,
)

CONFIG = EngineConfig()
PATIENCE = 8


def cut(wanted: Sequence[Wanted], max_rows: int = 512, mixed_rows: int = 64) -> list[int]:
    return cut_step(wanted, len(wanted), StepLimits(max_rows, mixed_rows, PATIENCE))


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([500], [500]),
        ([700], [512]),
        ([700, 100], [512, 0]),
        ([300, 300], [300, 212]),
        ([1, 700], [1, 64]),
        ([700, 1, 1], [64, 1, 1]),
        ([40, 1, 40], [40, 1, 24]),
        ([1] * 600, [1] * 512 + [0] * 88),
        ([10] + [1] * 511, [10] + [1] * 502 + [0] * 9),
        ([1] * 600 + [700], [1] * 448 + [0] * 152 + [64]),
    ],
)
def test_answers_get_a_token_and_prompts_a_share_beside_them(
    n_tokens: list[int], expected: list[int]
) -> None:
    assert cut([Wanted(n, may_be_cut=True) for n in n_tokens]) == expected


def test_what_must_not_be_cut_waits_for_room_or_runs_alone() -> None:
    whole = Wanted(100, may_be_cut=False)
    assert cut([Wanted(1, True), whole]) == [1, 0]
    assert cut([whole, Wanted(450, True)]) == [100, 412]
    assert cut([Wanted(900, may_be_cut=False), Wanted(900, may_be_cut=False)]) == [900, 0]


def test_what_must_not_be_cut_gets_the_next_step_when_it_has_waited() -> None:
    token, prompt = Wanted(1, True), Wanted(700, True)
    early, late = (Wanted(100, False, n_passed=n) for n in (PATIENCE - 1, PATIENCE))
    assert cut([token, prompt, early]) == [1, 64, 0]
    assert cut([token, prompt, late]) == [1, 0, 100]
    assert cut([prompt, late]) == [412, 100]
    assert cut([token, replace(late, n_tokens=512)]) == [0, 512]
    assert cut([token, prompt, replace(late, n_tokens=900)]) == [0, 0, 900]
    assert cut([token, late, replace(late, n_passed=PATIENCE + 1)]) == [1, 0, 100]


def test_guesses_ride_along_where_there_is_room() -> None:
    draft, token, prompt = Wanted(8, False, is_draft=True), Wanted(1, True), Wanted(700, True)
    assert cut([draft, token, prompt]) == [8, 1, 64]
    assert cut([prompt, token, draft]) == [64, 1, 8]
    assert cut([draft] * 3, 20) == [6, 7, 7]
    assert cut([draft, replace(draft, n_tokens=3), draft], 16) == [6, 3, 7]
    assert cut([draft, draft, prompt], 20, 12) == [4, 4, 12]
    assert cut([draft, draft, token], 15) == [7, 7, 1]
    assert cut([draft, draft, token], 2) == [1, 1, 0]
    assert cut([draft], 4, 4) == [4]


def test_however_many_guess_a_prompt_gets_its_share() -> None:
    draft, prompt = Wanted(8, False, is_draft=True), Wanted(700, True)
    assert cut([draft] * 64 + [prompt]) == [7] * 64 + [64]
    assert cut([draft] * 500 + [prompt]) == [1] * 448 + [0] * 52 + [64]


def test_the_longest_passed_over_are_in_the_step() -> None:
    late = [Wanted(1, True, n_passed=PATIENCE + n) for n in (0, 2, 1)]
    counts = cut_step([Wanted(1, True), *late], 2, StepLimits(16, 4, PATIENCE))
    assert counts == [0, 0, 1, 1]


def test_shares_are_as_even_as_they_can_be() -> None:
    assert share_out(10, [7, 1, 7]) == [4, 1, 5]
    assert share_out(100, [7, 1, 7]) == [7, 1, 7]
    assert share_out(0, [7, 1]) == share_out(-3, [7, 1]) == [0, 0]
    assert share_out(5, []) == []


@dataclass
class Party:
    """A sequence in the queue of `run_queue`."""

    wanted: Wanted
    n_passed_most: int = 0


class RandomLoad:
    """Sequences that ask again as soon as they have what they wanted: for as much as keeps others out, or anything."""

    def __init__(self, rng: random.Random, max_rows: int) -> None:
        self.rng = rng
        self.max_rows = max_rows
        self.weights = [rng.choice((0, 1, 5)) for _ in range(3)] + [1]

    def ask(self) -> Wanted:
        n = self.rng.choice((2, self.max_rows // 2, self.max_rows, 3 * self.max_rows))
        kinds = (
            Wanted(1, True),
            Wanted(self.rng.randint(2, 8), False, is_draft=True),
            Wanted(max(2, n), True),
            Wanted(max(2, n), False),
        )
        return self.rng.choices(kinds, self.weights)[0]


def run_queue(
    load: RandomLoad, parties: list[Party], limits: StepLimits, n_steps: int
) -> Iterator[list[int]]:
    """The batcher's queue: who has more to run goes to its front, who asks again to its end. Rows of each step."""
    queue = list(parties)
    for _ in range(n_steps):
        n_most = load.rng.randint(1, len(queue))
        counts = cut_step([party.wanted for party in queue], n_most, limits)
        yield counts
        unfinished, waiting, again = [], [], []
        for party, n in zip(queue, counts, strict=True):
            wanted = party.wanted
            if not n:
                party.wanted = replace(wanted, n_passed=wanted.n_passed + 1)
                party.n_passed_most = max(party.n_passed_most, party.wanted.n_passed)
                waiting.append(party)
            elif n < wanted.n_tokens and not wanted.is_draft:
                party.wanted = replace(wanted, n_tokens=wanted.n_tokens - n, n_passed=0)
                unfinished.append(party)
            else:
                party.wanted = load.ask()
                again.append(party)
        load.rng.shuffle(again)
        queue = [*unfinished, *waiting, *again]


@pytest.mark.parametrize("seed", range(60))
def test_nobody_is_passed_over_for_ever(seed: int) -> None:
    """Whatever others want, and however often: at most `patience_steps`, and once for each of them."""
    rng = random.Random(seed)
    max_rows = rng.choice((2, 3, 16, 64, 512))
    limits = StepLimits(max_rows, rng.choice((1, 4, 64)), rng.choice((0, 1, 8)))
    load = RandomLoad(rng, max_rows)
    parties = [Party(load.ask()) for _ in range(rng.choice((1, 2, 9, 40)))]
    for counts in run_queue(load, parties, limits, 300):
        assert any(counts)
    assert max(party.n_passed_most for party in parties) < limits.patience_steps + len(parties)


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_never_too_large_and_never_only_answers(seed: int) -> None:
    """Unless somebody takes it whole who was passed over."""
    rng = random.Random(seed)
    limits = StepLimits(rng.choice((16, 64, 512)), rng.choice((1, 4, 64)), PATIENCE)
    load = RandomLoad(rng, limits.max_rows)
    for _ in range(200):
        wanted = [replace(load.ask(), n_passed=rng.randrange(12)) for _ in range(rng.randint(1, 80))]
        counts = cut_step(wanted, len(wanted), limits)
        ran = [(item, n) for item, n in zip(wanted, counts, strict=True) if n]
        assert all(n <= item.n_tokens for item, n in ran)
        assert all(n == item.n_tokens for item, n in ran if item.is_whole)
        assert sum(counts) <= limits.max_rows or len(ran) == 1
        prompts = [n for item, n in ran if not item.is_answer]
        assert prompts or all(item.is_answer or item.is_whole for item in wanted)
        if len(prompts) < len(ran) and not any(item.is_whole for item, _ in ran):
            assert sum(prompts) <= limits.mixed_rows


@pytest.mark.parametrize(
    ("n_waiting", "n_present", "n_under_way", "n_steps", "expected"),
    [
        (0, 0, 0, 1, False),
        (1, 1, 0, 1, True),
        (1, 64, 0, 1, True),
        (1, 64, 1, 1, False),
        (31, 64, 1, 2, True),
        (16, 64, 1, 2, True),
        (15, 64, 1, 2, False),
        (64, 128, 2, 2, False),
        (1, 1, 0, 0, True),
        (1, 1, 0, -5, True),
        (1, 2, 1, -5, False),
    ],
)
def test_when_a_step_begins(
    n_waiting: int, n_present: int, n_under_way: int, n_steps: int, expected: bool
) -> None:
    assert may_begin(n_waiting, n_present, n_under_way, n_steps) is expected


def test_sequences_are_divided_among_steps() -> None:
    assert [step_share(n, 2) for n in (1, 2, 3, 64)] == [1, 1, 2, 32]


def test_steps_that_wait_are_divided_so_that_others_compute_meanwhile() -> None:
    def n_steps(compute_s: float, wait_s: float) -> int:
        times = StepTimes(CONFIG)
        for _ in range(20):
            times.add(compute_s, wait_s)
        return times.n_steps

    assert StepTimes(CONFIG).n_steps == 1
    assert n_steps(1.0, 0.0) == 1
    assert n_steps(1.0, 0.05) == 1
    assert n_steps(1.0, 0.5) == 2
    assert n_steps(1.0, 1.0) == 2
    assert n_steps(1.0, 1.5) == 3
    assert n_steps(1.0, 100.0) == CONFIG.max_steps
    assert n_steps(0.0, 1.0) == CONFIG.max_steps


def test_times_of_less_than_nothing_stop_nobody() -> None:
    """What exploring took is taken off the time of a step: by rounding, or another clock, it may be more than that."""
    for compute_s in (-1e-9, -5.0):
        times = StepTimes(CONFIG)
        times.add(compute_s, 0.009)
        assert times.n_steps == CONFIG.max_steps
        assert may_begin(1, 1, 0, times.n_steps)
        times.add(0.003, -1.0)
        assert times.n_steps >= 1


def test_whether_the_compute_thread_is_idle() -> None:
    times = StepTimes(CONFIG)
    assert not times.leave_idle(1)
    for _ in range(20):
        times.add(1.0, 4.0)
    assert [n for n in range(1, 5) if times.leave_idle(n)] == [1, 2]
    for _ in range(20):
        times.add(1.0, 0.9)
    assert not times.leave_idle(1)


def test_what_steps_took_long_ago_is_forgotten() -> None:
    times = StepTimes(CONFIG)
    for _ in range(20):
        times.add(1.0, 10.0)
    for _ in range(40):
        times.add(1.0, 0.0)
    assert times.n_steps == 1
