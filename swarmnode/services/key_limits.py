"""How much each key of the HTTP API may ask: requests at a time, and in any minute. Pure: `now` comes in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarmnode.services.api_keys import ApiKey

WINDOW_S = 60.0


@dataclass(frozen=True)
class Exhausted:
    """Why a key's request is not served now. `retry_after_s`: whole seconds after which it may be."""

    reason: str
    retry_after_s: int


@dataclass
class _Use:
    """Of one key."""

    n_running: int = 0
    began_s: deque[float] = field(default_factory=deque)
    """When the requests of the last minute began; kept for keys with a limit a minute, which it bounds."""


class KeyLimits:
    """The use of all keys. One that has limits and is used has a few bytes here, and 8 for each request of a minute."""

    def __init__(self, now: Callable[[], float], retry_after_s: int) -> None:
        """`now`: seconds, monotonic. `retry_after_s`: how long to wait where nobody knows when a request ends."""
        self._now = now
        self._retry_after_s = retry_after_s
        self._uses: dict[str, _Use] = {}
        """By hash of the key."""

    def __len__(self) -> int:
        return len(self._uses)

    @contextmanager
    def request(self, key: ApiKey) -> Iterator[Exhausted | None]:
        """Count a request of this key until the block ends; not one that is refused, which gets the reason."""
        if key.max_concurrent is None and key.per_minute is None:
            yield None
            return
        use = self._uses.setdefault(key.hash, _Use())
        exhausted = self._exhausted(key, use)
        if exhausted is not None:
            yield exhausted
            return
        use.n_running += 1
        if key.per_minute is not None:
            use.began_s.append(self._now())
        try:
            yield None
        finally:
            use.n_running -= 1
            self._forget_unused()

    def _exhausted(self, key: ApiKey, use: _Use) -> Exhausted | None:
        self._forget_old(use)
        if key.max_concurrent is not None and use.n_running >= key.max_concurrent:
            return Exhausted(
                f"this key may have {key.max_concurrent} requests at a time, and has them",
                self._retry_after_s,
            )
        if key.per_minute is not None and len(use.began_s) >= key.per_minute:
            wait_s = use.began_s[-key.per_minute] + WINDOW_S - self._now()
            return Exhausted(
                f"this key may ask {key.per_minute} times a minute, and has", max(1, math.ceil(wait_s))
            )
        return None

    def _forget_old(self, use: _Use) -> None:
        while use.began_s and use.began_s[0] <= self._now() - WINDOW_S:
            use.began_s.popleft()

    def _forget_unused(self) -> None:
        """Keys that are revoked, among others, leave nothing."""
        for use in self._uses.values():
            self._forget_old(use)
        self._uses = {name: use for name, use in self._uses.items() if use.n_running or use.began_s}
