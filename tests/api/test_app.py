"""The routes on a real engine: what is streamed is what is answered whole, and everything wrong has its status."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from swarmnode.api.app import MAX_BODY_BYTES, Served, build_app
from swarmnode.models.chat import template_of
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex

MODEL = TinyModel(n_layer=2, n_expert=4, n_expert_used=2)
ASK = {"prompt": "the cat", "max_tokens": 6, "temperature": 0}


@asynccontextmanager
async def open_client(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Swarm]]:
    path = write_tiny_gguf(folder / "tiny.gguf", MODEL)
    async with open_swarm(path, folder, n_ctx=64) as swarm:
        engine = swarm.backbone.engine
        with ModelIndex.open(path) as index:
            template = template_of(index.metadata, engine.tokenizer)
        app = build_app(Served(engine, "tiny", template, swarm.backbone.state.as_dict, 0))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, swarm


def pieces_of(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream of server-sent events, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_whole_and_streamed_answers_agree(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        whole = (await client.post("/v1/completions", json=ASK)).json()
        streamed = await client.post(
            "/v1/completions", json={**ASK, "stream": True, "stream_options": {"include_usage": True}}
        )
    pieces = pieces_of(streamed.text)
    text = "".join(piece["choices"][0]["text"] for piece in pieces[:-1])
    assert text == whole["choices"][0]["text"]
    assert pieces[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["swarm"]["pairs"] > 0
    assert len([piece for piece in pieces if "token" in piece]) == 6


async def test_chat_goes_through_the_template(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    async with open_client(tmp_path) as (client, swarm):
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
        plain = swarm.backbone.engine.tokenizer.encode("hi")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] > len(plain)
    assert pieces_of(streamed.text)[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_health_models_and_swarm(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, swarm):
        await swarm.join(10**7)
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        state = (await client.get("/api/swarm")).json()
    assert state["experts_covered"] == 8
    assert state["workers"][0]["standing"] == "serving"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b"[]", 400, "JSON object"),
        (b"{}", 400, "prompt"),
        (b'{"prompt": ""}', 400, "empty"),
        (b'{"prompt": "\\ud800"}', 400, "Unicode"),
        (b'{"prompt": "a", "tools": []}', 400, "tools"),
        (b'{"prompt": "a", "model": "other"}', 404, "other"),
        (b'{"prompt": "a", "max_tokens": 64}', 400, "context"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_wrong_requests(tmp_path: Path, body: bytes, status: int, says: str) -> None:
    async with open_client(tmp_path) as (client, _):
        answer = await client.post("/v1/completions", content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_an_endless_body_is_refused_while_it_comes(tmp_path: Path) -> None:
    """Straight to the application: httpx's test transport does not like a body that nobody reads to its end."""
    n_asked = 0
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        nonlocal n_asked
        n_asked += 1
        return {"type": "http.request", "body": b" " * 2**20, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async with open_client(tmp_path) as (client, _):
        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
        }
        app: Any = transport.app
        await app(scope, receive, send)
    assert n_asked == MAX_BODY_BYTES // 2**20 + 1
    assert sent[0]["status"] == 400
    assert b"larger" in sent[1]["body"]


async def test_an_answer_without_max_tokens_stops_at_the_context(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        answer = (await client.post("/v1/completions", json={"prompt": "the", "temperature": 0})).json()
    usage = answer["usage"]
    assert usage["total_tokens"] <= 64
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


async def test_clients_that_go_away_free_their_slots(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        for _ in range(5):  # more than there are slots
            with trio.move_on_after(0) as scope:
                await client.post("/v1/completions", json={**ASK, "max_tokens": 40})
            assert scope.cancelled_caught
        answer = await client.post("/v1/completions", json=ASK)
    assert answer.status_code == 200
