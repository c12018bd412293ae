"""The channel against plain TCP: round trips of a 6 KB request and reply, and one-way 4 MB bodies, over 127.0.0.1.

    python -m benchmarks.channel [--rounds 7] [--json]

The peer is what a program without swarmnode would do: trio, a length prefix, the raw bytes. Client and server are two
processes; the two channels take turns within each round, and the medians over all rounds are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import struct
import time
from functools import partial
from typing import Any

import trio

from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.net.tcp import TcpTransport
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Experts, Message, Rows

N_EMBD = 3072
SMALL_BYTES = 2 * N_EMBD
LARGE_ROWS = 682
LARGE_BYTES = LARGE_ROWS * SMALL_BYTES
"""4.2 MB of f16 rows."""
MODEL = bytes(32)
LENGTH = struct.Struct("<II")
"""Plain channel: bytes that follow, bytes wanted back."""


def endpoint(seed: int) -> Endpoint:
    """A node whose id both processes know."""
    key = NodeKey.from_seed(bytes([seed]) * 32)
    return Endpoint.create(Credentials(key), network="benchmark", agent="benchmark", roles=("worker",))


async def answer(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
    """The first row comes back."""
    assert isinstance(message, Experts)
    return Rows(message.encoding, 1, 0), (body[:SMALL_BYTES],)


async def read_exactly(stream: trio.abc.Stream, n_bytes: int) -> bytearray | None:
    """The plain channel's reader; None at the end of the stream."""
    data = bytearray()
    while len(data) < n_bytes:
        chunk = await stream.receive_some(min(n_bytes - len(data), 256 * 1024))
        if not chunk:
            return None
        data += chunk
    return data


async def answer_plain(stream: trio.SocketStream) -> None:
    """The plain server: as many bytes back as were asked for."""
    while (head := await read_exactly(stream, LENGTH.size)) is not None:
        n_bytes, n_back = LENGTH.unpack(head)
        body = await read_exactly(stream, n_bytes)
        if body is None:
            return
        await stream.send_all(LENGTH.pack(n_back, 0) + body[:n_back])


async def run_server(pipe: Any) -> None:
    """Both servers, until the process is terminated."""
    async with trio.open_nursery() as nursery:
        handlers: dict[type[Message], Handler] = {Experts: answer}
        start = partial(serve, TcpTransport(), endpoint(1), handlers=handlers, host="127.0.0.1", port=0)
        sealed = await nursery.start(start)
        plain = await nursery.start(partial(trio.serve_tcp, answer_plain, 0, host="127.0.0.1"))
        pipe.send((sealed[0][1], plain[0].socket.getsockname()[1]))


async def call_plain(stream: trio.SocketStream, body: bytes) -> None:
    """One request and its reply on the plain channel."""
    await stream.send_all(LENGTH.pack(len(body), SMALL_BYTES) + body)
    head = await read_exactly(stream, LENGTH.size)
    assert head is not None
    assert await read_exactly(stream, LENGTH.unpack(head)[0]) is not None


async def call_sealed(peer: Peer, n_rows: int, body: bytes) -> None:
    """The same over swarmnode: a request with its pair, the rows back."""
    message = Experts(MODEL, 1, "experts", "f16", n_rows, 1)
    await peer.request(message, (body, bytes(6)))


async def measure(sealed_port: int, plain_port: int, rounds: int) -> dict[str, float]:
    """Medians over all rounds: microseconds a round trip, MB/s one way."""
    times: dict[str, list[float]] = {"plain_us": [], "sealed_us": [], "plain_mb": [], "sealed_mb": []}
    small, large = bytes(SMALL_BYTES), bytes(LARGE_BYTES)
    async with trio.open_nursery() as nursery:
        address = PeerAddress(endpoint(1).credentials.node_id, "127.0.0.1", sealed_port)
        peer: Peer = await nursery.start(partial(dial, TcpTransport(), address, endpoint(2), handlers={}))
        plain = await trio.open_tcp_stream("127.0.0.1", plain_port)
        for number in range(rounds + 1):
            for _ in range(400):
                started_s = time.perf_counter()
                await call_plain(plain, small)
                middle_s = time.perf_counter()
                await call_sealed(peer, 1, small)
                ended_s = time.perf_counter()
                if number:  # the first round warms up
                    times["plain_us"].append(1e6 * (middle_s - started_s))
                    times["sealed_us"].append(1e6 * (ended_s - middle_s))
            for _ in range(8):
                started_s = time.perf_counter()
                await call_plain(plain, large)
                middle_s = time.perf_counter()
                await call_sealed(peer, LARGE_ROWS, large)
                ended_s = time.perf_counter()
                if number:
                    times["plain_mb"].append(LARGE_BYTES / 1e6 / (middle_s - started_s))
                    times["sealed_mb"].append(LARGE_BYTES / 1e6 / (ended_s - middle_s))
        nursery.cancel_scope.cancel()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Start the server process, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=trio.run, args=(run_server, theirs), daemon=True
    )
    server.start()
    sealed_port, plain_port = ours.recv()
    result = trio.run(measure, sealed_port, plain_port, arguments.rounds)
    server.terminate()
    result["rtt_ratio"] = result["sealed_us"] / result["plain_us"]
    result["mb_ratio"] = result["sealed_mb"] / result["plain_mb"]
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"6 KB round trip   plain {result['plain_us']:7.0f} us    swarmnode {result['sealed_us']:7.0f} us",
        end="",
    )
    print(f"    ratio {result['rtt_ratio']:.2f}")
    print(
        f"4 MB one way      plain {result['plain_mb']:7.0f} MB/s  swarmnode {result['sealed_mb']:7.0f} MB/s",
        end="",
    )
    print(f"  ratio {result['mb_ratio']:.2f}")


if __name__ == "__main__":
    main()
