"""How much a worker may hold and whether it may work, by what its machine and its owner say. Pure.

Memory under pressure: experts are given up, a quarter at a time, until the pressure ends, and taken again slowly. On
battery, outside the hours set, or when told so: it holds what it has, and gets no rows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarmnode.config import RestraintConfig
from swarmnode.errors import UsageError

OnBattery: TypeAlias = Literal["pause", "serve"]

MINUTES_A_DAY = 24 * 60


@dataclass(frozen=True)
class Hours:
    """A part of each day, in minutes since midnight; `end` may be before `start`: over midnight. Equal: all day."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read "22:00-07:30". UsageError."""
        match = re.fullmatch(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", text.strip(), re.ASCII)
        if match is None:
            raise UsageError(f"{text!r} are no hours; write for example 22:00-07:30")
        start_h, start_min, end_h, end_min = (int(part) for part in match.groups())
        if max(start_h, end_h) > 24 or max(start_min, end_min) > 59:
            raise UsageError(f"{text!r}: there is no such time of day")
        return cls((60 * start_h + start_min) % MINUTES_A_DAY, (60 * end_h + end_min) % MINUTES_A_DAY)

    def holds(self, minute: int) -> bool:
        """Whether a minute of the day is within them; the end is not."""
        return (minute - self.start) % MINUTES_A_DAY < (
            (self.end - self.start) % MINUTES_A_DAY or MINUTES_A_DAY
        )

    def __str__(self) -> str:
        return f"{_time(self.start)}-{_time(self.end)}"


@dataclass(frozen=True)
class Wishes:
    """What the owner wants. `hours`: empty means always. `keep_free_bytes`: None lets RestraintConfig say it."""

    budget_bytes: int
    hours: tuple[Hours, ...] = ()
    on_battery: OnBattery = "pause"
    keep_free_bytes: int | None = None
    is_paused: bool = False


@dataclass(frozen=True)
class Conditions:
    """What the machine says; None for what it does not tell."""

    minute: int
    """Of the day, local time."""
    available_bytes: int | None = None
    total_bytes: int | None = None
    stalled_percent: float | None = None
    on_battery: bool | None = None


@dataclass(frozen=True)
class Stance:
    """What follows: hold at most `budget_bytes`; with a `pause`, which says why, no rows and no downloads."""

    budget_bytes: int
    pause: str = ""
    memory: str = ""
    """Why less than the owner's budget is held; "" if it is not."""


class Restraint:
    """Remembers for how long memory was short, and how far it stepped back."""

    def __init__(self, config: RestraintConfig) -> None:
        self._config = config
        self._cap_bytes: int | None = None
        self._stepped_s = -math.inf
        self._pressed_s = -math.inf

    def decide(self, wishes: Wishes, now: Conditions, held_bytes: int, now_s: float) -> Stance:
        """`held_bytes`: what experts take at the moment. `now_s` must not go back."""
        reserve_bytes = self.reserve_bytes(wishes, now)
        if reason := self._pressure(now, reserve_bytes, held_bytes):
            self._pressed_s = now_s
            if now_s - self._stepped_s >= self._config.settle_s:
                self._step_down(now, reserve_bytes, min(held_bytes, wishes.budget_bytes), now_s)
        elif self._cap_bytes is not None:
            self._step_up(wishes, now, reserve_bytes, now_s)
        cap_bytes = self._cap_bytes
        if cap_bytes is None or cap_bytes >= wishes.budget_bytes:
            return Stance(wishes.budget_bytes, _pause(wishes, now))
        return Stance(cap_bytes, _pause(wishes, now), reason or "memory was short a while ago")

    def reserve_bytes(self, wishes: Wishes, now: Conditions) -> int:
        """Memory that is to stay available; 0 where the machine does not say how much it has."""
        if now.total_bytes is None:
            return 0
        if wishes.keep_free_bytes is not None:
            return wishes.keep_free_bytes
        config = self._config
        wanted = max(config.min_reserve_bytes, config.reserve_share * now.total_bytes)
        return int(min(wanted, config.max_reserve_share * now.total_bytes))

    def _pressure(self, now: Conditions, reserve_bytes: int, held_bytes: int) -> str:
        if now.available_bytes is not None and now.available_bytes < reserve_bytes:
            return f"only {now.available_bytes / 1e6:.0f} MB of memory are available"
        is_stalled = now.stalled_percent is not None and now.stalled_percent >= self._config.stalled_percent
        if is_stalled and held_bytes >= self._config.helpful_share * (now.available_bytes or 0):
            return f"other programs wait for memory ({now.stalled_percent:.0f} % of the time)"
        return ""

    def _step_down(self, now: Conditions, reserve_bytes: int, held_bytes: int, now_s: float) -> None:
        missing = 0 if now.available_bytes is None else reserve_bytes - now.available_bytes
        step = max(missing, math.ceil(self._config.step_share * held_bytes))
        held = held_bytes if self._cap_bytes is None else min(held_bytes, self._cap_bytes)
        self._cap_bytes = max(0, held - step)
        self._stepped_s = now_s

    def _step_up(self, wishes: Wishes, now: Conditions, reserve_bytes: int, now_s: float) -> None:
        """Only what fits beside the reserve, and not before it was calm for long."""
        cap_bytes = self._cap_bytes or 0
        if now_s - max(self._pressed_s, self._stepped_s) < self._config.calm_s:
            return
        step = math.ceil(self._config.step_share * wishes.budget_bytes)
        if now.available_bytes is not None:
            step = min(step, now.available_bytes - reserve_bytes)
        if step <= 0:
            return
        self._stepped_s = now_s
        self._cap_bytes = cap_bytes + step
        if self._cap_bytes >= wishes.budget_bytes:
            self._cap_bytes = None


def _pause(wishes: Wishes, now: Conditions) -> str:
    """Why nothing is to be computed now; "" if nothing speaks against it."""
    if wishes.is_paused:
        return "told to pause"
    if now.on_battery and wishes.on_battery == "pause":
        return "on battery"
    if wishes.hours and not any(hours.holds(now.minute) for hours in wishes.hours):
        return f"it is {_time(now.minute)}, and it lends at {', '.join(map(str, wishes.hours))}"
    return ""


def _time(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
