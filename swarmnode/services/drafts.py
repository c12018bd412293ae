"""Guesses what comes next in a text (prompt lookup, or n-gram, decoding), and checks guesses. Pure.

The guess is what came the last time that the text read as it does now, or what the model's MTP block says, which
somebody else asks (generation.py). A pass that has guessed tokens behind the next
one gives the logits of all; each token is chosen from its logits as it would be without guesses, and as long as the
choice is what was guessed the next logits are right, too. So tokens do not depend on guesses, sampled ones neither:
the sampler sees the same logits in the same order.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from swarmnode.config import EngineConfig

_BUCKET_BITS = 14
"""16,384 buckets, 64 KB: texts of 4,096 tokens share few, and those of 262,144 look at 16 places for nothing."""
_FACTOR = 0x9E3779B1
"""2^32 divided by the golden ratio: Fibonacci hashing (Knuth, volume 3, 6.4)."""
_MASK = 0xFFFFFFFF


class TextIndex:
    """A text, and where its n-grams occurred before: 8 bytes a token, and a constant.

    Chains of places as in LZ77 compressors: the latest place of each bucket, and for each place the one before it.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], config: EngineConfig) -> None:
        """`tokens`: i32 [n]."""
        self._config = config
        self._tokens = array("i", tokens.astype(np.int32).tobytes())
        self._before = array("i", [-1]) * len(tokens)
        """By place (of an n-gram's last token): the latest one before it in the same bucket; -1: none."""
        self._latest = array("i", [-1]) * (1 << _BUCKET_BITS)
        self._enter_all(tokens[:-1])

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> None:
        """The text goes on. What ended before it has something that followed now, and may be found."""
        place = len(self._tokens) - 1
        if place >= self._config.draft_match - 1:
            bucket = self._bucket(place)
            self._before[place] = self._latest[bucket]
            self._latest[bucket] = place
        self._tokens.append(token)
        self._before.append(-1)

    def guess(self, n_most: int, shortest: int = 0) -> list[int]:
        """Up to `n_most` tokens that may follow; none if the end of the text, `shortest` tokens of it, is new."""
        place, tokens = self._best_place(shortest), self._tokens
        if place < 0 or n_most < 1:
            return []
        # Where the place is less than n_most back the text repeats itself, and so does what follows.
        period = len(tokens) - 1 - place
        return [tokens[place + 1 + i % period] for i in range(n_most)]

    def _best_place(self, shortest: int) -> int:
        """Of the latest places of the same bucket the latest one with the longest match; -1: none matches so far."""
        config, end = self._config, len(self._tokens) - 1
        if end < config.draft_match:
            return -1
        best, longest = -1, max(shortest, config.draft_match) - 1
        place = self._latest[self._bucket(end)]
        for _ in range(config.draft_places):
            if place < 0 or longest >= config.draft_longest_match:
                break
            n = self._match(place, end)
            if n > longest:
                best, longest = place, n
            place = self._before[place]
        return best

    def _match(self, place: int, end: int) -> int:
        """How many tokens up to `place` are those up to `end`, as far as it counts."""
        tokens, n = self._tokens, 0
        most = min(self._config.draft_longest_match, place + 1)
        while n < most and tokens[place - n] == tokens[end - n]:
            n += 1
        return n

    def _bucket(self, place: int) -> int:
        value = 0
        for token in self._tokens[place - self._config.draft_match + 1 : place + 1]:
            value = (value * _FACTOR + token) & _MASK
        return ((value * _FACTOR) & _MASK) >> (32 - _BUCKET_BITS)

    def _enter_all(self, tokens: npt.NDArray[np.int32]) -> None:
        """As `add` for a whole prompt, 100 times as fast."""
        n_gram = self._config.draft_match
        n_places = len(tokens) - n_gram + 1
        if n_places < 1:
            return
        factor, mask = np.uint64(_FACTOR), np.uint64(_MASK)
        values = np.zeros(n_places, np.uint64)
        for start in range(n_gram):
            values = (values * factor + tokens[start : start + n_places].astype(np.uint64)) & mask
        buckets = ((values * factor) & mask) >> np.uint64(32 - _BUCKET_BITS)
        places = np.argsort(buckets, kind="stable").astype(np.int32)
        ordered = buckets[places].astype(np.int64)
        places += n_gram - 1
        before = np.frombuffer(self._before, np.int32)
        follows = np.flatnonzero(ordered[1:] == ordered[:-1])
        before[places[follows + 1]] = places[follows]
        last = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), n_places - 1)
        np.frombuffer(self._latest, np.int32)[ordered[last]] = places[last]


