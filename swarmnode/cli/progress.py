"""Progress of long work: a bar on a terminal; elsewhere a plain line now and then, and none for what is soon done."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from swarmnode.cli.common import say
from swarmnode.cli.sizes import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


_LEAST_S = 0.5
"""A rate of less time says nothing."""
PLAIN_S = 5.0
"""Least time between two lines where there is no terminal: pipes and logs keep every one."""


class Pace:
    """When work is told of where every line is kept: once a tenth, PLAIN_S apart. What is done sooner is not told of;
    of other work, the end is.
    """

    def __init__(self) -> None:
        self._told: tuple[float, int] | None = None
        """When it was told of last (or began), and how many tenths there were."""
        self._is_long = False

    def is_due(self, done_bytes: int, total_bytes: int) -> bool:
        """Whether to tell of it now."""
        now_s, tenths = time.monotonic(), 10 * done_bytes // max(1, total_bytes)
        if self._told is None:
            self._told = now_s, tenths
        told_s, told_tenths = self._told
        is_due = tenths > told_tenths and (now_s - told_s >= PLAIN_S or (self._is_long and tenths >= 10))
        if is_due:
            self._told, self._is_long = (now_s, tenths), True
        return is_due


class Progress:
    """One piece of long work, counted in bytes. Shows nothing until the first update."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._pace = Pace()
        self._began: tuple[float, int] | None = None
        """When the first update came, and with how many bytes."""

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes done so far, out of how many."""
        if sys.stdout.isatty():
            self._update_bar(done_bytes, total_bytes)
            return
        rate = self._rate(done_bytes, total_bytes)
        if self._pace.is_due(done_bytes, total_bytes):
            say(
                f"{self._what}: {100 * done_bytes // max(1, total_bytes)} % of {format_bytes(total_bytes)}{rate}"
            )

    def _rate(self, done_bytes: int, total_bytes: int) -> str:
        """Mean rate so far and time left, once there is one: ", 2.5 MB/s, 40 s left"."""
        now_s = time.monotonic()
        began_s, began_bytes = self._began = self._began or (now_s, done_bytes)
        if done_bytes <= began_bytes or now_s - began_s < _LEAST_S:
            return ""
        per_s = (done_bytes - began_bytes) / (now_s - began_s)
        left_s = (total_bytes - done_bytes) / per_s
        left = f", {left_s:.0f} s left" if left_s < 120 else f", {left_s / 60:.0f} min left"
        return f", {format_bytes(per_s)}/s{left if done_bytes < total_bytes else ''}"

    def close(self) -> None:
        """Leave the bar as it is and go on printing below it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update_bar(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            self._bar = _make_bar()
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=total_bytes)
        if self._task is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)


def _make_bar() -> RichProgress:
    from rich import progress  # 3 MB: only where there is a terminal

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
