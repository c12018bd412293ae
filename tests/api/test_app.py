"""The routes on a real engine: what is streamed is what is answered whole, and everything wrong has its status."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from swarmnode.api import prompts
from swarmnode.api.answering import Answering, Take
from swarmnode.api.app import MAX_BODY_BYTES, Served, build_app
from swarmnode.api.prompts import Prompt, Prompts
from swarmnode.config import ApiConfig
from swarmnode.errors import ConnectionLostError, DeviceError
from swarmnode.models.chat import template_of
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.services.passes import Passes, Rows
from swarmnode.services.runners import Inline, Runner, Threads
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex

MODEL = TinyModel(n_layer=2, n_expert=4, n_expert_used=2)
ASK = {"prompt": "the cat", "max_tokens": 6, "temperature": 0}


@asynccontextmanager
async def open_client(
    folder: Path, config: ApiConfig | None = None, threads: Runner | None = None, n_ctx: int = 64
) -> AsyncIterator[tuple[httpx.AsyncClient, Swarm]]:
    path = write_tiny_gguf(folder / "tiny.gguf", MODEL)
    async with open_swarm(path, folder, n_ctx=n_ctx) as swarm:
        engine = swarm.backbone.engine
        with ModelIndex.open(path) as index:
            template = template_of(index.metadata, engine.tokenizer)
        state = swarm.backbone.state.as_dict
        app = build_app(
            Served(engine, "tiny", template, state, 0, threads or Inline(), config or ApiConfig())
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
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
        ('{"prompt": "a"}'.encode("utf-16-le"), 400, "not valid JSON"),
        ('{"prompt": "a"}'.encode("utf-16"), 400, "not valid JSON"),
        ('{"prompt": "a"}'.encode("utf-32-be"), 400, "not valid JSON"),
        (b"[" * 60_000, 400, "not valid JSON"),
        (b'{"prompt": [' + b"[]," * 100_000 + b"1]}", 400, "more than 65536 lists"),
        (b"[]", 400, "JSON object"),
        (b"{}", 400, "prompt"),
        (b'{"prompt": ""}', 400, "empty"),
        (b'{"prompt": "\\ud800"}', 400, "Unicode"),
        (b'{"prompt": "a", "tools": []}', 400, "tools"),
        (b'{"prompt": "a", "\\ud800": 1}', 400, "not served: \\ud800"),
        (b'{"prompt": "a", "model": "\\ud800"}', 404, "\\ud800"),
        (b'{"prompt": "a", "' + b"x" * 10**6 + b'": 1}', 400, "xxx; served are"),
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
    assert len(error["message"]) <= 2000
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
            "headers": [(b"host", b"localhost")],
            "query_string": b"",
            "client": ("127.0.0.1", 5),
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


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "says"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url", "GET /health, GET /metrics, GET /v1/models, "),
        ("POST", "/v1/completions/", 404, "unknown_url", "POST /v1/completions, "),
        ("GET", "/", 404, "unknown_url", "GET /api/swarm"),
        ("GET", "/v1/completions", 405, "method_not_supported", ". Use POST"),
        ("DELETE", "/v1/models", 405, "method_not_supported", ". Use GET"),
    ],
)
async def test_unknown_routes_and_methods(
    tmp_path: Path, method: str, path: str, status: int, code: str, says: str
) -> None:
    async with open_client(tmp_path) as (client, _):
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert says in answer.json()["error"]["message"]
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8790", "localhost", "LOCALHOST:1", "[::1]:8790", "127.1.2.3"],
)
async def test_hosts_of_this_machine(tmp_path: Path, host: str) -> None:
    async with open_client(tmp_path) as (client, _):
        assert (await client.get("/health", headers={"Host": host})).status_code == 200
        headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "cross-site"}
        assert (await client.get("/health", headers=headers)).status_code == 200
        assert (await client.get("/health", headers={"Sec-Fetch-Site": "none"})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8790"},
        {"Host": ""},
        {"Host": "localhost.evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": "192.168.1.5:8790"},
        {"Host": "0.0.0.0:8790"},
        {"Host": "[2001:db8::1]"},
        {"Host": "999.0.0.1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost.evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
    ids=str,
)
async def test_web_pages_are_kept_out(tmp_path: Path, headers: dict[str, str]) -> None:
    """A name that was made to point here (DNS rebinding), or another site's page that sends a form."""
    async with open_client(tmp_path) as (client, _):
        for answer in (
            await client.get("/api/swarm", headers=headers),
            await client.post("/v1/completions", json=ASK, headers=headers),
        ):
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "forbidden_host"


async def test_a_client_that_leaves_within_its_request_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with open_client(tmp_path) as (client, _):
        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "client": ("127.0.0.1", 5),
            "headers": [(b"host", b"localhost"), (b"content-length", b"9")],
        }
        await transport.app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert not caplog.records


async def test_more_waiting_requests_than_allowed_are_told_to_come_later(tmp_path: Path) -> None:
    config = ApiConfig(max_waiting=3, retry_after_s=7)
    async with open_client(tmp_path, config) as (client, swarm):
        engine = swarm.backbone.engine
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await client.post("/v1/completions", json={**ASK, "max_tokens": 1})).status_code)

        async with engine._slot([1]), engine._slot([1]), trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert engine.n_waiting == 3
            refused = await client.post("/v1/completions", json=ASK)
            assert statuses == []
            nursery.cancel_scope.cancel()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "7"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200