class _Record:
    """How one kind of guesses has done in this answer: as long as they are right, and fewer where they are not."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.length = max(1, config.draft_tokens // 2)
        self._n_misses = 0
        """Drafts in a row of which nothing was right."""
        self._pause = 0
        """Tokens until the next guess."""

    def is_due(self) -> bool:
        """Whether to guess now. Each call is another token."""
        if not self._pause:
            return True
        self._pause -= 1
        return False

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        """See Drafts.judge."""
        if n_accepted == n_drafted:
            self.length = min(self._config.draft_tokens, 2 * self.length)
        else:
            self.length = n_accepted + 1
        self._n_misses = 0 if n_accepted else self._n_misses + 1
        if self._n_misses > 1:
            self._pause = min(self._config.draft_pause_tokens, 2 ** (self._n_misses - 1) - 1)


class Drafts:
    """The guesses of one answer: as long as they are right, and fewer and fewer where they are not.

    The prompt is indexed (`index`) before the first guess is wanted. With an MTP block (`has_mtp`) the text is asked
    first, which costs nothing, but counts only where it repeats itself word for word; then it is the block's turn.
    """

    def __init__(self, prompt: npt.NDArray[np.int32], config: EngineConfig, *, has_mtp: bool = False) -> None:
        """`prompt`: i32 [n]."""
        self._config = config
        self._prompt = prompt
        self._index: TextIndex | None = None
        self._new: list[int] = []
        """Tokens of the answer that are not in the index."""
        self._from_text = _Record(config)
        self._from_model = _Record(config)
        self._last = self._from_text
        """Whose guess was made last."""
        self._shortest = config.draft_sure_match if has_mtp else 0
        self._has_mtp = has_mtp
        self._step_s = self._guess_s = 0.0

    @property
    def is_indexed(self) -> bool:
        """Whether `index` has ended."""
        return self._index is not None

    def index(self) -> None:
        """Look through the prompt, before the first guess is wanted. Up to 79 ms (decision 0031), so on any thread, but
        nothing else may be called meanwhile.
        """
        self._index = TextIndex(self._prompt, self._config)

    def add(self, token: int) -> None:
        """The answer's next token."""
        self._new.append(token)

    def propose(self, n_most: int, stop_ids: Collection[int]) -> list[int]:
        """Up to `n_most` tokens that may follow, often none; none of the `stop_ids`: nothing is run behind those."""
        if self._config.drafts == "mtp" or not self._from_text.is_due():
            return []
        if self._index is None:
            self.index()
        assert self._index is not None
        for token in self._new:
            self._index.add(token)
        self._new.clear()
        self._last = self._from_text
        draft = self._index.guess(min(n_most, self._from_text.length), self._shortest)
        end = next((place for place, token in enumerate(draft) if token in stop_ids), len(draft))
        return draft[:end]

    def wanted_of_model(self, n_most: int) -> int:
        """How many tokens, up to `n_most`, the MTP block is to guess, as `propose` had nothing; often 0.

        No more than pay: where every other guess is right, the n-th one saves 1 / 2^n of a step.
        """
        if not self._has_mtp or not self._from_model.is_due():
            return 0
        self._last = self._from_model
        n_most = min(n_most, self._from_model.length)
        if self._guess_s > 0 and self._step_s > 0:
            n_most = min(n_most, max(1, int(math.log2(max(1.0, self._step_s / self._guess_s)))))
        return n_most

    def took(self, guess_s: float) -> None:
        """The block's guesses took so long, each."""
        self._guess_s = guess_s

    def stepped(self, step_s: float) -> None:
        """A step of this sequence took so long."""
        self._step_s = step_s

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        """So many of a draft were right: twice as long if all were, about as long as was right otherwise, and after
        several of which nothing was, a pause.
        """
        self._last.judge(n_drafted, n_accepted)


def verify(
    draft: Sequence[int],
    logits: npt.NDArray[np.float32],
    sample: Callable[[npt.NDArray[np.float32]], int],
    stop_ids: Collection[int],
) -> list[int]:
    """The tokens that follow: those of a draft that are right, and the one behind them.

    `logits`: f32 [len(draft) + 1, n_vocab], of the token before the draft and of its tokens. `sample` is called once
    for each token returned, in order. That is speculative sampling (Leviathan et al. 2023) for a draft that is certain:
    it is accepted with its probability, else replaced from the rest of the distribution, which is one draw.
    Nothing comes behind one of the `stop_ids`.
    """
    found = [sample(logits[0])]
    for drafted, row in zip(draft, logits[1:], strict=True):
        if found[-1] != drafted or drafted in stop_ids:
            break
        found.append(sample(row))
    return found
