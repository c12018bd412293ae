"""Slices: how fast they are cut out of a file, how fast they travel, and what rows that travel meanwhile notice.

    python -m benchmarks.slices [--model FILE.gguf] [--rounds 5] [--json]

Without --model, a file of the real sizes with one layer is written under /tmp and deleted (0.5 GB). Four parts, each
with its peer in the same round; medians over all rounds:

* export: `write_shard` as `swarmnode shard` calls it, against `cp` of the shard file.
* stream: blocks of 256 KiB over one sealed loopback connection between two processes, several asked for at once, from a
  model's file (in the page cache) into nothing; and into a store on disk, hashed and committed (`fetch`).
* decode beside it: 6 KB round trips on the latency connection, idle and while the store is filled over the bulk
  connection.
* HTTP: the node-local route that cuts shards, against a plain file from the same server; and rows beside it
  (http_shard.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks import http_shard
from benchmarks.big_model import big_model, write_big_model
from benchmarks.channel import MODEL, SMALL_BYTES, answer, endpoint
from benchmarks.machine import busy_s, cpu_s
from swarmnode.config import StoreConfig
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Handler, Peer
from swarmnode.net.tcp import TcpTransport
from swarmnode.services.bulk_links import BulkLinks
from swarmnode.services.fetch import SliceFetcher, only
from swarmnode.services.runners import Threads
from swarmnode.services.slice_server import SliceServer
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.shard import write_shard
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Experts, Message, SliceGet

CONFIG = StoreConfig()
STREAM_BYTES = 128 * 1024 * 1024
DECODES = 300
"""Idle round trips of a round."""

Figures = dict[str, list[float]]


def export_round(
    index: ModelIndex, manifest: Manifest, item: ExpertRange, folder: Path, into: Figures
) -> None:
    """MB/s of one export, and of `cp` of the same bytes."""
    shard, copy = folder / "export.gguf", folder / "copy.gguf"
    for path in (shard, copy):
        path.unlink(missing_ok=True)
    started_s = time.perf_counter()
    write_shard(shard, index, manifest, (item,), check=False, sync=False)
    middle_s = time.perf_counter()
    subprocess.run(["cp", shard, copy], check=True)
    ended_s = time.perf_counter()
    n_mb = shard.stat().st_size / 1e6
    into["export_mb"].append(n_mb / (middle_s - started_s))
    into["cp_mb"].append(n_mb / (ended_s - middle_s))
    into["export_ratio"].append((ended_s - middle_s) / (middle_s - started_s))


async def run_server(pipe: Any, path: Path, encoded: bytes, model_id: bytes) -> None:
    """A backbone as far as this needs one, until the process is terminated."""
    manifest = Manifest.decode_untrusted(encoded, model_id)
    with ModelIndex.open(path) as index:
        handlers: dict[type[Message], Handler] = {
            Experts: answer,
            **SliceServer(manifest, index, Threads()).handlers,
        }
        async with trio.open_nursery() as nursery:
            start = partial(serve, TcpTransport(), endpoint(1), handlers=handlers, host="127.0.0.1", port=0)
            places = await nursery.start(start)
            pipe.send(places[0][1])


def serve_model(pipe: Any, path: Path, encoded: bytes, model_id: bytes) -> None:
    """The other process."""
    trio.run(run_server, pipe, path, encoded, model_id)


async def stream(peer: Peer, manifest: Manifest, layer: int) -> float:
    """MB/s of blocks over one connection, as many at once as a fetch has; they are dropped."""
    room = trio.Semaphore(CONFIG.blocks_in_flight // 2)

    async def block(message: SliceGet) -> None:
        await peer.request(message)
        room.release()

    n_bytes = 0
    started_s = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for message in blocks(manifest, layer):
            await room.acquire()
            nursery.start_soon(block, message)
            n_bytes += message.length
    return n_bytes / 1e6 / (time.perf_counter() - started_s)


def blocks(manifest: Manifest, layer: int) -> Iterator[SliceGet]:
    """STREAM_BYTES of the layer's experts."""
    left_bytes = STREAM_BYTES
    for expert in range(manifest.n_expert):
        for tensor in manifest.layers[layer].layout.tensors:
            for offset in range(0, tensor.n_bytes, CONFIG.block_bytes):
                length = min(CONFIG.block_bytes, tensor.n_bytes - offset)
                yield SliceGet(manifest.model_id, layer, expert, tensor.kind, offset, length)
                left_bytes -= length
                if left_bytes <= 0:
                    return


async def decode(peer: Peer, body: bytes) -> float:
    """Microseconds of one round trip."""
    started_s = time.perf_counter()
    await peer.request(Experts(MODEL, 1, "experts", "f16", 1, 1), (body, bytes(6)))
    return 1e6 * (time.perf_counter() - started_s)


async def decode_step(peer: Peer, body: bytes, into: list[float]) -> None:
    """One round trip, and the pause of a layer's own compute."""
    into.append(await decode(peer, body))
    await trio.sleep(0.002)


