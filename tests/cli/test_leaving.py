"""What a node prints between "leaving" and its end: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swarmnode.cli import main
from swarmnode.cli.leaving import until_leaving
from swarmnode.services.reports import (
    CoverageChanged,
    Leaving,
    Settled,
    SteppedBack,
    Stopped,
    Waiting,
)

WAITING = Waiting("nobody answers", 2.0)
LATE: dict[str, tuple[Any, ...]] = {
    "join": (WAITING, Settled("M", 3, 4), SteppedBack("memory is short", 5)),
    "backbone": (WAITING, CoverageChanged(1, 2)),
}


@pytest.mark.parametrize("verb", sorted(LATE))
def test_nothing_follows_but_the_end(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker once told of downloads, and a backbone of experts that nobody covered, after its goodbye."""

    async def node(options: object, report: Callable[[Any], None]) -> None:
        for event in (*LATE[verb], Leaving(), *LATE[verb]):
            report(event)

    monkeypatch.setattr(f"swarmnode.cli.{verb}.run_{'worker' if verb == 'join' else verb}", node)
    options = ["--budget", "3MB", "--listen", "127.0.0.1:1"] if verb == "join" else []
    result = CliRunner().invoke(main, [verb, *options, "--home", str(tmp_path)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == len(LATE[verb]) + 2
    assert lines[-2].startswith("leaving: ")
    assert lines[-1] == "stopped"


def test_entries_of_the_log_end_as_well() -> None:
    shown: list[object] = []
    show = until_leaving(shown.append)
    for event in (WAITING, Leaving(), WAITING, Leaving(), Stopped()):
        show(event)
    assert shown == [WAITING, Leaving(), Stopped()]
