"""What pages are kept up to date with: one look at the swarm a tick, shared by all of them, as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from swarmnode.services.dashboard_delta import State, delta_of
from swarmnode.services.runners import Runner


@dataclass(frozen=True)
class Tick:
    """One moment. `change` is the event that leads here from the tick before."""

    number: int
    at_s: float
    state: State
    change: bytes


class EventFeed:
    """Looks no more often than every `interval_s`, and only while somebody asks.

    Keeps one state and one event; readers keep the number of the tick that they have, so one that falls behind costs
    nothing and gets a snapshot.
    """

    def __init__(
        self,
        look: Callable[[], State],
        history: Callable[[], dict[str, Any]],
        threads: Runner,
        interval_s: float,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        """`look` and `history` run here, JSON is made on `threads`."""
        self._look = look
        self._history = history
        self._threads = threads
        self._now = now
        self._lock = trio.Lock()
        self._tick: Tick | None = None
        self.interval_s = interval_s

    async def current(self) -> Tick:
        """The newest tick, not older than the interval."""
        async with self._lock:
            before = self._tick
            if before is not None and self._now() < before.at_s + self.interval_s:
                return before
            at_s, state = self._now(), self._look()
            if before is None:
                self._tick = Tick(1, at_s, state, b"")
            else:
                number = before.number + 1
                change = await self._threads.run(partial(_change, number, before.state, state))
                self._tick = Tick(number, at_s, state, change)
            return self._tick

    async def snapshot(self, tick: Tick) -> bytes:
        """The event that says all of a tick, with the curves up to now."""
        history = self._history()
        return await self._threads.run(
            lambda: event("snapshot", tick.number, {**tick.state, "history": history})
        )


def event(name: str, number: int, value: Mapping[str, Any]) -> bytes:
    """A server-sent event: `value` with its number, as one line of JSON."""
    data = json.dumps({"number": number, **value}, separators=(",", ":"))
    return f"event: {name}\nid: {number}\ndata: {data}\n\n".encode()


def _change(number: int, before: State, after: State) -> bytes:
    return event("delta", number, delta_of(before, after))