async def test_prompts_that_are_becoming_tokens_count_as_waiting(tmp_path: Path) -> None:
    class Stuck:
        async def run(self, function: Any) -> Any:
            result = function()
            if isinstance(result, tuple) and isinstance(result[0][0], Prompt):
                await trio.sleep_forever()
            return result

    config = ApiConfig(max_waiting=2)
    async with open_client(tmp_path, config, Stuck()) as (client, _), trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(partial(client.post, "/v1/completions", json=ASK))
        await trio.testing.wait_all_tasks_blocked()
        assert (await client.post("/v1/completions", json=ASK)).status_code == 429
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_was_let_in_counts_as_waiting_before_the_engine_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Else as many as come just then have the same place."""

    async def not_yet(answering: Answering, take: Take) -> None:
        await trio.sleep_forever()

    ask = {**ASK, "stream": stream}
    async with open_client(tmp_path, ApiConfig(max_waiting=3, head_wait_s=1e6)) as (client, _):
        with monkeypatch.context() as patch:
            patch.setattr(Answering, "run", not_yet)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.post, "/v1/completions", json={**ask, "prompt": ["a"] * 2}))
                await trio.testing.wait_all_tasks_blocked()
                refused = await client.post("/v1/completions", json={**ask, "n": 2})
                nursery.cancel_scope.cancel()
        assert refused.status_code == 429
        assert (await client.post("/v1/completions", json={**ask, "n": 3})).status_code == 200
        assert (await client.post("/v1/completions", json={**ask, "n": 3})).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (DeviceError("the GPU fell off"), 500, "fell off"),
        (
            ExceptionGroup("nursery", [ExceptionGroup("inner", [DeviceError("the GPU fell off")])]),
            500,
            "fell off",
        ),
        (ConnectionLostError("the peer went"), 500, "the peer went"),
        (ZeroDivisionError("secret detail"), 500, "its log says why"),
        (ExceptionGroup("nursery", [KeyError("secret detail")]), 500, "its log says why"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("after", [0, 2])
async def test_an_engine_that_fails_ends_the_answer_properly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, says: str, after: int
) -> None:
    real = Passes.run
    n_steps = 0

    async def failing(self: Passes, rows: Sequence[Rows]) -> Any:
        nonlocal n_steps
        n_steps += 1
        if n_steps > after:
            raise error
        return await real(self, rows)

    async with open_client(tmp_path) as (client, _):
        monkeypatch.setattr(Passes, "run", failing)
        whole = await client.post("/v1/completions", json=ASK)
        n_steps = 0
        streamed = await client.post("/v1/completions", json={**ASK, "stream": True})
        monkeypatch.setattr(Passes, "run", real)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    assert whole.status_code == status
    assert says in whole.json()["error"]["message"]
    if after:
        pieces = pieces_of(streamed.text)
        assert len(pieces) == after + 1
        assert says in pieces[-1]["error"]["message"]
    else:  # nothing was sent yet, so it has its status
        assert streamed.status_code == status
        assert says in streamed.json()["error"]["message"]
    assert "secret" not in whole.text + streamed.text


@pytest.mark.real_time
async def test_a_prompt_of_megabytes_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by its length: it is never tokenized, and what does look at it runs on a thread."""
    own_thread = threading.get_ident()
    looked_at: list[tuple[str, int]] = []

    def noting(function: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            longest = max((len(item) for item in arguments if isinstance(item, str | bytes)), default=0)
            if longest > 10**6:
                looked_at.append((function.__name__, threading.get_ident()))
            return function(*arguments, **options)

        return noted

    for place, name in (
        (Tokenizer, "encode"),
        (Prompts, "_check_length"),
        (json, "loads"),
        (prompts, "check_marks_untrusted"),
    ):
        monkeypatch.setattr(place, name, noting(getattr(place, name)))
    text = "the cat " * 1_000_000
    async with open_client(tmp_path, threads=Threads()) as (client, _):
        looked_at.clear()
        plain = await client.post("/v1/completions", json={"prompt": text})
        chat = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]}
        )
    for answer in (plain, chat):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert {name for name, _ in looked_at} == {"_check_length", "loads", "check_marks_untrusted"}
    assert own_thread not in {thread for _, thread in looked_at}


async def test_a_client_that_goes_away_before_a_whole_answer_frees_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Hypercorn tells it: a message, not a cancelled task."""
    async with open_client(tmp_path) as (client, swarm):
        engine = swarm.backbone.engine
        n_tokens = 0
        real = engine.passes.run

        async def counting(rows: Sequence[Rows]) -> Any:
            nonlocal n_tokens
            n_tokens += 1
            if n_tokens == 3:
                gone.set()
            return await real(rows)

        monkeypatch.setattr(engine.passes, "run", counting)
        gone = trio.Event()
        messages: list[dict[str, Any]] = [
            {
                "type": "http.request",
                "body": json.dumps({**ASK, "max_tokens": 50}).encode(),
                "more_body": False,
            }
        ]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await trio.lowlevel.checkpoint()

        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"host", b"localhost")],
            "query_string": b"",
            "client": ("127.0.0.1", 5),
        }
        app: Any = transport.app
        await app(scope, receive, send)
        assert 3 <= n_tokens < 10
        for _ in range(3):
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200