async def fetch(peer: Peer, links: BulkLinks, manifest: Manifest, item: ExpertRange, folder: Path) -> float:
    """MB/s from asking to committed, into a store that is deleted again."""
    threads = Threads(CONFIG.threads)
    with tempfile.TemporaryDirectory(dir=folder) as cache, SliceStore(Path(cache), manifest) as store:
        sources = only(links.source(peer))
        fetcher = SliceFetcher(sources, manifest, store, threads, CONFIG, lambda _: None)
        started_s = time.perf_counter()
        for piece in item.pieces(CONFIG.commit_experts):
            await fetcher.fetch(piece)
        return manifest.range_bytes(item) / 1e6 / (time.perf_counter() - started_s)


async def fetch_round(
    peer: Peer, links: BulkLinks, manifest: Manifest, item: ExpertRange, folder: Path, into: Figures
) -> None:
    """Fill a store, alone; rows, alone; and both."""
    body = bytes(SMALL_BYTES)
    into["fetch_mb"].append(await fetch(peer, links, manifest, item, folder))
    idle_us: list[float] = []
    beside_us: list[float] = []
    for _ in range(DECODES):
        await decode_step(peer, body, idle_us)

    async def decodes() -> None:
        while True:
            await decode_step(peer, body, beside_us)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(decodes)
        into["gentle_mb"].append(await fetch(peer, links, manifest, item, folder))
        nursery.cancel_scope.cancel()
    into["idle_us"].append(statistics.median(idle_us))
    into["beside_us"].append(statistics.median(beside_us))
    into["beside_p95_us"].append(statistics.quantiles(beside_us, n=20)[-1])
    into["decode_ratio"].append(into["beside_us"][-1] / into["idle_us"][-1])


async def measure(port: int, manifest: Manifest, item: ExpertRange, folder: Path, into: Figures) -> None:
    """One round of everything that travels."""
    address = PeerAddress(endpoint(1).credentials.node_id, "127.0.0.1", port)
    async with trio.open_nursery() as nursery:
        links = BulkLinks(TcpTransport(), endpoint(2), lambda _: address, CONFIG)
        await nursery.start(links.run)
        peer: Peer = await nursery.start(partial(dial, TcpTransport(), address, endpoint(2), handlers={}))
        bulk = await links.link(peer)
        into["stream_mb"].append(await stream(bulk, manifest, item.layer))
        await fetch_round(peer, links, manifest, item, folder, into)
        nursery.cancel_scope.cancel()


@contextmanager
def model_file(given: Path | None, folder: Path) -> Iterator[Path]:
    """The file to serve slices of."""
    if given is not None:
        yield given
        return
    path = folder / "slices-model.gguf"
    write_big_model(path, big_model(1, 64, 8192, attention_every=4))
    yield path


def run(path: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Medians of `rounds` rounds after one that warms up."""
    names = "export_mb cp_mb export_ratio stream_mb fetch_mb gentle_mb idle_us beside_us beside_p95_us decode_ratio"
    figures: Figures = {name: [] for name in names.split()}
    with ModelIndex.open(path) as index:
        manifest = build_manifest(index)
        item = ExpertRange(min(manifest.layers), 0, min(manifest.n_expert, 64))
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve_model, args=(theirs, path, manifest.encode(), manifest.model_id), daemon=True
        )
        server.start()
        port = ours.recv()
        began, began_busy_s, own_s = time.perf_counter(), 0.0, 0.0
        try:
            for number in range(rounds + 1):
                if number == 1:
                    for values in figures.values():
                        values.clear()
                    began, began_busy_s = time.perf_counter(), busy_s()
                    own_s = own_cpu_s(server.pid)
                export_round(index, manifest, item, folder, figures)
                trio.run(measure, port, manifest, item, folder, figures)
            others_s = busy_s() - began_busy_s - (own_cpu_s(server.pid) - own_s)
        finally:
            server.terminate()
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return medians | {"others": max(0.0, others_s / (time.perf_counter() - began))}


def run_http(path: Path, folder: Path, rounds: int) -> dict[str, float]:
    """The HTTP route's part, with the same experts."""
    with ModelIndex.open(path) as index:
        manifest = build_manifest(index)
        item = ExpertRange(min(manifest.layers), 0, min(manifest.n_expert, 64))
        return http_shard.run(index, path, manifest, item, folder, rounds)


def own_cpu_s(server_pid: int | None) -> float:
    """CPU time of this process, its children (cp) and the server."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    server_s = cpu_s([server_pid] if server_pid else [])
    return time.process_time() + children.ru_utime + children.ru_stime + server_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slices-") as name, model_file(options.model, Path(name)) as path:
        result = run(path, Path(name), options.rounds)
        result |= run_http(path, Path(name), options.rounds)
    if options.json:
        print(json.dumps(result))
        return
    print(f"other processes used {result['others']:.2f} cores")
    print(
        f"export            {result['export_mb']:7.0f} MB/s  cp {result['cp_mb']:7.0f} MB/s  "
        f"ratio {result['export_ratio']:.2f}"
    )
    print(f"sealed stream     {result['stream_mb']:7.0f} MB/s, one connection, blocks dropped")
    print(
        f"fetch to disk     {result['fetch_mb']:7.0f} MB/s, bulk connection, hashed and committed; "
        f"{result['gentle_mb']:.0f} MB/s while rows travel"
    )
    print(
        f"6 KB round trip   idle {result['idle_us']:5.0f} us    beside the fetch {result['beside_us']:5.0f} us "
        f"(p95 {result['beside_p95_us']:.0f})  ratio {result['decode_ratio']:.2f}"
    )
    print(http_shard.report(result))


if __name__ == "__main__":
    main()
