"""Logprobs are the model's own distribution; penalties and constraints act before the filters, token after token."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.models.logprobs import logprobs_of
from swarmnode.models.sampling import GREEDY, Sampler, SamplingParams

PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]
LOGITS = np.log(np.array(PROBABILITIES, np.float32)) + np.float32(7)


def test_logprobs_are_those_of_the_model() -> None:
    found = logprobs_of(LOGITS, 0, 3)
    assert found.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in found.top] == [1, 3, 4]
    assert [math.exp(value) for _, value in found.top] == pytest.approx([0.4, 0.25, 0.2], rel=1e-5)
    assert logprobs_of(LOGITS, 0, 0).top == ()


def test_penalties_are_openais_and_count_the_answer_only() -> None:
    """mu[j] - count[j] * frequency - (count[j] > 0) * presence."""
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25))
    counts = [0] * 5
    for _ in range(30):
        expected = [
            value - 0.25 * count - 0.5 * (count > 0) for value, count in zip(LOGITS, counts, strict=True)
        ]
        token = sampler.sample(LOGITS)
        assert token == int(np.argmax(expected))
        counts[token] += 1
    assert min(counts) > 0


def test_a_negative_penalty_favours_what_was_said() -> None:
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, presence_penalty=-2.0, seed=1)
    sampler = Sampler(params)
    drawn = [sampler.sample(np.zeros(1000, np.float32)) for _ in range(500)]
    assert len(set(drawn)) < 400


def test_reports_come_in_order_and_do_not_see_penalties() -> None:
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=2.0), n_logprobs=1)
    tokens = [sampler.sample(LOGITS) for _ in range(3)]
    reports = [sampler.next_report() for _ in range(3)]
    assert [report.token for report in reports if report] == tokens == [1, 3, 4]
    for report in reports:
        assert report is not None
        assert report.logprob == pytest.approx(math.log(PROBABILITIES[report.token]), abs=1e-6)
        assert report.top[0][0] == 1
    assert sampler.next_report() is None
    assert Sampler(GREEDY).next_report() is None


class Alternating:
    """First an even id, then an odd one."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> npt.NDArray[np.intp]:
        return np.arange(len(self.accepted) % 2, 5, 2)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=2)])
def test_only_what_is_allowed_is_chosen(params: SamplingParams) -> None:
    constraint = Alternating()
    sampler = Sampler(params, constraint=constraint)
    drawn = [sampler.sample(LOGITS) for _ in range(40)]
    assert [token % 2 for token in drawn] == [0, 1] * 20
    assert constraint.accepted == drawn
    if params is GREEDY:
        assert drawn == [4, 1] * 20
