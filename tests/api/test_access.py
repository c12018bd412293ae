"""Who gets in: this machine without a key, others with one, web pages if they are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from starlette.types import Scope

from swarmnode.api.access import Access, LimitGuard, refusal_of
from swarmnode.api.app import Served, build_app
from swarmnode.config import ApiConfig
from swarmnode.services.api_keys import KeyRing, new_key, revoke_key
from swarmnode.services.key_limits import KeyLimits
from swarmnode.services.runners import Inline
from swarmnode.testing.swarm import open_swarm
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf

KEY = "sk-swarm-good"
PAGE = "https://chat.example"
ACCESS = Access(lambda key: key in (KEY, "node-token"), (PAGE,), is_public=True)
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


def status(
    headers: Mapping[str, str], client: str | None = "127.0.0.1", path: str = "/v1/models", **rules: Any
) -> int:
    """What a request gets: 200 if it is let in."""
    given = {"Host": "localhost:8790", **headers}
    scope: Scope = {
        "type": "http",
        "path": path,
        "client": None if client is None else (client, 5),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
    }
    refused = refusal_of(scope, replace(ACCESS, **rules))
    return 200 if refused is None else refused.status


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_this_machine_needs_no_key(client: str) -> None:
    assert status({}, client) == 200
    assert status({"Authorization": "Bearer anything"}, client) == 200, "clients must send some key"
    assert status({"Authorization": "Bearer sk-swarm-revoked"}, client) == 401
    assert status({"Host": "evil.example"}, client) == 403
    assert status({"Host": "evil.example", **WITH_KEY}, client) == 200


@pytest.mark.parametrize("client", ["192.0.2.1", "::ffff:192.0.2.1", "fe80::1", "localhost", "", None])
def test_others_need_a_key(client: str | None) -> None:
    assert status({}, client) == 401
    assert status({"Authorization": "Bearer wrong"}, client) == 401
    assert status({"Authorization": f"Basic {KEY}"}, client) == 401
    assert status({"Host": "api.example", **WITH_KEY}, client) == 200
    assert status({"authorization": f"bearer  {KEY} "}, client) == 200
    assert status({"Authorization": "Bearer node-token"}, client) == 200
    assert status({}, client, "/health") == 200
    assert status({}, client, "/health", is_public=False) == 401
    assert status({}, client, "/metrics") == 401


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"])
def test_what_a_proxy_passes_on_does_not_come_from_here(name: str) -> None:
    assert status({name: "192.0.2.1"}) == 401
    assert status({name: "127.0.0.1", **WITH_KEY}) == 200


def test_pages_that_are_allowed() -> None:
    assert status({"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}) == 200
    assert status({"Origin": "https://other.example"}) == 403
    assert status({"Origin": "https://other.example"}, origins=("*",)) == 403, "every page needs a key"
    assert status({"Origin": "https://other.example", **WITH_KEY}, origins=("*",)) == 200


async def test_pages_may_read_answers(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(n_layer=2, n_expert=4))
    async with open_swarm(path, tmp_path, n_ctx=64) as swarm:
        state = swarm.backbone.state.as_dict
        config = ApiConfig(cors=(PAGE,))
        app = build_app(Served(swarm.backbone.engine, "tiny", None, state, 0, config=config, access=ACCESS))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
            asks["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os"
            preflight = await client.options("/v1/chat/completions", headers=asks)
            answer = await client.get("/v1/models", headers={"Origin": PAGE})
            refused = await client.get("/v1/models", headers={"Origin": "https://other.example"})
            wrong = await client.get(
                "/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer sk-swarm-x"}
            )
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for response in (preflight, answer, wrong):
        assert response.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {
        "retry-after",
        *(f"x-swarm-{name}" for name in ("share-remote", "workers", "hedges", "fallbacks")),
    } == {*exposed}
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    assert wrong.status_code == 401
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert wrong.headers["www-authenticate"] == "Bearer"


def test_a_key_ring_sees_what_others_change(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ring = KeyRing(path)
    assert len(ring) == 0
    key = new_key(path, "a")
    assert ring.admits(key)
    assert not ring.admits(key[:-1])
    revoke_key(path, "a")
    assert not ring.admits(key)


async def test_a_key_that_has_asked_as_much_as_it_may_is_told_when_to_come_again(tmp_path: Path) -> None:
    """Only requests for answers count, and only of keys that have limits."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(n_layer=2, n_expert=4, n_expert_used=2))
    path = tmp_path / "keys.json"
    few, many = new_key(path, "few", per_minute=2), new_key(path, "many")
    ring = KeyRing(path)
    limits = KeyLimits(trio.current_time, 5)
    access = Access(ring.admits, is_public=True, entry=ring.entry, limits=limits)
    async with open_swarm(model, tmp_path, n_ctx=64) as swarm:
        app = build_app(
            Served(swarm.backbone.engine, "tiny", None, dict, 0, Inline(), ApiConfig(), access=access)
        )
        transport = httpx.ASGITransport(app=app, client=("192.0.2.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://there") as client:

            async def ask(key: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "a", "max_tokens": 2, **fields}
                return await client.post(path, json=body, headers=headers)

            for stream in (False, True):
                for _ in range(5):
                    models = await client.get("/v1/models", headers={"Authorization": f"Bearer {few}"})
                    assert models.status_code == 200
                assert (await ask(few, stream=stream)).status_code == 200
            await trio.sleep(20)
            refused = await ask(few)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "40"
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "2 answers a minute" in error["message"]
            for spelt in ("/v1/completions%0A", "/v1/%63ompletions", "/v1/completions?a=b"):
                assert (await ask(few, spelt)).status_code == 429, spelt
            assert (
                await client.get("/v1/completions", headers={"Authorization": f"Bearer {few}"})
            ).status_code == 405
            for _ in range(3):
                assert (await ask(many)).status_code == 200
            await trio.sleep(40)
            assert (await ask(few)).status_code == 200


async def test_each_answer_of_a_request_counts_for_its_key(tmp_path: Path) -> None:
    """One request for 64 answers, by n or by prompts, once counted as one."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(n_layer=2, n_expert=4, n_expert_used=2))
    path = tmp_path / "keys.json"
    key = new_key(path, "a", per_minute=6)
    ring = KeyRing(path)
    access = Access(ring.admits, is_public=True, entry=ring.entry, limits=KeyLimits(trio.current_time, 5))
    async with open_swarm(model, tmp_path, n_ctx=64) as swarm:
        app = build_app(
            Served(swarm.backbone.engine, "tiny", None, dict, 0, Inline(), ApiConfig(), access=access)
        )
        transport = httpx.ASGITransport(app=app, client=("192.0.2.1", 5))
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://there", headers=headers) as client:

            async def ask(**fields: Any) -> httpx.Response:
                body = {"prompt": "a", "max_tokens": 2, **fields}
                return await client.post("/v1/completions", json=body)

            assert (await ask(prompt=["a", "b"], n=2)).status_code == 200
            await trio.sleep(20)
            refused = await ask(n=3)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "40"
            too_many = await ask(n=7)
            assert too_many.status_code == 400
            assert "6 answers a minute, and this request is for 7" in too_many.json()["error"]["message"]
            assert (await ask(n=2, stream=True)).status_code == 200
            assert (await ask()).status_code == 429


async def test_a_key_has_so_many_requests_at_a_time_and_a_stream_counts_until_its_end(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "a", max_concurrent=1)
    ring = KeyRing(path)
    end = trio.Event()
    statuses: list[int] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await end.wait()

    guard = LimitGuard(app, Access(ring.admits, entry=ring.entry, limits=KeyLimits(trio.current_time, 5)))
    scope: Scope = {
        "type": "http",
        "headers": [(b"authorization", f"Bearer {key}".encode())],
    }

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(guard, scope, trio.sleep_forever, send)
        await trio.testing.wait_all_tasks_blocked()
        await guard(scope, trio.sleep_forever, send)
        assert statuses == [200, 429]
        end.set()
    await guard(scope, trio.sleep_forever, send)
    assert statuses == [200, 429, 200]
    with trio.CancelScope() as gone:  # a client that goes away
        gone.cancel()
        await guard(scope, trio.sleep_forever, send)
    await guard(scope, trio.sleep_forever, send)
    assert statuses[-1] == 200


async def test_who_has_all_of_an_answer_may_ask_again_at_once(tmp_path: Path) -> None:
    """Before the application has returned: a client with one request at a time must not be refused by chance."""
    path = tmp_path / "keys.json"
    key = new_key(path, "a", max_concurrent=1)
    ring = KeyRing(path)
    answers: list[Any] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})

    guard = LimitGuard(app, Access(ring.admits, entry=ring.entry, limits=KeyLimits(trio.current_time, 5)))
    scope: Scope = {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]}

    async def ask_again(message: Any) -> None:
        answers.append(message.get("status", message.get("body")))
        if len(answers) in (2, 5):  # within the first piece, and within the last one
            await guard(scope, trio.sleep_forever, ask_again)

    await guard(scope, trio.sleep_forever, ask_again)
    refused = answers.pop(3)
    assert b"at a time" in refused
    assert answers == [200, b"1", 429, b"2", 200, b"1", b"2"]
