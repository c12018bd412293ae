"""Greedy, the filters, determinism and the checks on parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swarmnode.errors import DeviceError, UsageError
from swarmnode.models.sampling import GREEDY, Sampler, SamplingParams

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
ALL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}


def kept(**changes: Any) -> list[int]:
    return [int(i) for i in Sampler(SamplingParams(**(ALL | changes))).distribution(LOGITS)[0]]


def test_greedy_takes_the_first_maximum() -> None:
    assert Sampler(GREEDY).sample(LOGITS) == 1
    assert Sampler(GREEDY).sample(np.array([0, 2, 2], np.float32)) == 1


def test_without_filters_all_tokens_are_kept_in_order() -> None:
    ids, probabilities = Sampler(SamplingParams(**ALL)).distribution(LOGITS)
    assert ids.tolist() == [1, 3, 4, 0, 2]
    np.testing.assert_allclose(probabilities, [0.4, 0.25, 0.2, 0.1, 0.05], rtol=1e-6)


def test_filters() -> None:
    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=99) == [1, 3, 4, 0, 2]
    assert kept(top_p=0.6) == [1, 3]
    assert kept(top_p=0.01) == [1]
    assert kept(min_p=0.45) == [1, 3, 4]
    assert kept(min_p=1.0) == [1]
    assert kept(top_k=3, top_p=0.99, min_p=0.55) == [1, 3]


def test_temperature_comes_after_the_filters() -> None:
    assert kept(top_p=0.6, temperature=50.0) == [1, 3]
    _, probabilities = Sampler(SamplingParams(**(ALL | {"temperature": 0.5, "top_k": 2}))).distribution(
        LOGITS
    )
    np.testing.assert_allclose(probabilities, np.array([0.16, 0.0625]) / 0.2225, rtol=1e-6)


def test_top_k_of_equal_logits_takes_the_lowest_ids() -> None:
    sampler = Sampler(SamplingParams(**(ALL | {"top_k": 2})))
    assert sampler.distribution(np.zeros(6, np.float32))[0].tolist() == [0, 1]


def test_frequencies_follow_the_distribution() -> None:
    sampler = Sampler(SamplingParams(**ALL))
    counts = np.bincount([sampler.sample(LOGITS) for _ in range(4000)], minlength=5)
    np.testing.assert_allclose(counts / 4000, np.exp(LOGITS), atol=0.03)


@pytest.mark.parametrize("seed", [0, -5, 2**64 - 1])
def test_a_seed_repeats_the_draws(seed: int) -> None:
    draws = [
        [sampler.sample(LOGITS) for _ in range(50)]
        for sampler in (Sampler(SamplingParams(**(ALL | {"seed": seed}))) for _ in range(2))
    ]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(8, -np.inf, np.float32)
    logits[[2, 5]] = 0.0
    sampler = Sampler(SamplingParams(**ALL))
    assert {sampler.sample(logits) for _ in range(100)} == {2, 5}


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-45, 1e-20, 9e-6, 1e-5, 1e-4])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    for logits in (LOGITS, LOGITS * np.float32(1e37), np.array([-np.inf, 3e38, -3e38, 1, 0], np.float32)):
        sampler = Sampler(SamplingParams(**(ALL | {"temperature": temperature})))
        assert {sampler.sample(logits) for _ in range(20)} == {1}
        probabilities = sampler.distribution(logits)[1]
        assert probabilities[0] == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 100.0])
@pytest.mark.parametrize("top_p", [5e-324, 1e-310, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 5e-324, 1e-310, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2**31 - 1])
def test_extreme_but_legal_values_give_a_token(
    temperature: float, top_p: float, min_p: float, top_k: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=1)
    for logits in (LOGITS, np.array([3e38, -3e38, -np.inf, 0, 0], np.float32), np.zeros(5, np.float32)):
        sampler = Sampler(params)
        ids, probabilities = sampler.distribution(logits)
        assert np.isfinite(probabilities).all()
        assert probabilities.sum() == pytest.approx(1.0)
        drawn = {sampler.sample(logits) for _ in range(10)}
        assert drawn <= {int(i) for i in ids}
        assert all(np.isfinite(logits[token]) for token in drawn)


def test_a_bias_counts_before_all_else_and_for_greedy_choices_too() -> None:
    before = LOGITS.copy()
    best = int(np.argmax(LOGITS))
    banned = SamplingParams(temperature=0.0, logit_bias=((best, -100.0),))
    second = int(np.argsort(LOGITS)[-2])
    assert Sampler(banned).sample(LOGITS) == second
    least = int(np.argmin(LOGITS))
    for params in (GREEDY, SamplingParams(**ALL)):
        biased = replace(params, logit_bias=((least, 100.0),), presence_penalty=2.0)
        sampler = Sampler(biased, n_logprobs=0)
        assert [sampler.sample(LOGITS) for _ in range(5)] == [least] * 5
        report = sampler.next_report()
        assert report is not None
        assert report.logprob < -1, "logprobs are the model's own"
    assert np.array_equal(LOGITS, before)


def test_a_bias_is_the_same_distribution_as_other_logits() -> None:
    biases = ((0, 1.5), (3, -0.25))
    moved = LOGITS.copy()
    for token, bias in biases:
        moved[token] += np.float32(bias)
    params = SamplingParams(temperature=1.3, seed=5, frequency_penalty=0.5)
    plain, biased = Sampler(params), Sampler(replace(params, logit_bias=biases))
    assert [plain.sample(moved) for _ in range(50)] == [biased.sample(LOGITS) for _ in range(50)]


def test_a_bias_does_not_let_in_what_a_constraint_forbids() -> None:
    class Only:
        def allowed(self) -> Any:
            return np.array([1, 4])

        def accept(self, token: int) -> None:
            assert token in (1, 4)

    for bias, token in ((((0, 100.0),), 1), (((0, 100.0), (4, 100.0)), 4), (((1, -100.0),), 4)):
        params = SamplingParams(temperature=0.0, logit_bias=bias)
        assert Sampler(params, constraint=Only()).sample(LOGITS) == token


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_a_device_error(bad: float) -> None:
    logits = LOGITS.copy()
    logits[3] = bad
    for params in (GREEDY, SamplingParams(**ALL)):
        with pytest.raises(DeviceError, match="token 3"):
            Sampler(params).sample(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.01),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("seed", 2**64),
        ("seed", 1.0),
        ("logit_bias", ((1, 100.1),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token, 0.0) for token in range(1025))),
    ],
)
def test_values_out_of_range_are_usage_errors(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        SamplingParams(**{field: value})
