"""Token buckets and dice: what bounds a peer, and where chance comes from. Pure."""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Dice(Protocol):
    """The part of random.Random that gossip uses; it comes in as an argument."""

    def random(self) -> float:
        """At least 0, less than 1."""
        ...

    def randrange(self, start: int, /) -> int:
        """At least 0, less than `start`."""
        ...

    def randbytes(self, n: int, /) -> bytes: ...
    def choice(self, seq: Sequence[T], /) -> T: ...
    def shuffle(self, x: MutableSequence[Any], /) -> None: ...


class Pace:
    """When the next of something may happen: one in `interval_s`, up to `burst` ahead of that, never two in `least_s`.

    The generic cell rate algorithm (ITU-T I.371): a bucket that says when, not whether.
    """

    __slots__ = ("_ahead_s", "_interval_s", "_least_s", "_paid_s", "next_s")

    def __init__(self, interval_s: float, burst: int, least_s: float) -> None:
        self._interval_s = interval_s
        self._ahead_s = (burst - 1) * interval_s
        self._least_s = least_s
        self._paid_s = -math.inf
        self.next_s = -math.inf
        """Not before this. May be set: an exception, once."""

    def happened(self, now_s: float) -> None:
        """One was at `now_s`."""
        self._paid_s = max(now_s, self._paid_s) + self._interval_s
        self.next_s = max(now_s + self._least_s, self._paid_s - self._ahead_s)


class TokenBucket:
    """`per_s` tokens a second, at most `burst` saved up. Full at the start."""

    __slots__ = ("_burst", "_left", "_per_s", "_then_s")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._then_s = now_s

    def left(self, now_s: float) -> float:
        """Tokens there are, below 0 if some are owed. A clock that runs backwards gives none."""
        if now_s > self._then_s:
            self._left = min(self._burst, self._left + (now_s - self._then_s) * self._per_s)
        self._then_s = now_s
        return self._left

    def take(self, n: float, now_s: float) -> bool:
        """Take `n` tokens, if there are as many."""
        if self.left(now_s) < n:
            return False
        self._left -= n
        return True

    def spend(self, n: float, now_s: float) -> None:
        """Take `n` tokens, if there are as many or not."""
        self._left = self.left(now_s) - n
