"""Peak memory of a worker at the real sizes: real processes, a file of 1.7 GB, a budget of 300 MB.

    python -m benchmarks.worker_memory [--model FILE.gguf] [--budget 300MB] [--address-space-mb 900]

A backbone serves the file (without --model a 2-layer one is made in a temporary folder), a worker joins, downloads
its experts and gets the rows of a prompt of 591 tokens and of 16 decode steps; then the worker is restarted and finds
its experts on disk. Printed: VmHWM of the worker in both lives, which the kernel keeps (shared libraries included).
`--address-space-mb` runs the worker under RLIMIT_AS as well.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from benchmarks.big_model import big_model, write_big_model
from benchmarks.machine import memory_of
from swarmnode.cli.processes import NodeProcess, start_node
from swarmnode.cli.sizes import parse_bytes

PROMPT = " ".join(f"{number * 7919 % 9973}" for number in range(120))
"""591 tokens of the byte-level vocabulary that big_model writes, and 591 different rows."""
OVERHEAD_BYTES = 120_000_000
"""What a worker may use beyond its budget: Python, libraries, buffers, graphs."""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Life:
    """One run of the worker."""

    name: str
    held: str
    """Its line about what it serves."""
    peak_bytes: int
    """VmHWM."""
    address_space_bytes: int
    """VmPeak."""
    pairs: int
    """(row, expert) pairs that it computed."""


def small_big_model(folder: Path) -> Path:
    """The smallest file of the real sizes in which a prompt's rows travel: the last layer sees one row only."""
    return write_big_model(folder / "big-2x128.gguf", big_model(2, 128, attention_every=2))


@asynccontextmanager
async def running_backbone(model: Path, folder: Path) -> AsyncIterator[tuple[str, str, trio.Nursery]]:
    """A backbone process: its API's URL, its swarm address, and a nursery for more processes."""
    async with trio.open_nursery() as nursery:
        places = ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]
        node = await start_node(
            "backbone",
            ["backbone", "--send", "always", "--model", str(model), *places],
            folder / "backbone",
            nursery,
        )
        try:
            api = await node.wait_line("api ", TIMEOUT_S)
            yield api, await node.wait_line("swarm ", TIMEOUT_S), nursery
        finally:
            with trio.CancelScope(shield=True):
                await node.stop()


async def measure(
    model: Path, folder: Path, budget: str, address_space_bytes: int | None = None
) -> list[Life]:
    """Two lives of a worker with that budget: the first downloads, the second finds its experts on disk."""
    lives: list[Life] = []
    async with running_backbone(model, folder) as (api, address, nursery):
        for name in ("downloaded", "restarted"):
            arguments = ["join", "--budget", budget, "--bootstrap", address]
            worker = await start_node(f"worker, {name}", arguments, folder / "worker", nursery)
            if address_space_bytes is not None:
                resource.prlimit(worker.pid, resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))
            try:
                lives.append(await _live(worker, name, api))
            finally:
                with trio.CancelScope(shield=True):
                    await worker.stop()
            await _until(api, lambda state: not state["workers"])
    return lives


async def _live(worker: NodeProcess, name: str, api: str) -> Life:
    held = await worker.wait_line("full: ", TIMEOUT_S)
    await _until(api, lambda state: any(entry["standing"] == "serving" for entry in state["workers"]))
    # Each life has a prompt of its own: of one that it has seen the backbone would run nothing again.
    body = {"prompt": f"{name}: {PROMPT}", "max_tokens": 17, "temperature": 0}
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
        answer: dict[str, Any] = (await client.post(f"{api}/v1/completions", json=body)).json()
    memory = memory_of(worker.pid)
    return Life(name, held, memory["VmHWM"], memory["VmPeak"], answer["swarm"]["pairs_remote"])


async def _until(api: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait for a state of the swarm."""
    with trio.fail_after(TIMEOUT_S):
        async with httpx.AsyncClient(trust_env=False) as client:
            # Other processes cannot set an event.
            while not holds((await client.get(f"{api}/api/swarm")).json()):  # noqa: ASYNC110
                await trio.sleep(0.1)


def main() -> int:
    """Measure and print; 1 if a peak is over budget + 120 MB."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--budget", default="300MB")
    parser.add_argument("--address-space-mb", type=int, help="run the worker under this RLIMIT_AS")
    options = parser.parse_args()
    cap_bytes = None if options.address_space_mb is None else options.address_space_mb * 1_000_000
    with tempfile.TemporaryDirectory(prefix="swarmnode-memory-") as name:
        folder = Path(name)
        model = options.model or small_big_model(folder)
        lives = trio.run(partial(measure, model, folder, options.budget, cap_bytes))
    allowed_bytes = parse_bytes(options.budget) + OVERHEAD_BYTES
    print(f"budget {options.budget}, allowed peak {allowed_bytes / 1e6:.0f} MB")
    for life in lives:
        print(
            f"{life.name:12} peak RSS {life.peak_bytes / 1e6:5.0f} MB   address space "
            f"{life.address_space_bytes / 1e6:5.0f} MB   {life.pairs} pairs   [{life.held}]"
        )
    return 0 if all(life.peak_bytes <= allowed_bytes for life in lives) else 1


if __name__ == "__main__":
    sys.exit(main())
