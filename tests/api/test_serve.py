"""The application on Hypercorn, over real sockets: one that was bound before, clients that go away or do not stop."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from swarmnode.api import serve
from swarmnode.api.app import Served, build_app
from swarmnode.services.engine import Engine
from swarmnode.services.passes import Passes, Rows
from swarmnode.testing.swarm import open_swarm
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from tests.api.kit import n_descriptors, reset_when_closed, resident_bytes, until

MODEL = TinyModel(n_layer=2, n_expert=4, n_expert_used=2)
ASK = {"prompt": "the cat", "max_tokens": 6, "temperature": 0}

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, Engine]]:
    """The port of a backbone's API, and its engine."""
    path = write_tiny_gguf(folder / "tiny.gguf", MODEL)
    async with open_swarm(path, folder, n_ctx=64) as swarm:
        engine = swarm.backbone.engine
        app = build_app(Served(engine, "tiny", None, swarm.backbone.state.as_dict, 0))
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        monkeypatch.delattr(os, "dup")  # which knows no sockets on Windows
        async with listener, trio.open_nursery() as nursery:
            await nursery.start(serve.run, app, listener)
            yield port, engine
            nursery.cancel_scope.cancel()


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def test_a_socket_that_is_bound_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path, monkeypatch) as (port, _), httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://localhost:{port}/v1/completions", json=ASK)
        assert answer.json()["usage"]["completion_tokens"] == 6
        rebound = await client.get(f"http://127.0.0.1:{port}/health", headers={"Host": "evil.example"})
        assert rebound.status_code == 403


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    n_steps = 0
    real = Passes.run

    async def slow(self: Passes, rows: Sequence[Rows]) -> Any:
        nonlocal n_steps
        n_steps += 1
        await trio.sleep(0.05)
        return await real(self, rows)

    monkeypatch.setattr(Passes, "run", slow)
    async with served(tmp_path, monkeypatch) as (port, engine):
        connection = await trio.open_tcp_stream("127.0.0.1", port)
        await connection.send_all(request({**ASK, "max_tokens": 60, "stream": stream}))
        await until(lambda: n_steps >= 3)
        await connection.aclose()
        await until(lambda: engine.n_free == 2)
        assert n_steps < 10


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\n",
        "POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\n",
    ],
    ids=["too long", "refused", "unknown"],
)
async def test_bodies_that_nobody_reads_to_the_end_leave_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    async with served(tmp_path, monkeypatch) as (port, _), httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"http://localhost:{port}/health")
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(3):
            connection = await trio.open_tcp_stream("127.0.0.1", port)
            async with connection:
                await connection.send_all(f"{head}Content-Length: {10**9}\r\n\r\n".encode())
                with suppress(trio.BrokenResourceError):
                    for _ in range(200):
                        await connection.send_all(bytes(2**16))
                with suppress(trio.BrokenResourceError):  # a reset may overtake the answer
                    assert b"invalid_request_error" in await connection.receive_some()
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= before)


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
RUDE: list[tuple[bytes, bytes]] = [
    (b"", b""),
    (request(ASK)[:30], b""),
    (request(ASK)[:-20], b""),
    (request({**ASK, "max_tokens": 40}), b""),
    (request({**ASK, "max_tokens": 40, "stream": True}), b'"token"'),
    (request({**ASK, "stream": True}), b"[DONE]"),
    (GET, b"ok"),
    (GET * 3, b"ok"),
    (b"\xff\r\n\r\n", b"400"),
]
"""What is sent, and what is waited for until the client goes: nothing said, half a head, half a body, waiting for an
answer, in the middle of a stream, behind its end, after a good request, with more behind it, after none."""


async def rude_client(port: int, number: int) -> None:
    """One of them; every other one of each ends with a RST."""
    data, awaited = RUDE[number % len(RUDE)]
    connection = await trio.open_tcp_stream("127.0.0.1", port)
    if number // len(RUDE) % 2:
        reset_when_closed(connection.socket)
    await connection.send_all(data)
    got = b""
    while awaited not in got:
        piece = await connection.receive_some()
        assert piece
        got += piece
    await trio.aclose_forcefully(connection)


async def test_300_connections_ended_rudely_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases.md 31 and 12: descriptors, memory, tasks and slots flat, the next request answered as the first."""
    async with served(tmp_path, monkeypatch) as (port, engine), httpx.AsyncClient(trust_env=False) as client:

        async def settled(n_files: int, n_tasks: int) -> None:
            await until(
                lambda: (
                    n_descriptors() <= n_files
                    and trio.lowlevel.current_statistics().tasks_living <= n_tasks
                    and (engine.n_free, engine.n_waiting) == (2, 0)
                )
            )

        first = await _token_texts(client, port)
        for number in range(2 * len(RUDE)):
            await rude_client(port, number)
        await settled(n_descriptors(), 10**6)
        await trio.sleep(2.5)  # what lingers has gone (ApiConfig.linger_s)
        n_files, n_tasks = n_descriptors(), trio.lowlevel.current_statistics().tasks_living
        before_bytes = resident_bytes()
        for number in range(300):
            await rude_client(port, number)
        assert await _token_texts(client, port) == first
        await settled(n_files, n_tasks)
        gc.collect()
        assert resident_bytes() - before_bytes < 16 * 1024 * 1024


async def _token_texts(client: httpx.AsyncClient, port: int) -> list[str]:
    """Of a streamed answer."""
    answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json={**ASK, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
