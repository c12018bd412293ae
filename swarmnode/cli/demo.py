"""`swarmnode demo`: the whole idea on one machine, with a worker killed in the middle, checked token by token."""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import trio
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from swarmnode.cli.checked import Checked
from swarmnode.cli.common import clear_errors, complain, say
from swarmnode.cli.generate import piece_text, stream_completion, swarm_line
from swarmnode.cli.processes import NodeProcess, ProcessFailedError, start_node
from swarmnode.cli.sizes import check_size
from swarmnode.node.common import stop_on_signal

PROMPT = "To Sherlock Holmes she is always"
START_TIMEOUT_S = 120.0
"""For a node to start, and to take its experts: seconds on an idle machine, over half a minute on one that is busy."""


@dataclass
class Answer:
    """One streamed answer: tokens, text, when each token came, the last account of the swarm."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    times_s: list[float] = field(default_factory=list)
    swarm: dict[str, Any] = field(default_factory=dict)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]


@click.command("demo")
@click.option("--tokens", type=click.IntRange(16, 2000), default=120, show_default=True)
@click.option("--workers", type=click.IntRange(2, 8), default=3, show_default=True)
@click.option(
    "--budget",
    type=Checked("SIZE", check_size),
    metavar="SIZE",
    default="3MB",
    show_default=True,
    help="Budget of each worker.",
)
@click.option("--exact", is_flag=True, help="Let f32 expert rows travel: bit-exact, more bytes.")
@click.option(
    "--kill-at", type=click.IntRange(1), help="Token at which a worker is killed; default: half way."
)
@click.option("--prompt", default=PROMPT, show_default=True)
@clear_errors
def command(tokens: int, workers: int, budget: str, exact: bool, kill_at: int | None, prompt: str) -> None:
    """Run a backbone and workers as real processes on this machine and check the answer.

    One worker is killed in the middle of the answer. Ends with exit code 0 only if the text is the one
    that the backbone gives without workers, rows were computed remotely, and no token stood still.

    \b
    Example: swarmnode demo --tokens 200
    """
    play = Play(prompt, tokens, workers, budget, exact, tokens // 2 if kill_at is None else kill_at)
    if play.kill_at >= tokens:
        raise click.UsageError(f"--kill-at {kill_at} is behind the last of {tokens} tokens")
    went_well = trio.run(_demo, play)
    if went_well is None:
        raise KeyboardInterrupt
    sys.exit(0 if went_well else 1)


@dataclass(frozen=True)
class Play:
    """What is to be played."""

    prompt: str
    n_tokens: int
    n_workers: int
    budget: str
    exact: bool
    kill_at: int


async def _demo(play: Play) -> bool | None:
    """Whether all went well; None when Ctrl-C or SIGTERM came first. Nothing runs or lies about afterwards."""
    went_well: bool | None = None
    with tempfile.TemporaryDirectory(prefix="swarmnode-demo-") as folder:
        async with trio.open_nursery() as nursery:
            nodes: list[NodeProcess] = []
            nursery.start_soon(stop_on_signal, nursery.cancel_scope)
            try:
                went_well = await _act(play, Path(folder), nursery, nodes)
            finally:
                with trio.CancelScope(shield=True):
                    for node in nodes:
                        node.kill()
                        await node.process.wait()
            nursery.cancel_scope.cancel()
    return went_well


async def _act(play: Play, folder: Path, nursery: trio.Nursery, nodes: list[NodeProcess]) -> bool:
    say("starting a backbone with the bundled model ...")
    loopback = ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]
    arguments = ["backbone", *loopback, "--send", "always", *(["--exact"] if play.exact else [])]
    backbone = await start_node("backbone", arguments, folder / "backbone", nursery)
    nodes.append(backbone)
    api = await backbone.wait_line("api ", START_TIMEOUT_S)
    address = await backbone.wait_line("swarm ", START_TIMEOUT_S)

    say("asking it alone, for the text that must come out ...")
    body = {"prompt": play.prompt, "max_tokens": play.n_tokens, "temperature": 0.0}
    alone = await _ask(api, body, lambda answer: None)

    say(f"{play.n_workers} workers join with a budget of {play.budget} each ...")
    join = ["join", "--budget", play.budget, "--listen", "127.0.0.1:0", "--bootstrap", address]
    workers = []
    for number in range(1, play.n_workers + 1):
        workers.append(await start_node(f"worker {number}", join, folder / f"worker{number}", nursery))
        nodes.append(workers[-1])
    for worker in workers:
        say(f"  {worker.name} holds {await worker.wait_line('full: ', START_TIMEOUT_S)}")
    state = await _wait_serving(api, play.n_workers)

    say()
    victim = workers[1]
    stage = Stage(Console(), play.prompt, kill_at=play.kill_at, kill=victim.kill, victim=victim.name)
    with stage.live():
        helped = await _ask(api, body, stage.show)
    say()
    return _verdict(alone, helped, play.n_workers, state["deadline_ms"] / 1e3)


@dataclass
class Stage:
    """Shows the answer as it comes, with a line about the swarm, and kills the victim half way."""

    console: Console
    prompt: str
    kill_at: int
    kill: Callable[[], None]
    victim: str
    _live: Live | None = None
    _killed: bool = False
    _shown: int = 0

    def live(self) -> Live:
        """The context to stream in: redraws on a terminal, prints plain lines elsewhere."""
        self._live = Live(console=self.console, refresh_per_second=12, auto_refresh=self.console.is_terminal)
        return self._live

    def show(self, answer: Answer) -> None:
        """Called after every token, from the reading thread."""
        if not self._killed and len(answer.tokens) >= self.kill_at:
            self._killed = True
            self.kill()
            if not self.console.is_terminal:
                say(f"  --- killing {self.victim} (kill -9) ---")
        note = f" | {self.victim} was killed at token {self.kill_at}" if self._killed else ""
        if self.console.is_terminal and self._live is not None:
            line = Text(swarm_line(answer.swarm) + note, style="dim")
            self._live.update(Group(Text(self.prompt, style="bold") + Text(answer.text), line))
        elif len(answer.tokens) % 24 == 0:
            say(answer.text[self._shown :].replace("\n", " "))
            say(f"  [{swarm_line(answer.swarm)}{note}]")
            self._shown = len(answer.text)


async def _ask(api: str, body: dict[str, Any], on_token: Callable[[Answer], None]) -> Answer:
    """Stream one answer in a thread (httpx blocks), so that the processes' output is read meanwhile.

    When this is cancelled, the thread ends with the backbone that it asks.
    """
    answer = Answer()
    lock = threading.Lock()

    def stream() -> None:
        for piece in stream_completion(api, {**body, "stream": True}, chat=False):
            with lock:
                answer.text += piece_text(piece)
                answer.swarm = piece.get("swarm", answer.swarm)
                if "token" in piece:
                    answer.tokens.append(piece["token"])
                    answer.times_s.append(time.perf_counter())
                    on_token(answer)

    await trio.to_thread.run_sync(stream, abandon_on_cancel=True)
    return answer


async def _wait_serving(api: str, n_workers: int) -> dict[str, Any]:
    """Wait until the backbone has probed every worker; returns its state."""
    async with httpx.AsyncClient(trust_env=False) as client:
        with trio.move_on_after(START_TIMEOUT_S):
            while True:
                state: dict[str, Any] = (await client.get(f"{api}/api/swarm")).json()
                if sum(worker["standing"] == "serving" for worker in state["workers"]) >= n_workers:
                    return state
                await trio.sleep(0.1)
    raise ProcessFailedError(f"not all {n_workers} workers serve after {START_TIMEOUT_S:.0f} s: {state}")


def longest_allowed_s(median_s: float, deadline_s: float) -> float:
    """Seconds that a token may take: the deadline, and 20 % over the median or 100 ms, which a machine that does other
    things, too, takes from a process now and then."""
    return deadline_s + max(1.2 * median_s, 0.1)


def _verdict(alone: Answer, helped: Answer, n_workers: int, deadline_s: float) -> bool:
    """Print what held and what did not; True when everything did."""
    swarm = helped.swarm
    median_s, longest_s = statistics.median(helped.gaps_s), max(helped.gaps_s)
    allowed_s = longest_allowed_s(median_s, deadline_s)
    checks = {
        "tokens are identical to the run without workers": alone.tokens == helped.tokens,
        "rows were computed by every worker": len(swarm["workers"]) == n_workers
        and all(worker["pairs"] > 0 for worker in swarm["workers"].values()),
        f"no token took longer than the deadline and what a busy machine adds ({allowed_s * 1e3:.0f} ms)": longest_s
        <= allowed_s,
    }
    say(swarm_line(swarm))
    slowest = 2 + helped.gaps_s.index(longest_s)
    say(
        f"time between tokens: median {median_s * 1e3:.1f} ms, longest {longest_s * 1e3:.1f} ms "
        f"(before token {slowest})"
    )
    for text, held in checks.items():
        say(f"  {'ok  ' if held else 'FAIL'} {text}")
    if all(checks.values()):
        say("identical to the run without workers")
        return True
    complain(f"without workers: {alone.text!r}\nwith workers:    {helped.text!r}")
    return False
