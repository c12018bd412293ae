"""Logs: lines or JSON, and no secret in either."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.cli.logs import JsonLines, Lines, fields_of, hide_secrets
from swarmnode.compute.self_test import SelfTestReport, WidthResult
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.invite import Invite
from swarmnode.services import reports
from swarmnode.services.reports import Listening, Serving
from swarmnode.wire.secret import NetworkSecret

SECRET = NetworkSecret(bytes(range(32)))
ADDRESS = PeerAddress(NodeKey.from_seed(bytes(32)).node_id, "127.0.0.1", 1)
LINK = str(Invite((ADDRESS,), "home", SECRET))


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("swarmnode.net", logging.WARNING, __file__, 1, message, arguments, None)


@pytest.mark.parametrize("formatter", [Lines(), JsonLines()], ids=["lines", "json"])
def test_secrets_are_hidden(formatter: logging.Formatter) -> None:
    for text, secret in (
        (LINK, SECRET.text),
        ("Authorization: Bearer abcdefghijkl", "abcdefghijkl"),
        ("the key sk-abcdefghijklmn is wrong", "abcdefghijklmn"),
    ):
        line = formatter.format(record("what was given: %s", text))
        assert secret not in line
        assert "[hidden]" in line
    assert hide_secrets("a secret thing, a task-list") == "a secret thing, a task-list"


def test_a_json_line() -> None:
    entry = json.loads(JsonLines().format(record("%s: lost", "Grüße")))
    assert entry["time"].endswith("+00:00")
    del entry["time"]
    assert entry == {"level": "warning", "logger": "swarmnode.net", "message": "Grüße: lost"}


def test_an_error_has_its_traceback_in_the_same_line() -> None:
    try:
        raise ValueError(LINK)
    except ValueError:
        error = sys.exc_info()
    entry = record("failed")
    entry.exc_info = error
    line = JsonLines().format(entry)
    assert "\n" not in line
    assert "ValueError" in json.loads(line)["error"]
    assert SECRET.text not in line


def test_events_are_plain() -> None:
    assert fields_of(Serving("abc", 3, 4, 5, "CPU")) == {
        "backbone": "abc", "n_experts": 3, "held_bytes": 4, "max_rows": 5, "device": "CPU",
    }  # fmt: skip
    assert fields_of(Listening((ADDRESS,))) == {"addresses": [str(ADDRESS)]}


def test_a_self_test_is_told_in_full() -> None:
    """It has no name of its own, and was logged as null."""
    result = WidthResult(64, "Q4_K+Q6_K", "float64", 0.9996, 0.05, 0.99, True)
    entry = json.loads(json.dumps(fields_of(reports.Tested(SelfTestReport("CPU", (result,))))))
    assert entry["report"]["device"] == "CPU"
    assert entry["report"]["results"] == [
        {"width": 64, "weights": "Q4_K+Q6_K", "reference": "float64", "min_cosine": 0.9996, "max_abs_diff": 0.05,
         "threshold": 0.99, "passed": True},
    ]  # fmt: skip


def test_a_worker_logs_json_and_no_secret(tmp_path: Path) -> None:
    """A whole command, with all logs on, that cannot start: each line is JSON, and the link's secret in none."""
    code = (
        "import logging, swarmnode.cli.join as join\n"
        "from swarmnode.services.reports import Started\n"
        "async def fail(options, report):\n"
        "    logging.getLogger('swarmnode').debug('bootstrap %s', LINK)\n"
        "    report(Started('abcdefgh'))\n"
        f"LINK = {LINK!r}\n"
        "join.run_worker = fail\n"
        "join.command(['--log-json', '-vv', '--budget', '3MB', '--bootstrap', LINK])\n"
    )
    environment = {"SWARMNODE_HOME": str(tmp_path), "PATH": "/bin", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    assert found.stdout == ""
    entries = [json.loads(line) for line in found.stderr.splitlines()]
    assert [entry["event"] for entry in entries if "event" in entry] == ["Started", "Stopped"]
    assert any(entry["level"] == "debug" for entry in entries)
    assert SECRET.text not in found.stderr
