"""Choosing the next token from logits: greedy, or temperature with top-k, top-p and min-p.

Filters run in llama.cpp's default order: top-k, top-p and min-p on the untempered distribution,
temperature last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.errors import NotFiniteError, UsageError

_MAX_SEED = 2**64
_MAX_TEMPERATURE = 100.0
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

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, _MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_integer("top_k", self.top_k, 0, 2**31)
        if self.top_p == 0.0:
            raise UsageError("top_p = 0 keeps no token; use temperature 0 for the most probable one")
        if self.seed is not None:
            _check_integer("seed", self.seed, -_MAX_SEED // 2, _MAX_SEED)


class Sampler:
    """Draws tokens for one sequence; holds the random state, so one sampler a sequence."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._rng = np.random.default_rng(None if params.seed is None else params.seed % _MAX_SEED)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Return a token id. logits: f32 [n_vocab]. Raises NotFiniteError for NaN or no finite maximum."""
        best = int(np.argmax(logits))  # NaN counts as the maximum, so that it is found here
        if not math.isfinite(logits[best]):
            raise NotFiniteError(f"the logits are not finite (token {best}: {logits[best]})")
        if self.params.temperature < _MIN_TEMPERATURE:
            return best
        ids, probabilities = self.distribution(logits)
        cumulated = np.cumsum(probabilities)
        drawn = np.searchsorted(cumulated, self._rng.random() * cumulated[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])

    def sample_last(self, logits: npt.NDArray[np.float32]) -> int:
        """`sample` from the last row of logits f32 [T, n_vocab]."""
        return self.sample(logits[-1])

    def distribution(
        self, logits: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Return the kept token ids, most probable first, and their probabilities (sum 1); not for greedy."""
        params = self.params
        ids = _most_probable(logits, params.top_k)
        scores = logits[ids].astype(np.float64)
        probabilities = _softmax(scores)
        keep = len(ids)
        if params.top_p < 1.0:
            keep = min(keep, int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1)
        if params.min_p > 0.0:
            keep = min(keep, max(1, int(np.sum(probabilities >= params.min_p * probabilities[0]))))
        return ids[:keep], _softmax(scores[:keep] / max(params.temperature, _MIN_TEMPERATURE))


def _most_probable(logits: npt.NDArray[np.float32], top_k: int) -> npt.NDArray[np.intp]:
    """Ids by falling logit, all or the first `top_k`; equal logits by rising id, so that runs repeat."""
    if 0 < top_k < len(logits):
        threshold = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        candidates = np.flatnonzero(logits >= threshold)
        return candidates[np.argsort(-logits[candidates], kind="stable")][:top_k]
    return np.argsort(-logits, kind="stable")


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


GREEDY = SamplingParams(temperature=0.0)
