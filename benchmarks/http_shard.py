"""The HTTP route that cuts shards: how fast it sends one, beside the same bytes as a plain file from the same server.

Called by `python -m benchmarks.slices`. The server is a process of its own (Hypercorn as a backbone runs it, and a
node's listener for rows); the client reads over loopback and keeps nothing. In each round:

* the shard as the route makes it, out of the model's mapped file;
* the shard as a file that was written before, by Starlette's FileResponse;
* 6 KB round trips of rows with the same process, a layer's compute apart: idle, and while another process downloads the
  shard again and again.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from benchmarks.channel import MODEL, SMALL_BYTES, answer, endpoint
from swarmnode.api import serve as api_serve
from swarmnode.api.shard_route import ShardRoute
from swarmnode.api.token_guard import TokenGuard
from swarmnode.config import Config, ContactConfig
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Peer
from swarmnode.net.tcp import TcpTransport
from swarmnode.services.connections import Connections
from swarmnode.services.runners import Threads
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.shard import write_shard
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.messages import Experts

TOKEN = "benchmark-" * 4
DECODES = 300

Figures = dict[str, list[float]]


async def _run_server(pipe: Any, path: Path, copy: Path, encoded: bytes, model_id: bytes) -> None:
    """A backbone as far as this needs one, until the process is terminated."""
    manifest = Manifest.decode_untrusted(encoded, model_id)
    guard = TokenGuard(TOKEN)
    connections = Connections(endpoint(1).credentials.node_id, ContactConfig(), trio.current_time)

    async def plain(request: Request) -> Response:
        return FileResponse(copy)

    with ModelIndex.open(path) as index:
        config = Config()
        rows_at_s = connections.rows_at_s
        shards = ShardRoute(manifest, index, (), Threads(config.node_api.threads), config, rows_at_s)
        app = Starlette(
            routes=[
                Route("/api/models/{model}/expert-shard", guard(shards.answer)),
                Route("/plain", guard(plain)),
            ]
        )
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener, trio.open_nursery() as nursery:
            await nursery.start(api_serve.run, app, listener)
            rows = partial(
                serve,
                TcpTransport(),
                endpoint(1),
                handlers={Experts: answer},
                host="127.0.0.1",
                port=0,
                on_peer=connections.attended(_wait_closed),
            )
            places = await nursery.start(rows)
            pipe.send((listener.socket.getsockname()[1], places[0][1]))


async def _wait_closed(peer: Peer) -> None:
    await peer.wait_closed()


def _server(pipe: Any, path: Path, copy: Path, encoded: bytes, model_id: bytes) -> None:
    trio.run(_run_server, pipe, path, copy, encoded, model_id)


def download(port: int, target: str, buffer: bytearray) -> float:
    """MB/s of one GET whose body is read and forgotten."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        started_s = time.perf_counter()
        connection.sendall(head.encode())
        n_read = connection.recv_into(buffer)
        answer_head, _, begun = bytes(buffer[:n_read]).partition(b"\r\n\r\n")
        assert answer_head.startswith(b"HTTP/1.1 200"), answer_head
        lengths = [line for line in answer_head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        n_bytes = int(lengths[0].split(b":")[1])
        left_bytes = n_bytes - len(begun)
        while left_bytes > 0:
            left_bytes -= connection.recv_into(buffer)
        return n_bytes / 1e6 / (time.perf_counter() - started_s)


def _downloads(pipe: Any, http_port: int, target: str) -> None:
    """In a process of its own, as clients are: download until told to stop, then say how fast each was, in MB/s."""
    buffer = bytearray(1 << 20)
    rates_mb = [download(http_port, target, buffer)]
    pipe.send("under way")
    while not pipe.poll():
        rates_mb.append(download(http_port, target, buffer))
    pipe.send(rates_mb[1:])


async def _decodes(peer: Peer) -> list[float]:
    """Microseconds of each round trip, with the pause of a layer's own compute between them."""
    times_us: list[float] = []
    body = bytes(SMALL_BYTES)
    for _ in range(DECODES):
        started_s = time.perf_counter()
        await peer.request(Experts(MODEL, 1, "experts", "f16", 1, 1), (body, bytes(6)))
        times_us.append(1e6 * (time.perf_counter() - started_s))
        await trio.sleep(0.002)
    return times_us


async def _rows(port: int, http_port: int, target: str, into: Figures) -> None:
    """Round trips of rows, idle and beside downloads."""
    address = PeerAddress(endpoint(1).credentials.node_id, "127.0.0.1", port)
    async with trio.open_nursery() as nursery:
        peer: Peer = await nursery.start(partial(dial, TcpTransport(), address, endpoint(2), handlers={}))
        idle_us = await _decodes(peer)
        with _child(_downloads, http_port, target) as pipe:
            await trio.to_thread.run_sync(pipe.recv)
            beside_us = await _decodes(peer)
            pipe.send("stop")
            gentle_mb = await trio.to_thread.run_sync(pipe.recv)
        nursery.cancel_scope.cancel()
    into["http_gentle_mb"].append(statistics.median(gentle_mb))
    into["http_idle_us"].append(statistics.median(idle_us))
    into["http_beside_us"].append(statistics.median(beside_us))
    into["http_decode_ratio"].append(into["http_beside_us"][-1] / into["http_idle_us"][-1])


@contextmanager
def _child(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that runs `target(pipe, *arguments)`, until the block ends; gives the other end of the pipe."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


def run(
    index: ModelIndex, path: Path, manifest: Manifest, item: ExpertRange, folder: Path, rounds: int
) -> dict[str, float]:
    """Medians of `rounds` rounds after one that warms up; a shard of `item`, which is written to `folder`, too."""
    names = ["http_mb", "plain_mb", "http_gentle_mb", "http_idle_us", "http_beside_us", "http_decode_ratio"]
    figures: Figures = {name: [] for name in names}
    copy = folder / "plain.gguf"
    write_shard(copy, index, manifest, (item,), check=False, sync=False)
    query = f"layers={item.layer}:{item.layer + 1}&experts={item.first}:{item.stop}"
    target = f"/api/models/{manifest.model_id.hex()}/expert-shard?{query}"
    buffer = bytearray(1 << 20)
    try:
        with _child(_server, path, copy, manifest.encode(), manifest.model_id) as pipe:
            http_port, rows_port = pipe.recv()
            for number in range(rounds + 1):
                if number == 1:
                    figures = {name: [] for name in names}
                figures["http_mb"].append(download(http_port, target, buffer))
                figures["plain_mb"].append(download(http_port, "/plain", buffer))
                trio.run(_rows, rows_port, http_port, target, figures)
    finally:
        copy.unlink()
    return {name: statistics.median(values) for name, values in figures.items()}


def report(result: dict[str, float]) -> str:
    """For people."""
    return (
        f"HTTP shard route  {result['http_mb']:7.0f} MB/s  plain file {result['plain_mb']:7.0f} MB/s  "
        f"ratio {result['http_mb'] / result['plain_mb']:.2f}; {result['http_gentle_mb']:.0f} MB/s while rows travel\n"
        f"6 KB round trip   idle {result['http_idle_us']:5.0f} us    beside the route "
        f"{result['http_beside_us']:5.0f} us  ratio {result['http_decode_ratio']:.2f}"
    )
