"""What `swarmnode join` shows: on a terminal a line that lives, elsewhere lines now and then, or JSON."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from typing import Any

import pytest

from swarmnode.cli.join_face import JoinFace, lending_line
from swarmnode.cli.live_line import LiveLine
from swarmnode.cli.progress import Progress
from swarmnode.services.reports import (
    Fetched,
    Leaving,
    Lending,
    Paused,
    Planned,
    Resumed,
    Settled,
    SteppedBack,
    Stopped,
)

LENDING = Lending(
    at_s=100.0, model="M", n_experts=23, held_bytes=2_900_000, memory_bytes=2_900_000, requests=5, rows=40, tokens=12,
    bytes_in=3_000, bytes_out=4_000_000, fetched_bytes=0, device="CPU", peers=3, pause="", power="",
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def later(seconds: float, rows: int, **changes: Any) -> Lending:
    return replace(LENDING, at_s=100 + seconds, rows=40 + rows, requests=5 + rows, **changes)


def test_the_line() -> None:
    assert lending_line(later(2, 100), LENDING) == (
        "50 rows/s | 12 tokens helped | 3.0 kB in, 4.0 MB out | 23 experts on CPU | 3 peers"
    )
    line = lending_line(later(2, 1, peers=1, power="battery 80 %"), LENDING)
    assert line.startswith("0.5 rows/s | ")
    assert line.endswith(" | 1 peer | battery 80 %")
    assert lending_line(LENDING, LENDING).startswith("0 rows/s")
    assert lending_line(later(1, 0, pause="on battery"), LENDING).startswith(
        "paused (on battery) | 12 tokens"
    )


def test_on_a_terminal_it_lives_and_makes_room(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    face = JoinFace(as_json=False, live=LiveLine(terminal))
    face.show(LENDING)
    face.show(later(1, 20))
    assert terminal.getvalue().count("\r\x1b[2K") == 2
    assert "20 rows/s" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    face.show(Paused("on battery"))
    assert terminal.getvalue().endswith("\r\x1b[2K")
    assert capsys.readouterr().out == "paused: on battery; its experts stay in memory, no rows come\n"
    face.show(Planned("M", 0, 5, 100, 100))
    before = terminal.getvalue()
    face.show(later(3, 20))
    assert terminal.getvalue() == before  # the bar has the last line
    face.show(Fetched(100, 100))
    face.show(later(4, 20))
    assert terminal.getvalue() != before
    face.close()
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    terminal = Terminal()
    face = JoinFace(as_json=False, live=LiveLine(terminal))
    for second in range(20):
        face.show(later(second, 100 * second if second < 10 else 1000))
    assert "| 12 tokens" in terminal.getvalue()
    assert terminal.getvalue().rpartition("\x1b[2K")[2].startswith("0 rows/s")


def test_elsewhere_it_is_told_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    face = JoinFace(as_json=False, live=LiveLine(io.StringIO()))
    for second in range(0, 1900, 10):
        face.show(later(second, min(second, 900)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["1.0", "0.5"]  # nothing new: nothing said


def test_other_events(capsys: pytest.CaptureFixture[str]) -> None:
    face = JoinFace(as_json=False, live=LiveLine(io.StringIO()))
    for event in (
        SteppedBack("memory is short", 5_000_000),
        Resumed(),
        Settled("M", 3, 4),
        Settled("M", 0, 0, budget_bytes=2_000_000, least_bytes=5_308_416),
        Leaving(),
        Stopped(),
    ):
        face.show(event)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stepping back to 5.0 MB: memory is short"
    assert lines[1] == "resumed"
    assert lines[3].startswith(
        "holds nothing: 2.0 MB are too few for one expert of M, which takes 5,308,416 bytes"
    )
    assert lines[4].startswith("leaving: ")
    assert lines[5] == "stopped"


def test_as_json(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO)
    face = JoinFace(as_json=True, live=LiveLine(Terminal()))
    face.show(Paused("on battery"))
    face.show(LENDING)
    face.show(later(601, 5))
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert fields[0] == {"event": "Paused", "reason": "on battery"}
    assert (fields[1]["event"], fields[1]["rows"]) == ("Lending", 45)
    assert capsys.readouterr().out == ""


def test_progress_has_a_rate_and_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("swarmnode.cli.progress.time.monotonic", lambda: clock[0])
    bar = Progress("downloading")
    for second in range(0, 101, 10):
        clock[0] = float(second)
        bar.update(second * 3_000_000, 300_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "downloading: 10 % of 300.0 MB, 3.0 MB/s, 90 s left"
    assert lines[-1] == "downloading: 100 % of 300.0 MB, 3.0 MB/s"


@pytest.mark.parametrize(
    ("took_s", "shown"),
    [(4.0, []), (9.0, ["56 %", "100 %"]), (30.0, ["17 %", "34 %", "51 %", "68 %", "85 %", "100 %"])],
)
def test_what_is_soon_done_fills_no_log(
    took_s: float,
    shown: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    clock = [0.0]
    monkeypatch.setattr("swarmnode.cli.progress.time.monotonic", lambda: clock[0])
    faces = [JoinFace(as_json=False), JoinFace(as_json=True)]
    for percent in range(101):
        clock[0] = took_s * percent / 100
        for face in faces:
            face.show(Fetched(percent, 100))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(" of")[0] for line in lines] == shown
    told = [f"{record.__dict__['fields']['done_bytes']} %" for record in caplog.records]
    assert told == shown
    faces[1].show(Planned("M", 0, 5, 100, 100))
    for clock[0], percent in ((100.0, 0), (106.0, 50)):
        faces[1].show(Fetched(percent, 100))
    assert caplog.records[-1].__dict__["fields"]["done_bytes"] == 50, "another try is told of, too"
