"""How likely a model took a token, and which others it had in mind: what `logprobs` of an answer are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities by the model's own distribution: before penalties, a grammar, temperature
    and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, logprob) of the most probable ones, best first; equal ones by rising id."""


def logprobs_of(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """For `token`, and the `n_top` best. logits: f32 [n_vocab], finite."""
    scores = logits.astype(np.float64)
    best = float(scores.max())
    total = best + float(np.log(np.exp(scores - best).sum()))
    ids = most_probable(logits, n_top) if n_top else ()
    top = tuple((int(i), float(scores[i]) - total) for i in ids)
    return TokenLogprobs(token, float(scores[token]) - total, top)


def most_probable(logits: npt.NDArray[np.float32], n: int) -> npt.NDArray[np.intp]:
    """Ids by falling logit, all (n = 0) or the first `n`; equal logits by rising id, so that runs repeat."""
    if 0 < n < len(logits):
        threshold = np.partition(logits, len(logits) - n)[len(logits) - n]
        candidates = np.flatnonzero(logits >= threshold)
        return candidates[np.argsort(-logits[candidates], kind="stable")][:n]
    return np.argsort(-logits, kind="stable")
