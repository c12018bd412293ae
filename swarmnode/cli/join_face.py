"""What `swarmnode join` shows: lines, a bar while it downloads, then one line that lives."""

from __future__ import annotations

import logging
from collections import deque

from swarmnode.cli.common import LEAVING, say
from swarmnode.cli.control import too_small
from swarmnode.cli.live_line import LiveLine
from swarmnode.cli.logs import EVENTS, fields_of, log_event
from swarmnode.cli.memory import trim_heap
from swarmnode.cli.progress import Pace, Progress
from swarmnode.cli.sizes import format_bytes
from swarmnode.counts import counted
from swarmnode.services.reports import (
    Connecting,
    Fetched,
    JoinEvent,
    Leaving,
    Lending,
    Listening,
    Paused,
    Planned,
    Resumed,
    Serving,
    Settled,
    Started,
    SteppedBack,
    Stopped,
    Tested,
    Waiting,
)

_DOWNLOAD = "downloading experts"

WINDOW_S = 5.0
"""Rates are means over so long."""
PLAIN_S = 600.0
"""Without a terminal, how it goes is told so often, and only if there is something new."""


class JoinFace:
    """Turns events into lines, or (`as_json`) into log entries."""

    def __init__(self, *, as_json: bool, live: LiveLine | None = None) -> None:
        self._as_json = as_json
        self._download = Progress(_DOWNLOAD)
        self._pace = Pace()
        self._is_downloading = False
        self._live = LiveLine() if live is None else live
        self._recent: deque[Lending] = deque()
        self._told: Lending | None = None

    def close(self) -> None:
        """Leave the terminal as it should be, whatever ended the command."""
        self._download.close()
        self._live.clear()

    def show(self, event: JoinEvent) -> None:
        """Tell the person."""
        if isinstance(event, Serving):
            trim_heap()
        if isinstance(event, Lending):
            self._lending(event)
        elif self._as_json:
            if isinstance(event, Planned):
                self._pace = Pace()  # each try counts from its own beginning
            if not isinstance(event, Fetched) or self._pace.is_due(event.done_bytes, event.total_bytes):
                log_event(event)
        else:
            self._live.clear()
            self._show(event)

    def _show(self, event: JoinEvent) -> None:
        match event:
            case Started():
                say(f"this node is {event.node}")
            case Connecting():
                say(f"dialling {event.address}")
            case Waiting():
                self._end_download()
                say(f"waiting {event.delay_s:.1f} s: {event.reason}")
            case Listening():
                for address in event.addresses:
                    say(f"listening {address}")
            case Paused() | Resumed() | SteppedBack():
                self._end_download()
                say(stance_line(event))
            case Leaving():
                self._end_download()
                say(LEAVING)
            case Stopped():
                say("stopped")
            case _:
                self._show_experts(event)

    def _show_experts(self, event: JoinEvent) -> None:
        match event:
            case Planned():
                self._end_download()
                self._download = Progress(_DOWNLOAD)  # each try counts from its own beginning
                self._is_downloading = event.new_experts > 0
                say(
                    f"downloading {counted(event.new_experts, 'expert')} of {event.model_name} "
                    f"({format_bytes(event.fetch_bytes)}) beside {event.kept_experts} held"
                )
            case Fetched():
                self._download.update(event.done_bytes, event.total_bytes)
                if event.done_bytes >= event.total_bytes:
                    self._end_download()
            case Tested():
                self._end_download()
                self._tested(event)
            case Serving():
                say(
                    f"serving {event.backbone}: {counted(event.n_experts, 'expert')}, "
                    f"{format_bytes(event.held_bytes)}, "
                    f"up to {counted(event.max_rows, 'row')} at once on {event.device}"
                )
            case Settled() if not event.n_experts and event.budget_bytes < event.least_bytes:
                self._end_download()
                say(f"holds nothing: {too_small(event.budget_bytes, event.least_bytes, event.model_name)}")
            case Settled():
                self._end_download()
                say(
                    f"full: {counted(event.n_experts, 'expert')} of {event.model_name}, "
                    f"{format_bytes(event.held_bytes)}"
                )

    def _end_download(self) -> None:
        self._download.close()
        self._is_downloading = False

    def _tested(self, event: Tested) -> None:
        worst = min(event.report.results, key=lambda result: result.min_cosine)
        say(
            f"self-test: {counted(len(event.report.results), 'check')}, lowest cosine {worst.min_cosine:.6f} "
            f"({worst.weights}, width {worst.width}, against {worst.reference})"
        )

    def _lending(self, event: Lending) -> None:
        self._recent.append(event)
        while event.at_s - self._recent[0].at_s > WINDOW_S:
            self._recent.popleft()
        if self._live.is_terminal and not self._as_json:
            if not self._is_downloading:  # the bar is below the last line then
                self._live.show(lending_line(event, self._recent[0]))
            return
        told = self._told or self._recent[0]
        if self._told is None or event.at_s - told.at_s >= PLAIN_S:
            self._told = event
            if event.requests == told.requests:
                return
            if self._as_json:
                fields = {"event": "Lending", **fields_of(event)}
                logging.getLogger(EVENTS).info("Lending", extra={"fields": fields})
            else:
                say(lending_line(event, told))


def stance_line(event: Paused | Resumed | SteppedBack) -> str:
    """What a worker that steps back, or comes back, says."""
    match event:
        case Paused():
            return f"paused: {event.reason}; its experts stay in memory, no rows come"
        case SteppedBack():
            return f"stepping back to {format_bytes(event.budget_bytes)}: {event.reason}"
    return "resumed"


def lending_line(now: Lending, before: Lending) -> str:
    """How it goes, with rates since `before`."""
    if now.pause:
        parts = [f"paused ({now.pause})"]
    else:
        span_s = now.at_s - before.at_s
        rate = (now.rows - before.rows) / span_s if span_s > 0 else 0.0
        parts = [f"{rate:.0f} rows/s" if rate >= 10 or rate == 0 else f"{rate:.1f} rows/s"]
    parts += [
        f"{counted(now.tokens, 'token')} helped",
        f"{format_bytes(now.bytes_in)} in, {format_bytes(now.bytes_out)} out",
        f"{counted(now.n_experts, 'expert')} on {now.device}",
        counted(now.peers, "peer"),
    ]
    return " | ".join([*parts, *([now.power] if now.power else [])])
