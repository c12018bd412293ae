"""`swarmnode bench` as a person runs it: workers behind the delaying proxy; it leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import trio

from tests.process.test_commands import TIMEOUT_S, open_processes

pytestmark = pytest.mark.real_time

SMALL = [
    *("--rounds", "1", "--tokens", "12", "--prompt", "4", "--sequences", "1,2", "--worker-threads", "1"),
    *(
        "--workers",
        "1",
        "--budget",
        "1200kB",
    ),  # nine experts: all of them take a worker many rounds of claims
]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command's temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


async def test_a_swarm_at_two_distances(tmp_path: Path, temporary: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "swarmnode.cli", "bench", "swarm", *SMALL, "--rtt", "0,20", "--json"]
    result = await trio.run_process(
        command,
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        env={**os.environ, "SWARMNODE_HOME": str(home)},
    )
    assert result.returncode == 0, result.stderr.decode()
    measured = json.loads(result.stdout)
    assert not measured["kernels"]
    assert [(row["workers"], row["rtt_ms"], row["sequences"]) for row in measured["swarm"]] == [
        (0, None, 1),
        (0, None, 2),
        (1, 0.0, 1),
        (1, 0.0, 2),
        (1, 20.0, 1),
        (1, 20.0, 2),
    ]
    for row in measured["swarm"]:
        assert row["rounds_per_token"] == pytest.approx(row["layers_remote"], abs=0.01)
        assert 0 <= row["layers_remote"] <= row["layers_total"] == 4
        assert bool(row["layers_remote"]) == bool(row["pairs_remote"])
    alone, near, far = measured["swarm"][:2], measured["swarm"][2:4], measured["swarm"][4:]
    assert not any(row["layers_remote"] for row in alone)
    # Which nine experts it holds is drawn: those may be ones that the gate hardly chooses.
    assert any(row["layers_remote"] for row in near)
    assert any(row["layers_remote"] for row in far)
    for row in far:
        assert row["rtt_measured_ms"] >= 20
        waits_s = 0.02 * row["rounds_per_token"]
        assert waits_s * row["tokens_per_s"] <= 1.01 * row["sequences"], "no round is shorter than the RTT"
    assert not home.exists()
    assert not os.listdir(temporary)


async def test_ctrl_c_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    async with open_processes() as processes:
        arguments = ["bench", "swarm", *SMALL, "--rtt", "5000"]
        bench = await processes.start("bench", arguments, tmp_path / "home")
        await bench.wait_line("measuring decode over the workers", TIMEOUT_S)
        assert os.listdir(temporary)
        assert await bench.stop(timeout_s=TIMEOUT_S) == 130
        assert not os.listdir(temporary)
