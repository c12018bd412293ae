"""Command lines of README and docs as processes: which there are, what stands for their placeholders, how they went."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import trio

from swarmnode.cli.processes import NodeProcess
from tests.meta.test_documented_commands import cases, group_of, words_of

TIMEOUT_S = 90.0
AT_ONCE = 6
"""Commands at a time. Those that join wait for some seconds, until they know what is scarce, and compute little."""


@dataclass(frozen=True)
class Command:
    """A command line and what it must do.

    `line`: as `documented` gives it, or one of the test's own for options that the docs name without a line. `says`: a
    regular expression that its output must hold, standard error included. `more`: options that make it shorter.
    `goes_on`: it is ended by Ctrl-C as soon as it said that. `ours`: the docs have its options, but no such line.
    """

    line: str
    says: str
    code: int = 0
    stdin: str = ""
    more: str = ""
    goes_on: bool = False
    ours: bool = False


def documented() -> frozenset[str]:
    """Every command line of the documents: its words behind `swarmnode`, without prompts, comments and brackets."""
    return frozenset(filter(None, (_plain(line) for _, line in cases())))


def _plain(line: str) -> str:
    line = line.replace("--bootstrap ...", "--bootstrap SOURCE").replace("join ...", "join --budget 300MB")
    return " ".join(word for word in words_of(line)[1:] if word != "...")


def is_name(line: str) -> bool:
    """Whether it only names a verb: click would miss an argument that the verb cannot do without."""
    command, words = group_of(["swarmnode", *line.split()])
    assert command is not None
    if any(word.startswith("-") for word in words):
        return False
    needed = [param for param in command.params if param.required]
    return any(isinstance(param, click.Option) for param in needed) or len(words) < len(needed)


def verb_of(line: str) -> str:
    """`models add` of a line with these words."""
    command, words = group_of(["swarmnode", *line.split()])
    assert command is not None
    return " ".join(line.split()[: len(line.split()) - len(words)])


@dataclass(frozen=True)
class Place:
    """Where commands run: a user's home, a folder to be in, variables, and what stands for the docs' placeholders."""

    home: Path
    folder: Path
    variables: Mapping[str, str]
    values: Mapping[str, str]

    def words(self, line: str) -> list[str]:
        """The words of a line with everything put in. Texts of several words are `values`, too."""
        for name, value in sorted(self.values.items(), key=lambda item: -len(item[0])):
            line = re.sub(
                rf"(?<![\w./-]){re.escape(name)}(?![\w.-])",
                value.replace(" ", "\0").replace("\\", r"\\"),
                line,
            )
        return [word.replace("\0", " ") for word in line.split()]

    def environment(self) -> dict[str, str]:
        """As a person's: nothing of this process' settings, folders of the system below `home`."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SWARMNODE_", "XDG_"))
        }
        return {**kept, "HOME": str(self.home), "PYTHONUNBUFFERED": "1", **self.variables}


@dataclass
class Stage:
    """Runs commands in processes and keeps what went wrong, so that one look shows all of it."""

    nursery: trio.Nursery
    limiter: trio.CapacityLimiter
    nodes: list[NodeProcess]
    problems: list[str]
    n_run: int = 0

    async def play(self, place: Place, *chains: Sequence[Command]) -> None:
        """Run chains beside each other, the commands of each one after the other."""
        async with trio.open_nursery() as nursery:
            for chain in chains:
                nursery.start_soon(self._chain, place, chain)

    async def _chain(self, place: Place, chain: Sequence[Command]) -> None:
        for command in chain:
            self.n_run += 1
            async with self.limiter:
                await (self._until_said if command.goes_on else self._run)(place, command)

    async def _run(self, place: Place, command: Command) -> None:
        run = partial(
            subprocess.run,
            [sys.executable, "-m", "swarmnode.cli", *place.words(f"{command.line} {command.more}")],
            input=command.stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            cwd=place.folder,
            env=place.environment(),
            check=False,
        )
        result: subprocess.CompletedProcess[str] = await trio.to_thread.run_sync(run)
        self._judge(command, result.returncode, result.stdout)

    async def _until_said(self, place: Place, command: Command) -> None:
        node = await self.start(place, command)
        code = await node.stop(TIMEOUT_S)
        self._judge(command, code, "\n".join(node.lines))

    async def start(self, place: Place, command: Command) -> NodeProcess:
        """Start a node; it has said what it must, or has ended, when this returns."""
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "swarmnode.cli", *place.words(f"{command.line} {command.more}")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=place.folder,
            env=place.environment(),
            start_new_session=True,
        )
        node = NodeProcess(command.line, process)
        self.nodes.append(node)
        self.nursery.start_soon(node.read)
        with trio.move_on_after(TIMEOUT_S):
            said = partial(re.search, command.says)
            while process.returncode is None and not any(map(said, node.lines)):  # noqa: ASYNC110 - as in the kit
                await trio.sleep(0.05)
        return node

    def _judge(self, command: Command, code: int, output: str) -> None:
        if code != command.code:
            self.problems.append(f"{command.line}: ended with {code}, not {command.code}\n{output[-1500:]}")
        elif not re.search(command.says, output, re.MULTILINE):
            self.problems.append(f"{command.line}: does not say {command.says!r}\n{output[-1500:]}")
