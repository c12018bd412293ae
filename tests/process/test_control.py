"""A real worker that is told things by its owner, and a backbone that is told to leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.process.test_commands import TIMEOUT_S, ended, open_processes, start_backbone

pytestmark = pytest.mark.real_time


def tell(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "swarmnode.cli", *arguments, "--home", str(home)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def scheduling_of(pid: int) -> set[int]:
    """The classes of all threads of a process."""
    return {os.sched_getscheduler(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


async def test_pause_limits_resume_and_leave(tmp_path: Path) -> None:
    async with open_processes() as processes:
        backbone, address, _ = await start_backbone(tmp_path, processes)
        home = tmp_path / "worker"
        join = [
            "join",
            "--budget",
            "4MB",
            "--on-battery",
            "serve",
            "--keep-free",
            "1MB",
            "--bootstrap",
            address,
        ]
        worker = await processes.start("worker", join, home)
        await worker.wait_line("full: ", TIMEOUT_S)
        if sys.platform == "linux":
            assert scheduling_of(worker.pid) == {os.SCHED_BATCH}, "a worker gives way"
            assert scheduling_of(backbone.pid) == {os.SCHED_OTHER}

        assert "is paused" in await trio.to_thread.run_sync(tell, home, "pause")
        await worker.wait_line("paused: told to pause", TIMEOUT_S)
        short = await worker.wait_line("this node is ", TIMEOUT_S)
        await backbone.wait_line(f"worker {short} paused: ", TIMEOUT_S)
        shown = await trio.to_thread.run_sync(tell, home, "limits", "--budget", "2MB")
        assert "budget     2.0 MB (started with 4.0 MB)" in shown
        assert "paused: told to pause" in shown
        assert "goes on" in await trio.to_thread.run_sync(tell, home, "resume")
        await worker.wait_line("resumed", TIMEOUT_S)

        assert "leaves" in await trio.to_thread.run_sync(tell, home, "leave")
        assert await ended(worker) == 0
        assert worker.lines[-2].startswith("leaving: ")
        assert worker.lines[-1] == "stopped"
        assert not (home / "data" / "control.sock").exists()
        assert "leaves" in await trio.to_thread.run_sync(tell, tmp_path / "backbone", "leave")
        assert await ended(backbone) == 0
