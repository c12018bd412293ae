"""Guesses at what comes next, and which of them are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.config import EngineConfig
from swarmnode.models.sampling import Sampler, SamplingParams
from swarmnode.services.drafts import Drafts, TextIndex, verify
from tests.calls import count_calls

CONFIG = EngineConfig()
F32 = npt.NDArray[np.float32]


def index_of(tokens: list[int], config: EngineConfig = CONFIG) -> TextIndex:
    return TextIndex(np.array(tokens, np.int32), config)


def drafts_of(tokens: list[int]) -> Drafts:
    return Drafts(np.array(tokens, np.int32), CONFIG)


# -- where the text was the same before


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 1, 2], []),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),
        ([7, 7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4, 9, 2, 3, 4, 5, 8, 8, 9, 2, 3, 4], [5, 8, 8, 9]),
        ([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], [4, 8, 1, 2]),
    ],
    ids=["empty", "one", "new", "too short", "once", "period", "run", "latest", "longest"],
)
def test_the_guess_is_what_came_last_time(tokens: list[int], expected: list[int]) -> None:
    assert index_of(tokens).guess(4) == expected
    grown = index_of([])
    for token in tokens:
        grown.add(token)
    assert grown.guess(4) == expected


def brute_force(tokens: list[int], config: EngineConfig) -> list[int]:
    """By looking everywhere."""
    end, best, longest = len(tokens) - 1, -1, config.draft_match - 1
    for place in range(end - 1, config.draft_match - 2, -1):
        n = 0
        while n < min(config.draft_longest_match, place + 1) and tokens[place - n] == tokens[end - n]:
            n += 1
        if n > longest:
            best, longest = place, n
    if best < 0:
        return []
    text = list(tokens)
    for number in range(5):
        text.append(text[best + 1 + number])
    return text[len(tokens) :]


@pytest.mark.parametrize("n_gram", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_looking_everywhere_finds(n_gram: int, seed: int) -> None:
    config = replace(CONFIG, draft_match=n_gram, draft_places=10_000)
    rng = np.random.default_rng(seed)
    text = [int(token) for token in rng.integers(0, 4, 300)]
    n_prompt = int(rng.integers(300))
    index = index_of(text[:n_prompt], config)
    for n in range(n_prompt, 300):
        assert index.guess(5) == brute_force(text[:n], config), n
        index.add(text[n])


def test_only_the_latest_places_are_looked_at() -> None:
    text = [5, 1, 2, 3, 6] + [1, 2, 3, 7] * 8 + [5, 1, 2, 3]
    assert index_of(text).guess(1) == [7]
    assert index_of(text, replace(CONFIG, draft_places=9)).guess(1) == [6]


def test_a_prompt_of_any_length_takes_as_many_calls() -> None:
    """Or 262,144 tokens would take seconds: numpy goes over them 100 times as fast as Python."""
    counts = []
    for n_tokens in (1000, 100_000):
        prompt = np.random.default_rng(0).integers(0, 248_320, n_tokens).astype(np.int32)
        counts.append(count_calls(lambda prompt=prompt: TextIndex(prompt, CONFIG)))  # type: ignore[misc]
    assert counts[0] == counts[1] < 100


def test_a_guess_takes_no_more_calls_in_a_longer_text() -> None:
    counts = []
    for n_tokens in (100, 2000):
        text = index_of([1] * n_tokens)
        assert text.guess(7) == [1] * 7
        text.add(1)
        counts.append(count_calls(lambda text=text: text.guess(7)))  # type: ignore[misc]
    assert counts[0] == counts[1] < 100


# -- how long, and when


def test_it_grows_with_success_and_shrinks_without() -> None:
    drafts = drafts_of([1, 2, 3, 4, 5] * 4)
    lengths = []
    for n_right in (9, 9, 9, 2, 9, 0, 9):
        n = len(drafts.propose(100, ()))
        lengths.append(n)
        drafts.judge(n, min(n, n_right))
    assert lengths == [3, 6, 7, 7, 3, 6, 1]


def test_after_misses_it_pauses_longer_and_longer() -> None:
    drafts = drafts_of([1, 2, 3, 4, 5] * 4)
    waits = []
    for _ in range(8):
        n = 0
        while not drafts.propose(100, ()):
            n += 1
        waits.append(n)
        drafts.judge(1, 0)
    assert waits == [0, 0, 1, 3, 7, 15, 31, 31]
    drafts = drafts_of([1, 2, 3, 4, 5] * 4)
    for n_right in (0, 0, 1, 0):
        while not drafts.propose(100, ()):
            pass
        drafts.judge(1, n_right)
    assert drafts.propose(100, ())


def test_it_asks_for_no_more_than_wanted_and_stops_before_an_end() -> None:
    drafts = drafts_of([1, 2, 3, 4, 5] * 4)
    assert drafts.propose(2, ()) == [1, 2]
    assert drafts.propose(7, {3}) == [1, 2]
    assert drafts.propose(7, {1}) == []
    assert drafts.propose(0, ()) == []


def test_tokens_of_the_answer_count() -> None:
    drafts = drafts_of([1, 2, 3, 4, 5, 6])
    assert drafts.propose(3, ()) == []
    for token in (1, 2, 3):
        drafts.add(token)
    assert drafts.propose(3, ()) == [4, 5, 6]


# -- beside an MTP block


def both(tokens: list[int], **changes: Any) -> Drafts:
    return Drafts(np.array(tokens, np.int32), replace(CONFIG, **changes), has_mtp=True)


def test_the_text_counts_only_where_it_repeats_itself_word_for_word() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]
    drafts = both([*text, 2, 3, 4, 5, 6, 7, 8])
    assert drafts.propose(3, ()) == []
    assert drafts.wanted_of_model(7) == 3
    drafts = both([*text, 1, 2, 3, 4, 5, 6, 7, 8])
    assert drafts.propose(3, ()) == [9, 9, 9]
    assert index_of([*text, 2, 3, 4, 5, 6, 7, 8]).guess(3) == [9, 9, 9]


def test_without_a_block_nobody_is_asked() -> None:
    assert drafts_of([1, 2, 3]).wanted_of_model(7) == 0


def test_the_text_is_not_looked_at_if_only_the_block_counts() -> None:
    drafts = both([1, 2, 3, 4, 5] * 4, drafts="mtp")
    assert drafts.propose(7, ()) == []
    assert drafts.wanted_of_model(7) == 3
    assert drafts.wanted_of_model(2) == 2


def test_each_kind_of_guess_has_its_own_record() -> None:
    drafts = both([1, 2, 3, 4, 5] * 4)
    for _ in range(2):
        drafts.judge(len(drafts.propose(7, ())), 7)
    assert len(drafts.propose(7, ())) == 7
    for expected in (3, 1, 0, 1, 0, 0, 0, 1):
        assert drafts.wanted_of_model(7) == expected
        if expected:
            drafts.judge(expected, 0)
    assert len(drafts.propose(7, ())) == 7
    for _ in range(2):
        drafts.judge(7, 0)
    assert drafts.propose(7, ()) == []
    while not drafts.wanted_of_model(7):
        pass
    drafts.judge(1, 1)
    assert drafts.wanted_of_model(7) == 2


@pytest.mark.parametrize(
    ("step_s", "guess_s", "expected"),
    [
        (0.0, 1.0, 7),
        (1.0, 0.0, 7),
        (1.0, 2.0, 1),
        (1.0, 0.5, 1),
        (1.0, 0.2, 2),
        (2.0, 0.035, 5),
        (9.0, 0.001, 7),
    ],
)
def test_no_more_is_asked_for_than_pays(step_s: float, guess_s: float, expected: int) -> None:
    drafts = both([1])
    for n in (3, 6, 7):
        assert drafts.wanted_of_model(7) == n
        drafts.judge(n, n)
    drafts.stepped(step_s)
    drafts.took(guess_s)
    assert drafts.wanted_of_model(7) == expected


# -- which are taken


def logits_for(*tokens: int) -> F32:
    """Rows of which these tokens are the best."""
    return np.eye(10, dtype=np.float32)[list(tokens)]


@pytest.mark.parametrize(
    ("draft", "best", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 5, 3, 4], [1, 5]),
        ([1, 2, 3], [4, 2, 3, 4], [4]),
        ([1, 9, 3], [1, 9, 3, 4], [1, 9]),
        ([1, 2], [9, 2, 3], [9]),
    ],
)
def test_greedy_takes_what_is_right_up_to_an_end(
    draft: list[int], best: list[int], expected: list[int]
) -> None:
    sampler = Sampler(SamplingParams(temperature=0.0))
    assert verify(draft, logits_for(*best), sampler.sample, {9}) == expected


def test_sampled_tokens_are_those_without_guesses() -> None:
    """One draw a token, whatever was guessed: the same seed gives the same tokens."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 10)).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=7)
    plain = Sampler(params)
    expected = [plain.sample(row) for row in rows]
    sampler = Sampler(params)
    found: list[int] = []
    n_accepted = 0
    while len(found) < 190:
        start = len(found)
        draft = list(expected[start : start + 4])
        draft[int(rng.integers(4))] = int(rng.integers(10))  # one may be wrong
        taken = verify(draft, rows[start : start + 5], sampler.sample, ())
        n_accepted += len(taken) - 1
        found += taken
    assert found == expected[: len(found)]
    assert n_accepted > 100


def test_sampled_tokens_have_the_same_distribution() -> None:
    """Without a seed in common: the first two tokens, drafted and not."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 4)).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=3)
    sampler, n = Sampler(params), 20_000
    draft = [int(np.argmax(logits[0]))]
    counts = np.zeros((4, 4))
    for _ in range(n):
        taken = verify(draft, logits, sampler.sample, ())
        # Behind another token than the guess come other logits; here the same ones.
        second = taken[1] if len(taken) > 1 else sampler.sample(logits[1])
        counts[taken[0], second] += 1
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    expected = n * np.outer(p[0], p[1])
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 37.7  # chi-squared, 15 degrees of freedom: 1 in 1,000
