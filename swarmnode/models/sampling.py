"""Choosing the next token from logits: greedy, or temperature with top-k, top-p and min-p.

A bias and penalties come first. Filters run in llama.cpp's default order: top-k, top-p and min-p on the untempered
distribution, temperature last. A sampler knows what it has chosen, so guessed tokens that a pass tries out
(services/drafts) are judged by the same biased, penalised and constrained distributions as tokens of passes of their
own.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarmnode.errors import NotFiniteError, UsageError
from swarmnode.models.logprobs import TokenLogprobs, logprobs_of, most_probable

_MAX_SEED = 2**64
_MAX_TEMPERATURE = 100.0
_MAX_PENALTY = 2.0
_MAX_BIAS = 100.0
MAX_BIASED = 1024
"""Tokens that may have a bias."""
_MIN_TEMPERATURE = 1e-5
"""Below it the most probable token is taken: logits that differ by 1e-3 then differ by 100 in the exponent,
and dividing by much smaller numbers ends in infinities."""


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is sampled. Raises UsageError, naming the field, for a value out of range."""

    temperature: float = 0.7
    """0 (or less than 1e-5) is greedy: the most probable token always, whatever the rest says."""
    top_k: int = 20
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the most probable tokens until their probabilities add up to this; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; 0 drops none."""
    seed: int | None = None
    """The same seed gives the same tokens for the same logits; None draws one from the system."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the answer has already."""
    frequency_penalty: float = 0.0
    """... and this, times how often it has them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits before all else; greedy choices too. -100 to 100."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, _MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -_MAX_PENALTY, _MAX_PENALTY)
        _check_number("frequency_penalty", self.frequency_penalty, -_MAX_PENALTY, _MAX_PENALTY)
        _check_integer("top_k", self.top_k, 0, 2**31)
        _check_bias(self.logit_bias)
        if self.top_p == 0.0:
            raise UsageError("top_p = 0 keeps no token; use temperature 0 for the most probable one")
        if self.seed is not None:
            _check_integer("seed", self.seed, -_MAX_SEED // 2, _MAX_SEED)


class Constraint(Protocol):
    """What an answer must look like, token by token."""

    def allowed(self) -> npt.NDArray[np.intp] | None:
        """Ids that may come next, rising, at least one; None: all."""
        ...

    def accept(self, token: int) -> None:
        """The answer goes on with this one, which was allowed."""
        ...


class Sampler:
    """Draws tokens for one sequence; holds the random state and what it chose, so one sampler a sequence."""

    def __init__(
        self, params: SamplingParams, *, n_logprobs: int | None = None, constraint: Constraint | None = None
    ) -> None:
        """`n_logprobs`: report each token's logprob, and those of so many others; None: nothing."""
        self.params = params
        self._rng = np.random.default_rng(None if params.seed is None else params.seed % _MAX_SEED)
        self._n_logprobs = n_logprobs
        self._constraint = constraint
        self._is_penalised = bool(params.presence_penalty or params.frequency_penalty)
        self._counts: Counter[int] = Counter()
        self._biased_ids = np.array([token for token, _ in params.logit_bias], np.intp)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._reports: deque[TokenLogprobs] = deque()

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Return a token id, which counts as the answer's next. logits: f32 [n_vocab], which stay as they are. Raises
        NotFiniteError for NaN or no finite maximum.
        """
        best = int(np.argmax(logits))  # NaN counts as the maximum, so that it is found here
        if not math.isfinite(logits[best]):
            raise NotFiniteError(f"the logits are not finite (token {best}: {logits[best]})")
        token = self._choose(logits)
        if self._is_penalised:
            self._counts[token] += 1
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._n_logprobs is not None:
            self._reports.append(logprobs_of(logits, token, self._n_logprobs))
        return token

    def sample_last(self, logits: npt.NDArray[np.float32]) -> int:
        """`sample` from the last row of logits f32 [T, n_vocab]."""
        return self.sample(logits[-1])

    def next_report(self) -> TokenLogprobs | None:
        """Of the tokens chosen, in order, one a call; None if nothing is reported."""
        return self._reports.popleft() if self._reports else None

    def _choose(self, logits: npt.NDArray[np.float32]) -> int:
        if len(self._biases):
            logits = logits.copy()
            logits[self._biased_ids] += self._biases
        if self._counts:
            logits = self._penalised(logits)
        allowed = None if self._constraint is None else self._constraint.allowed()
        if allowed is None:
            return self._draw(logits)
        return int(allowed[self._draw(logits[allowed])])

    def _penalised(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """OpenAI's rule, over the answer so far (the prompt does not count)."""
        params = self.params
        ids = np.fromiter(self._counts.keys(), np.intp, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        penalised = logits.copy()
        penalised[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
        return penalised

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        """A place in logits f32 [n]."""
        if self.params.temperature < _MIN_TEMPERATURE:
            return int(np.argmax(logits))
        ids, probabilities = self.distribution(logits)
        cumulated = np.cumsum(probabilities)
        drawn = np.searchsorted(cumulated, self._rng.random() * cumulated[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])

    def distribution(
        self, logits: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Return the kept token ids, most probable first, and their probabilities (sum 1); not for greedy."""
        params = self.params
        ids = most_probable(logits, params.top_k)
        scores = logits[ids].astype(np.float64)
        probabilities = _softmax(scores)
        keep = len(ids)
        if params.top_p < 1.0:
            keep = min(keep, int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1)
        if params.min_p > 0.0:
            keep = min(keep, max(1, int(np.sum(probabilities >= params.min_p * probabilities[0]))))
        return ids[:keep], _softmax(scores[:keep] / max(params.temperature, _MIN_TEMPERATURE))


def _softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Softmax of scores sorted so that the first is the largest."""
    weights = np.exp(scores - scores[0])
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UsageError(f"{name} = {value!r} is not a number from {low:g} to {high:g}")


def _check_integer(name: str, value: int, low: int, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < end:
        raise UsageError(f"{name} = {value!r} is not a whole number from {low} to {end - 1}")


def _check_bias(biases: tuple[tuple[int, float], ...]) -> None:
    if len(biases) > MAX_BIASED or len({token for token, _ in biases}) != len(biases):
        raise UsageError(f"logit_bias: up to {MAX_BIASED} tokens may have one, each once")
    for token, bias in biases:
        _check_integer("logit_bias: a token", token, 0, 2**31)
        _check_number(f"logit_bias: {token}", bias, -_MAX_BIAS, _MAX_BIAS)


GREEDY = SamplingParams(temperature=0.0)
