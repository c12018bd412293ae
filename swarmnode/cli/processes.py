"""Real swarmnode processes on this machine, for `swarmnode demo` and the process tests: start, read, kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from swarmnode.errors import LocalError


class ProcessFailedError(LocalError):
    """A process of ours ended, or did not say in time what was expected of it."""


@dataclass
class NodeProcess:
    """One `swarmnode VERB ...` process; its output is kept and can be waited for, line by line."""

    name: str
    process: trio.Process
    lines: list[str] = field(default_factory=list)
    _changed: trio.Event = field(default_factory=trio.Event)
    _ended: bool = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    async def read(self) -> None:
        """Collect output until it ends; run this in a nursery."""
        assert self.process.stdout is not None
        rest = b""
        async for data in self.process.stdout:
            *whole, rest = (rest + data).split(b"\n")
            self.lines += [line.decode("utf-8", "replace") for line in whole]
            self._wake()
        self._ended = True
        self._wake()

    async def wait_line(self, start: str, timeout_s: float) -> str:
        """The rest of the first line that begins with `start`; ProcessFailedError if none comes in time."""
        with trio.move_on_after(timeout_s):
            while True:
                for line in self.lines:
                    if line.startswith(start):
                        return line.removeprefix(start).strip()
                if self._ended:
                    break
                await self._changed.wait()
        said = "\n".join(self.lines[-12:]) or "(nothing)"
        problem = "ended" if self._ended else f"did not say {start!r} within {timeout_s:.0f} s"
        raise ProcessFailedError(f"the process {self.name!r} {problem}; it said:\n{said}")

    def kill(self) -> None:
        """End it at once, as a power cut would (SIGKILL)."""
        if self.process.returncode is None:
            self.process.kill()

    async def stop(self, timeout_s: float = 5.0) -> int:
        """Ask it to stop (Ctrl-C), kill it when it does not; returns its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
            with trio.move_on_after(timeout_s):
                return await self.process.wait()
            self.process.kill()
        return await self.process.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


async def start_node(name: str, arguments: Sequence[str], home: Path, nursery: trio.Nursery) -> NodeProcess:
    """Start `swarmnode ARGUMENTS` with its own home folder; standard error goes with standard output.

    It has a session of its own: the terminal's Ctrl-C is for the caller, who ends what it started.
    """
    environment = {**os.environ, "SWARMNODE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "swarmnode.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    node = NodeProcess(name, process)
    nursery.start_soon(node.read)
    return node
