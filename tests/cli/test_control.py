"""`swarmnode pause|resume|leave|limits`: what is asked of a running node, and what is printed of its answer."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result

from swarmnode.cli import main
from swarmnode.cli.control import same_node
from swarmnode.config import Folders
from swarmnode.errors import UsageError
from swarmnode.net.control_socket import serve_control

STATE = {
    "node": "abcdefgh", "role": "worker", "paused": "", "memory": "", "budget_bytes": 200_000_000,
    "most_bytes": 300_000_000, "allowed_bytes": 200_000_000, "hours": ["22:00-07:00"], "on_battery": "pause",
    "keep_free_bytes": 10**9, "available_bytes": 3 * 10**9, "running_on_battery": True, "battery_percent": 81,
    "model": "Baker Street 16M", "n_experts": 23, "held_bytes": 2_900_000,
    "memory_bytes": 2_900_000, "rows": 500, "tokens": 40, "device": "CPU",
}  # fmt: skip


class Node:
    """Answers on a node's control socket, in a thread of its own."""

    def __init__(self, home: Path, state: dict[str, Any]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.state = state
        self.path = Folders.under(home).control_socket
        self.path.parent.mkdir(parents=True)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        if "budget_bytes" in request and request["budget_bytes"] > 300_000_000:
            raise UsageError("may hold less, not more")
        return self.state

    async def serve(self, ready: threading.Event, ends: list[Any]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_control, self.path, self.answer))
            ends.append((trio.lowlevel.current_trio_token(), nursery.cancel_scope))
            ready.set()


@contextmanager
def running(home: Path, **changes: Any) -> Iterator[Node]:
    node, ready, ends = Node(home, {**STATE, **changes}), threading.Event(), list[Any]()
    thread = threading.Thread(target=trio.run, args=(node.serve, ready, ends))
    thread.start()
    assert ready.wait(10)
    try:
        yield node
    finally:
        token, scope = ends[0]
        token.run_sync_soon(scope.cancel)
        thread.join()


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--home", str(home)])


@pytest.mark.parametrize(
    ("verb", "changes", "says"),
    [
        (
            "pause",
            {"paused": "told to pause"},
            "abcdefgh is paused; `swarmnode resume --home {home}` goes on",
        ),
        ("resume", {}, "abcdefgh goes on"),
        (
            "resume",
            {"paused": "on battery"},
            "does not yet: on battery (see `swarmnode limits --home {home}`)",
        ),
        ("leave", {}, "abcdefgh leaves"),
    ],
)
def test_a_word_to_the_node(verb: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with running(tmp_path, **changes) as node:
        result = run(tmp_path, verb)
    assert result.exit_code == 0, result.output
    assert says.format(home=shlex.quote(str(tmp_path))) in result.output
    assert node.requests == [{"do": verb}]


def test_the_default_folders_need_no_home() -> None:
    assert same_node("resume", None) == "swarmnode resume"
    assert same_node("resume", Path("a b")) == "swarmnode resume --home 'a b'"


def test_limits_are_shown(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        result = run(tmp_path, "limits")
        as_json = run(tmp_path, "limits", "--json")
    assert node.requests == [{"do": "limits"}] * 2
    assert result.output.splitlines() == [
        "node       abcdefgh, a worker on CPU",
        "now        lending",
        "holds      23 experts, 2.9 MB of Baker Street 16M",
        "budget     200.0 MB (started with 300.0 MB)",
        "hours      22:00-07:00",
        "on battery pause (battery 81 %, in use)",
        "keeps free 1.0 GB of memory; 3.0 GB are available",
        "helped     40 tokens with 500 rows",
    ]
    assert json.loads(as_json.output) == STATE


def test_limits_of_a_machine_that_tells_little(tmp_path: Path) -> None:
    changes = {
        "paused": "told to pause", "memory": "only 9 MB of memory are available", "allowed_bytes": 5_000_000,
        "hours": [], "battery_percent": None, "available_bytes": None, "model": "",
    }  # fmt: skip
    with running(tmp_path, **changes):
        output = run(tmp_path, "limits").output
    for line in (
        "now        paused: told to pause",
        "holds      nothing yet",
        "; 5.0 MB now: only 9 MB of memory are available",
        "hours      always",
        "(no battery is seen)",
        "(the system does not tell)",
    ):
        assert line in output


def test_a_worker_that_holds_nothing_says_what_it_needs(tmp_path: Path) -> None:
    changes = {
        "budget_bytes": 2_000_000, "allowed_bytes": 2_000_000, "least_bytes": 5_308_416, "n_experts": 0,
        "held_bytes": 0, "memory_bytes": 0,
    }  # fmt: skip
    with running(tmp_path, **changes):
        lines = run(tmp_path, "limits").output.splitlines()
    assert lines[1] == "now        not lending"
    assert lines[2] == (
        "holds      nothing: 2.0 MB are too few for one expert of Baker Street 16M, which takes 5,308,416 bytes: "
        "give it a larger budget, or end it"
    )


def test_memory_is_shown_where_it_is_more_than_the_experts(tmp_path: Path) -> None:
    with running(tmp_path, memory_bytes=3_400_000):
        output = run(tmp_path, "limits").output
    assert "holds      23 experts, 2.9 MB of Baker Street 16M, in 3.4 MB of memory\n" in output


def test_limits_are_changed(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        options = [
            "--budget",
            "200MB",
            "--hours",
            "22:00-07:00",
            "--on-battery",
            "serve",
            "--keep-free",
            "1GB",
        ]
        assert run(tmp_path, "limits", *options).exit_code == 0
        assert run(tmp_path, "limits", "--hours", "always").exit_code == 0
        refused = run(tmp_path, "limits", "--budget", "400MB")
    assert node.requests[0] == {
        "do": "limits", "budget_bytes": 200_000_000, "hours": ["22:00-07:00"], "on_battery": "serve",
        "keep_free_bytes": 10**9,
    }  # fmt: skip
    assert node.requests[1] == {"do": "limits", "hours": []}
    assert refused.exit_code == 1
    assert "may hold less, not more" in refused.output


@pytest.mark.parametrize("verb", ["pause", "resume", "leave", "limits"])
def test_nobody_runs(verb: str, tmp_path: Path) -> None:
    result = run(tmp_path, verb)
    assert result.exit_code == 1
    assert f"no node runs in {tmp_path}/data" in result.output
    assert "--home DIR" in result.output


@pytest.mark.parametrize("hours", [["nonsense"], ["always", "22:00-07:00"]])
def test_hours_are_checked_here(hours: list[str], tmp_path: Path) -> None:
    options = [option for item in hours for option in ("--hours", item)]
    assert run(tmp_path, "limits", *options).exit_code == 2
