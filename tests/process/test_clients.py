"""Clients that people use, against a real backbone: the openai package, LangChain, curl. And what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio

from swarmnode.cli.processes import NodeProcess
from tests.process.test_commands import TIMEOUT_S, ask_and_leave, open_processes, start_backbone

pytestmark = pytest.mark.real_time

HOLMES: list[Any] = [{"role": "user", "content": "Who is Sherlock Holmes?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a person up.",
        "parameters": {
            "type": "object",
            "properties": {"person": {"enum": ["Holmes", "Watson"]}},
            "required": ["person"],
            "additionalProperties": False,
        },
    },
}


@asynccontextmanager
async def running(folder: Path, *arguments: str) -> AsyncIterator[tuple[NodeProcess, str]]:
    """A backbone process and the URL of its API."""
    async with open_processes() as processes:
        backbone, _, api = await start_backbone(folder, processes, *arguments)
        yield backbone, api
        assert await backbone.stop() == 0


def client_of(api: str, key: str = "none") -> openai.OpenAI:
    transport = openai.DefaultHttpxClient(trust_env=False, timeout=TIMEOUT_S)
    return openai.OpenAI(base_url=f"{api}/v1", api_key=key, max_retries=0, http_client=transport)


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    with trio.fail_after(2 * TIMEOUT_S):
        return await trio.to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)


async def test_the_openai_package(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, api):
        with client_of(api) as client:
            for part in (_models, _chats, _streams, _tools, _logprobs, _errors, _cancels):
                await in_thread(part, client)
        status = await _until(api, lambda now: now["swarmnode_slots_free"] == 4)
        assert status['swarmnode_answers_total{reason="broken"}'] >= 1


def _model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def _models(client: openai.OpenAI) -> None:
    assert client.models.retrieve(_model(client)).owned_by == "swarmnode"


def _chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=_model(client), messages=HOLMES, temperature=0, max_completion_tokens=60
    )
    assert "detective" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stopped = client.chat.completions.create(
        model=_model(client), messages=HOLMES, temperature=0, stop=["detective"], n=2, seed=1, max_tokens=60
    )
    for choice in stopped.choices:
        assert (choice.message.content or "").endswith("consulting ")
    raw = client.chat.completions.with_raw_response.create(
        model=_model(client), messages=HOLMES, temperature=0, max_tokens=2
    )
    assert raw.headers["x-swarm-share-remote"] == "0.0"
    text = client.completions.create(
        model=_model(client), prompt="To Sherlock Holmes she is always", max_tokens=3
    )
    assert text.choices[0].text
    several = client.completions.create(
        model=_model(client), prompt=["To Sherlock", "The man"], max_tokens=3, temperature=0, n=2
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in several.choices]
    assert (texts[0], texts[2]) == (texts[1], texts[3])
    assert texts[0] != texts[2]
    formed = client.chat.completions.create(
        model=_model(client), messages=HOLMES, response_format={"type": "json_object"}, max_tokens=200, seed=1
    )
    if formed.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(formed.choices[0].message.content or ""), dict)


def _streams(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=_model(client), messages=HOLMES, temperature=0)
    stream = client.chat.completions.create(
        model=_model(client),
        messages=HOLMES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage is not None
    assert whole.usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert pieces[-1].usage.model_extra is not None
    assert pieces[-1].usage.model_extra["swarm"]["fallbacks"] == 0


def _tools(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": _model(client), "messages": HOLMES, "tools": [TOOL], "max_tokens": 200}
    answer = client.chat.completions.create(**ask, tool_choice="required", temperature=0)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["person"] in ("Holmes", "Watson")
    named: Any = {"type": "function", "function": {"name": "look_up"}}
    arguments, names = "", []
    for piece in client.chat.completions.create(**ask, tool_choice=named, temperature=0, stream=True):
        for part in piece.choices[0].delta.tool_calls or ():
            assert part.function is not None
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
    assert (names, json.loads(arguments)) == (["look_up"], json.loads(call.function.arguments))
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "a detective"}
    ask["messages"] = [*HOLMES, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**ask, temperature=0).choices[0].message.content


def _logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=_model(client), messages=HOLMES, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the best"
        assert entry.top_logprobs[1].logprob <= entry.logprob <= 0


def _errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="serves"):
        client.chat.completions.create(model="gpt-4", messages=HOLMES)
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.chat.completions.create(model=_model(client), messages=HOLMES, max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=_model(client), messages=HOLMES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="logit_bias: there is no token 999999"):
        client.chat.completions.create(model=_model(client), messages=HOLMES, logit_bias={"999999": 1})
    with pytest.raises(openai.BadRequestError, match="embeddings are not served"):
        client.embeddings.create(model=_model(client), input="x")


def _cancels(client: openai.OpenAI) -> None:
    for _ in range(6):  # more than there are slots
        stream = client.chat.completions.create(
            model=_model(client), messages=HOLMES, max_tokens=2000, stream=True, presence_penalty=2
        )
        next(iter(stream))
        stream.close()
    assert client.chat.completions.create(model=_model(client), messages=HOLMES, max_tokens=2).choices


def _langchain(api: str) -> None:
    from langchain_openai import ChatOpenAI

    with httpx.Client(trust_env=False, timeout=TIMEOUT_S) as transport:
        model = ChatOpenAI(
            model="Baker Street",
            base_url=f"{api}/v1",
            api_key=lambda: "none",
            temperature=0,
            http_client=transport,
        )
        name = transport.get(f"{api}/v1/models").json()["data"][0]["id"]
        model = model.model_copy(update={"model_name": name})
        assert "detective" in str(model.invoke("Who is Sherlock Holmes?").content)
        pieces = list(model.stream("Who is Sherlock Holmes?"))
        assert "detective" in "".join(str(piece.content) for piece in pieces)
        called: Any = model.bind_tools([TOOL], tool_choice="look_up").invoke("Who is Sherlock Holmes?")
        assert called.tool_calls[0]["name"] == "look_up"
        assert called.tool_calls[0]["args"]["person"] in ("Holmes", "Watson")
        schema = {"title": "who", "description": "d", **TOOL["function"]["parameters"]}
        formed = model.with_structured_output(schema, method="json_schema").invoke("Who is Watson?")
        assert formed["person"] in ("Holmes", "Watson")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
async def test_langchain(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, api):
        await in_thread(_langchain, api)


def _curl(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_curl(tmp_path: Path) -> None:
    body = json.dumps({"messages": HOLMES, "temperature": 0, "stream": True})
    json_type = "content-type: application/json"
    async with running(tmp_path) as (_, api):
        url = f"{api}/v1/chat/completions"
        streamed = await in_thread(_curl, "-N", url, "-H", json_type, "-d", body)
        headed = await in_thread(_curl, "-i", url, "-H", json_type, "-d", body.replace("true", "false"))
        wrong = await in_thread(_curl, url, "-d", "{")
    lines = [line for line in streamed.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    assert "x-swarm-workers: 0" in headed.lower()
    assert "detective" in headed
    assert json.loads(wrong)["error"]["type"] == "invalid_request_error"


async def test_a_public_api_needs_keys(tmp_path: Path) -> None:
    """Asked at another address of this machine than loopback, which is a client from elsewhere."""
    from swarmnode.config import Folders
    from swarmnode.net.own_hosts import own_hosts
    from swarmnode.services.api_keys import new_key, revoke_key

    hosts = [host for host in own_hosts() if ":" not in host]
    if not hosts:
        pytest.skip("this machine has no address but loopback")
    async with open_processes() as processes:
        refused = await processes.start(
            "refused", ["backbone", "--listen", "127.0.0.1:0", "--api", "0.0.0.0:0"], tmp_path / "backbone"
        )
        assert await refused.process.wait() == 1
        await refused.wait_line("swarmnode: the API would listen on 0.0.0.0", TIMEOUT_S)
        keys = Folders.under(tmp_path / "backbone").api_keys_file
        key = new_key(keys, "test")
        _, _, api = await start_backbone(tmp_path, processes, "--api", "0.0.0.0:0")
        port = httpx.URL(api).port
        outside = f"http://{hosts[0]}:{port}"
        with client_of(outside, key) as client:
            assert await in_thread(_model, client)
            await in_thread(_without_key, outside)
            revoke_key(keys, "test")
            with pytest.raises(openai.AuthenticationError, match="not known here"):
                await in_thread(_model, client)
        with client_of(f"http://127.0.0.1:{port}") as client:
            assert await in_thread(_model, client)


def _without_key(outside: str) -> None:
    with (
        client_of(outside, "wrong") as client,
        pytest.raises(openai.AuthenticationError, match="needs a key"),
    ):
        _model(client)
    assert httpx.get(f"{outside}/health", trust_env=False).status_code == 200


async def test_nothing_is_left_of_many_requests(tmp_path: Path) -> None:
    """Answered, streamed, broken off, refused: slots, files and memory are what they were."""
    async with running(tmp_path) as (_, api):
        at_first = await _until(api, lambda now: True)
        await _many(api, 60)
        before = await _settled(api, at_first)
        await _many(api, 200)
        after = await _settled(api, at_first)
    assert after["swarmnode_waiting"] == 0
    grown = after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
    assert grown < 24e6, f"{grown / 200:.0f} bytes a request"


async def _many(api: str, n: int) -> None:
    limit = trio.CapacityLimiter(12)
    async with trio.open_nursery() as nursery:
        for number in range(n):
            nursery.start_soon(_one, api, number, limit)


async def _one(api: str, number: int, limit: trio.CapacityLimiter) -> None:
    body: dict[str, Any] = {"prompt": f"The {number}", "max_tokens": 5, "stream": bool(number % 2)}
    async with limit:
        if number % 7 == 0:
            await ask_and_leave(api, body | {"stream": True})
            return
        body |= {"n": 1 + number % 3, "prompt": body["prompt"] if number % 5 else 5}
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            answer = await client.post(f"{api}/v1/completions", json=body)
        assert answer.status_code == (200 if number % 5 else 400)


async def _settled(api: str, at_first: dict[str, float]) -> dict[str, float]:
    """Metrics once slots and files are as free as at first; TooSlowError if they do not become so."""
    return await _until(
        api,
        lambda now: (
            now["swarmnode_slots_free"] == at_first["swarmnode_slots_free"]
            and now["process_open_fds"] <= at_first["process_open_fds"] + 3
        ),
    )


async def _until(api: str, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Asked over one connection, so that asking opens no files."""
    with trio.fail_after(TIMEOUT_S):
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            while True:
                found = _values((await client.get(f"{api}/metrics")).text)
                if holds(found):
                    return found
                await trio.sleep(0.1)


def _values(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}
