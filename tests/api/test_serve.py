"""The application on Hypercorn, over real sockets: one that was bound before, clients that go away or do not stop."""

from __future__ import annotations

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
from tests.api.kit import until

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
