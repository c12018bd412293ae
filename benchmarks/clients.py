"""Many clients streaming from one backbone, some of which stall or leave: what the others notice of them.

    python -m benchmarks.clients [--clients 32] [--bad 8] [--tokens 100] [--rounds 3]

Starts a real backbone (bundled model) with a slot for each client. Two settings, in turns: `clients - bad` clean
clients alone, and all of them, where half of the bad ones stop reading after a few tokens and half hang up. Prints the
time between two tokens of the clean clients, median and 90th percentile, and the ratios; then what a thousand further
requests leave behind (slots, files, memory; trio's tasks go with the connections), a quarter of them at a time: what is
kept has a bound, so the last quarters must add next to nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import trio

from swarmnode.cli.processes import start_node

START_S = 120.0
BUFFER_BYTES = 4096
"""What the kernel takes for a client that has stalled."""
QUARTERS = 4


@dataclass(frozen=True)
class Setting:
    """`n_clean` clients that read, `n_bad` that do not for long."""

    n_clean: int
    n_bad: int
    n_tokens: int


async def stream(api: str, number: int, n_tokens: int, stop_after: int | None = None) -> list[float]:
    """Arrival times of an answer's tokens; up to `stop_after` of them. The connection is the caller's to keep: it is
    closed when this returns.
    """
    times: list[float] = []
    async with await connect(api, number, n_tokens) as connection:
        received = b""
        while True:
            piece = await connection.receive_some()
            if not piece:
                return times
            received += piece
            *events, received = received.split(b"\n\n")
            times += [trio.current_time()] * sum(b'"token"' in event for event in events)
            if stop_after is not None and len(times) >= stop_after:
                return times
            if b"data: [DONE]" in piece:
                return times


async def connect(api: str, number: int, n_tokens: int, *, buffer_bytes: int = 0) -> trio.SocketStream:
    """A connection that has asked for an answer."""
    url = httpx.URL(api)
    opened = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if buffer_bytes:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    await opened.connect((url.host, url.port))
    body = {"prompt": f"{number} times I have", "max_tokens": n_tokens, "stream": True, "temperature": 1.0}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = trio.SocketStream(opened)
    await connection.send_all(head.encode() + content)
    return connection


async def stall(api: str, number: int, n_tokens: int) -> None:
    """Ask, read a little, and then nothing more."""
    async with await connect(api, number, n_tokens, buffer_bytes=BUFFER_BYTES) as connection:
        await connection.receive_some(1000)
        await trio.sleep_forever()


async def gaps(api: str, setting: Setting) -> list[float]:
    """Seconds between two tokens of the clean clients."""
    found: list[float] = []

    async def clean(number: int) -> None:
        times = await stream(api, number, setting.n_tokens)
        found.extend(later - earlier for earlier, later in pairwise(times))

    async with trio.open_nursery() as bad:
        for number in range(setting.n_bad):
            if number % 2:
                bad.start_soon(stall, api, 1000 + number, 4 * setting.n_tokens)
            else:
                bad.start_soon(partial(stream, api, 1000 + number, 4 * setting.n_tokens, stop_after=5))
        async with trio.open_nursery() as nursery:
            for number in range(setting.n_clean):
                nursery.start_soon(clean, number)
        bad.cancel_scope.cancel()
    return found


async def metrics(client: httpx.AsyncClient, api: str) -> dict[str, float]:
    text = (await client.get(f"{api}/metrics")).text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def until_free(api: str, n_slots: int) -> dict[str, float]:
    """Metrics once nobody has a slot, and idle connections have ended."""
    async with httpx.AsyncClient(trust_env=False, timeout=START_S) as client:
        with trio.fail_after(START_S):
            while True:
                found = await metrics(client, api)
                await trio.sleep(6 if found["swarmnode_slots_free"] == n_slots else 0.1)
                if found["swarmnode_slots_free"] == n_slots:
                    return await metrics(client, api)


async def leftovers(api: str, n_requests: int, n_slots: int) -> None:
    """Ask `n_requests` times, every fourth hangs up, and print what is left of it."""
    limit = trio.CapacityLimiter(n_slots)

    async def one(number: int) -> None:
        async with limit:
            await stream(api, number, 8, stop_after=None if number % 4 else 2)

    before = first = await until_free(api, n_slots)
    for quarter in range(QUARTERS):
        numbers = range(quarter * n_requests // QUARTERS, (quarter + 1) * n_requests // QUARTERS)
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(one, number)
        after = await until_free(api, n_slots)
        print(f"requests {numbers.start} to {numbers.stop}: memory {_grown_mb(before, after):+.1f} MB")
        before = after
    print(
        f"{n_requests} requests later: {after['swarmnode_slots_free']:.0f} of {n_slots} slots free, files "
        f"{first['process_open_fds']:.0f} -> {after['process_open_fds']:.0f}, memory "
        f"{_grown_mb(first, after):+.1f} MB"
    )


def _grown_mb(before: dict[str, float], after: dict[str, float]) -> float:
    name = "process_resident_memory_bytes"
    return (after[name] - before[name]) / 1e6


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Everything, on a backbone of its own."""
    n_clean = options.clients - options.bad
    settings = [Setting(n_clean, 0, options.tokens), Setting(n_clean, options.bad, options.tokens)]
    async with trio.open_nursery() as nursery:
        arguments = ["backbone", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--context", "1024"]
        arguments += ["--slots", str(options.clients)]
        backbone = await start_node("backbone", arguments, folder, nursery)
        try:
            api = await backbone.wait_line("api ", START_S)
            await gaps(api, replace_tokens(settings[1], 10))  # graphs are built
            found: list[list[float]] = [[], []]
            for _ in range(options.rounds):
                for place, setting in enumerate(settings):
                    await until_free(api, options.clients)
                    found[place] += await gaps(api, setting)
            show(settings, found)
            await leftovers(api, options.requests, options.clients)
        finally:
            backbone.kill()
            with trio.CancelScope(shield=True):
                await backbone.process.wait()


def replace_tokens(setting: Setting, n_tokens: int) -> Setting:
    return Setting(setting.n_clean, setting.n_bad, n_tokens)


def show(settings: list[Setting], found: list[list[float]]) -> None:
    rows = [np.percentile(np.array(values) * 1e3, (50, 90)) for values in found]
    for setting, row in zip(settings, rows, strict=True):
        print(
            f"{setting.n_clean} clean clients, {setting.n_bad} stalled or gone: "
            f"{row[0]:.1f} ms between tokens (90th percentile {row[1]:.1f})"
        )
    means = [float(np.mean(values)) for values in found]
    ratios = rows[1] / rows[0]
    print(
        f"ratio {ratios[0]:.2f} of medians, {ratios[1]:.2f} of 90th percentiles, {means[1] / means[0]:.2f} of means"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--bad", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, options, Path(folder))


if __name__ == "__main__":
    main()
