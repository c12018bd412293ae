"""How much each key of the HTTP API may ask: answers at a time, and in any minute. Pure: `now` comes in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarmnode.counts import counted
from swarmnode.services.api_keys import ApiKey

WINDOW_S = 60.0


@dataclass(frozen=True)
class Exhausted:
    """Why a key's request is not served now. `retry_after_s`: whole seconds after which it may be; None: never, it
    asks for more than the key may ever have."""

    reason: str
    retry_after_s: int | None


@dataclass
class _Use:
    """Of one key."""

    n_running: int = 0
    began_s: deque[float] = field(default_factory=deque)
    """When the answers of the last minute began; kept for keys with a limit a minute, which it bounds."""

    def add(self, n_answers: int, now_s: float, *, by_minute: bool) -> None:
        self.n_running += n_answers
        if by_minute:
            self.began_s.extend([now_s] * n_answers)

    def take_back(self, n_answers: int, began_s: float) -> None:
        """As if they had never been asked for."""
        self.n_running -= n_answers
        for _ in range(min(n_answers, self.began_s.count(began_s))):
            self.began_s.remove(began_s)


class Counted:
    """A request that counts, as one answer until `answers` says how many it asks for."""

    def __init__(self, limits: KeyLimits, key: ApiKey, use: _Use) -> None:
        """Use `KeyLimits.request`."""
        self._limits = limits
        self._key = key
        self._use = use
        self._n = 0
        self._began_s = 0.0

    def answers(self, n_answers: int) -> Exhausted | None:
        """Count so many in place of those so far; if the key may not have them, none, and it gets the reason."""
        if self._n:
            self._use.take_back(self._n, self._began_s)
            self._n = 0
        exhausted = self._limits.exhausted(self._key, self._use, n_answers)
        if exhausted is None:
            self._n, self._began_s = n_answers, self._limits.now()
            self._use.add(n_answers, self._began_s, by_minute=self._key.per_minute is not None)
        return exhausted

    def end(self) -> None:
        """They do not run any more."""
        self._use.n_running -= self._n
        self._n = 0


class KeyLimits:
    """The use of all keys. One that has limits and is used has a few bytes here, and 8 for each answer of a minute."""

    def __init__(self, now: Callable[[], float], retry_after_s: int) -> None:
        """`now`: seconds, monotonic. `retry_after_s`: how long to wait where nobody knows when a request ends."""
        self.now = now
        self._retry_after_s = retry_after_s
        self._uses: dict[str, _Use] = {}
        """By hash of the key."""

    def __len__(self) -> int:
        return len(self._uses)

    @contextmanager
    def request(self, key: ApiKey) -> Iterator[Counted | Exhausted | None]:
        """Count a request of this key until the block ends; not one that is refused, which gets the reason. None for a
        key without limits, which is not counted."""
        if key.max_concurrent is None and key.per_minute is None:
            yield None
            return
        request = Counted(self, key, self._uses.setdefault(key.hash, _Use()))
        exhausted = request.answers(1)
        try:
            yield exhausted or request
        finally:
            request.end()
            self._forget_unused()

    def exhausted(self, key: ApiKey, use: _Use, n_answers: int) -> Exhausted | None:
        """Why a key of this use may not have so many answers more, now or ever."""
        self._forget_old(use)
        at_a_time, per_minute = key.max_concurrent, key.per_minute
        least = min(limit for limit in (at_a_time, per_minute, n_answers) if limit is not None)
        if n_answers > least:
            may = f"{counted(least, 'answer')} {'at a time' if least == at_a_time else 'a minute'}"
            return Exhausted(
                f"this key may have {may}, and this request is for {n_answers}: ask for fewer (n, prompts)",
                None,
            )
        if at_a_time is not None and use.n_running + n_answers > at_a_time:
            has = "has them" if use.n_running >= at_a_time else f"has {use.n_running}"
            return Exhausted(
                f"this key may have {counted(at_a_time, 'answer')} at a time, and {has}", self._retry_after_s
            )
        if per_minute is not None and (n_over := len(use.began_s) + n_answers - per_minute) > 0:
            wait_s = use.began_s[n_over - 1] + WINDOW_S - self.now()
            return Exhausted(
                f"this key may ask for {counted(per_minute, 'answer')} a minute, and has",
                max(1, math.ceil(wait_s)),
            )
        return None

    def _forget_old(self, use: _Use) -> None:
        while use.began_s and use.began_s[0] <= self.now() - WINDOW_S:
            use.began_s.popleft()

    def _forget_unused(self) -> None:
        """Keys that are revoked, among others, leave nothing."""
        for use in self._uses.values():
            self._forget_old(use)
        self._uses = {name: use for name, use in self._uses.items() if use.n_running or use.began_s}
