"""The least that a layer with remote experts costs in Python here: sockets and sealing, no tasks, frames or checks.

    python -m benchmarks.bare_remote [--layers 400] [--n-embd 3072] [--stream-mb 40]

One thread sends one f16 row to each of two processes and adds their two replies; all three stream memory in between, as
weights would, so that caches are as cold as in `benchmarks.decode`. Printed: the median of a layer's time outside the
streaming and the waits, and in the kernel with bytes to send. What `benchmarks.decode` shows above it is the protocol,
the handovers between threads, and the deadlines.
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import socket
import statistics
import struct
import time

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

N_WORKERS = 2
WARM_UP_LAYERS = 40
_LENGTH = struct.Struct("<I")


class Sealed:
    """Length-prefixed records over a connected socket, one nonce a record each way."""

    def __init__(self, stream: socket.socket, side: int) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = stream
        self._cipher = ChaCha20Poly1305(bytes(32))
        self._sending, self._receiving = side, 1 - side
        self._n_sent = self._n_received = 0

    def seal(self, data: bytes) -> bytes:
        """A record."""
        record = self._cipher.encrypt(struct.pack("<IQ", self._sending, self._n_sent), data, None)
        self._n_sent += 1
        return _LENGTH.pack(len(record)) + record

    def receive(self) -> bytes:
        """The next record, opened; b"" at the end."""
        head = self.stream.recv(_LENGTH.size, socket.MSG_WAITALL)
        if not head:
            return b""
        record = self.stream.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        nonce = struct.pack("<IQ", self._receiving, self._n_received)
        self._n_received += 1
        return self._cipher.decrypt(nonce, record, None)


def worker(port: int, n_embd: int, stream_mb: int) -> None:
    """Answers rows with rows."""
    link = Sealed(socket.create_connection(("127.0.0.1", port)), 1)
    weights = np.ones(stream_mb * 1_000_000 // 8)
    reply = np.zeros(n_embd, np.float16).tobytes()
    while link.receive():
        weights.sum()
        link.stream.sendall(link.seal(reply))


def measure(n_layers: int, n_embd: int, stream_mb: int) -> tuple[float, float]:
    """(microseconds of Python a layer, microseconds in `send`), medians."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = (server.getsockname()[1], n_embd, stream_mb)
        processes = [multiprocessing.Process(target=worker, args=arguments) for _ in range(N_WORKERS)]
        for process in processes:
            process.start()
        links = [Sealed(server.accept()[0], 0) for _ in processes]
    weights = np.ones(stream_mb * 1_000_000 // 8)
    row = np.random.default_rng(0).standard_normal(n_embd).astype(np.float32)
    python_us, send_us = [], []
    for layer in range(n_layers + WARM_UP_LAYERS):
        weights.sum()
        began_s = time.perf_counter()
        waited_s, sent_s = _layer(links, row)
        if layer >= WARM_UP_LAYERS:
            python_us.append(1e6 * (time.perf_counter() - began_s - waited_s - sent_s))
            send_us.append(1e6 * sent_s)
    for link in links:
        link.stream.close()
    for process in processes:
        process.join()
    return statistics.median(python_us), statistics.median(send_us)


def _layer(links: list[Sealed], row: np.ndarray[tuple[int], np.dtype[np.float32]]) -> tuple[float, float]:
    """Seconds in waits and in sends."""
    waited_s = sent_s = 0.0
    data = row.astype(np.float16).tobytes()
    for link in links:
        record = link.seal(data)
        began_s = time.perf_counter()
        link.stream.sendall(record)
        sent_s += time.perf_counter() - began_s
    total = np.zeros(len(row), np.float32)
    for link in links:
        began_s = time.perf_counter()
        select.select([link.stream], [], [])
        waited_s += time.perf_counter() - began_s
        total += np.frombuffer(link.receive(), np.float16).astype(np.float32)
    return waited_s, sent_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=400)
    parser.add_argument("--n-embd", type=int, default=3072)
    parser.add_argument("--stream-mb", type=int, default=40)
    options = parser.parse_args()
    python_us, send_us = measure(options.layers, options.n_embd, options.stream_mb)
    print(f"bare remote layer, {N_WORKERS} workers: Python {python_us:.0f} us, in send {send_us:.0f} us")


if __name__ == "__main__":
    main()
