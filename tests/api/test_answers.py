"""What clients get of answers: several, stopped, with logprobs, thoughts and calls; streamed as answered whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarmnode.api.forms import text_logprobs
from swarmnode.models.logprobs import TokenLogprobs
from swarmnode.models.sampling import Sampler
from swarmnode.models.tokenizer import Tokenizer
from tests.api.test_app import ASK, open_client, pieces_of

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}


def say(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, text: str) -> None:
    """Let the model answer this, and end."""
    script = [*tokenizer.encode(text, parse_special=True), tokenizer.eos_id]
    places: dict[Sampler, int] = {}  # not by id(): a later one may have that of one that is gone

    def choose(self: Sampler, logits: Any) -> int:
        place = places[self] = places.get(self, -1) + 1
        token = script[place]
        assert token is not None
        return token

    monkeypatch.setattr(Sampler, "_choose", choose)


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed chat answer, put together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for choice in (piece["choices"][0] for piece in pieces if piece["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def both(client: Any, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer in one piece, and the pieces of a stream."""
    whole = await client.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    streamed = await client.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    return whole.json(), pieces_of(streamed.text)


async def test_a_stop_string_ends_the_answer_and_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(tmp_path) as (client, swarm):
        say(monkeypatch, swarm.backbone.engine.tokenizer, "one two three four five six seven")
        body = {**ASK, "max_tokens": 40, "stop": ["ree f", "zzz"]}
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
        assert swarm.backbone.engine.n_free == 2
    assert whole["choices"][0] == {
        "index": 0, "text": "one two th", "finish_reason": "stop", "logprobs": None
    }  # fmt: skip
    assert whole["usage"]["completion_tokens"] < 20
    pieces = pieces_of(streamed.text)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "one two th"
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    n_run = whole["swarm"]["layers"] // 2  # a model of two layers
    assert n_run == whole["usage"]["completion_tokens"], "nothing was run behind the stop string"


async def test_the_thought_is_not_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_client(tmp_path) as (client, swarm):
        say(monkeypatch, swarm.backbone.engine.tokenizer, "<think>\nhm\n</think>\n\nyes")
        whole, pieces = await both(client, CHAT)
        cut, cut_pieces = await both(client, {**CHAT, "max_tokens": 3})
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    told = joined(pieces)
    assert (told["reasoning_content"], told["content"]) == ("hm", "yes")
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < 8
    assert "notice" not in whole["swarm"]
    assert cut["choices"][0]["finish_reason"] == "length"
    assert "reasoning_content" in cut["swarm"]["notice"], "an empty answer says why"
    assert "max_tokens" in cut_pieces[-2]["swarm"]["notice"]


@pytest.mark.parametrize("form", ["json", "tags"])
async def test_tools_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    text = {
        "json": '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>',
        "tags": "<tool_call><function=f><parameter=a>b</parameter></function></tool_call>",
    }[form]
    async with open_client(tmp_path, n_ctx=1024) as (client, swarm):
        say(monkeypatch, swarm.backbone.engine.tokenizer, text)
        body = {**CHAT, "tools": [TOOL], "max_tokens": 99}
        whole, pieces = await both(client, body)
        without, _ = await both(client, {**body, "tools": None})
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "f")
    assert json.loads(call["function"]["arguments"]) == {"a": "b"}
    told = joined(pieces)
    assert told["calls"] == [call["function"]]
    assert pieces[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert without["choices"][0]["message"]["content"] == text


async def test_several_answers(tmp_path: Path) -> None:
    body = {**ASK, "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 8}
    async with open_client(tmp_path) as (client, swarm):
        whole = (await client.post("/v1/completions", json=body)).json()
        again = (await client.post("/v1/completions", json=body)).json()
        first = (await client.post("/v1/completions", json={**body, "n": 1})).json()
        streamed = await client.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        assert swarm.backbone.engine.n_free == 2
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert texts[0] == first["choices"][0]["text"]
    assert len(set(texts)) > 1
    pieces = pieces_of(streamed.text)
    for index in range(3):
        mine = [choice for piece in pieces for choice in piece["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == texts[index]
        assert mine[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
    usage = whole["usage"]
    assert usage["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] > first["usage"]["completion_tokens"]
    assert pieces[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert pieces[0]["usage"] is None


async def test_one_of_several_that_fails_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Sampler, logits: Any) -> int:
        raise ZeroDivisionError

    async with open_client(tmp_path) as (client, swarm):
        monkeypatch.setattr(Sampler, "_choose", fail)
        answer = await client.post("/v1/completions", json={**ASK, "n": 3})
        assert swarm.backbone.engine.n_free == 2
    assert answer.status_code == 500


async def test_logprobs_are_those_of_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real: Callable[[Sampler, Any], int] = Sampler.sample

    def watching(self: Sampler, logits: Any) -> int:
        seen.append(np.array(logits, np.float64))
        return real(self, logits)

    monkeypatch.setattr(Sampler, "sample", watching)
    body = {**CHAT, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "presence_penalty": 1.5}
    async with open_client(tmp_path) as (client, _):
        whole, pieces = await both(client, body)
        text = (await client.post("/v1/completions", json={**ASK, "logprobs": 2})).json()
        plain = (await client.post("/v1/completions", json={**ASK, "logprobs": 0})).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for entry, logits in zip(content, seen, strict=False):
        expected = np.sort(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())[::-1]
        got = [other["logprob"] for other in entry["top_logprobs"]]
        assert got == pytest.approx(expected[:3].tolist(), abs=1e-5)
        assert math.isfinite(entry["logprob"])
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    assert [
        entry
        for piece in pieces
        for choice in piece["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ] == content
    logprobs = text["choices"][0]["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")] == [6, 6, 6]
    assert plain["choices"][0]["logprobs"]["top_logprobs"] is None


def test_the_token_that_was_taken_is_among_the_top_ones() -> None:
    """OpenAI: up to logprobs + 1 entries."""
    words = {0: b"the", 1: b"a", 2: b"door", 3: b"the"}
    tokenizer: Any = SimpleNamespace(token_bytes=lambda token, render_special: words[token])
    taken = [TokenLogprobs(2, -4.0, ((0, -0.5), (1, -1.5))), TokenLogprobs(0, -0.5, ((0, -0.5), (3, -1.0)))]
    found = text_logprobs(tokenizer, taken)
    assert [list(top.items()) for top in found["top_logprobs"]] == [
        [("the", -0.5), ("a", -1.5), ("door", -4.0)],
        [("the", -0.5)],
    ]
    assert found["token_logprobs"] == [-4.0, -0.5]


async def test_penalties_change_the_answer(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        body = {**ASK, "max_tokens": 30, "logprobs": 0, "presence_penalty": 2, "frequency_penalty": 2}
        penalised = (await client.post("/v1/completions", json=body)).json()
        plain = (await client.post("/v1/completions", json={**ASK, "max_tokens": 30, "logprobs": 0})).json()
    n_kinds = [len(set(answer["choices"][0]["logprobs"]["tokens"])) for answer in (penalised, plain)]
    assert n_kinds[0] > n_kinds[1]


async def test_a_bias_changes_the_answer_and_must_name_a_token(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, swarm):
        n_vocab = swarm.backbone.engine.model.n_vocab
        plain = (await client.post("/v1/completions", json={**ASK, "stream": True})).text
        (first, *_) = [piece["token"] for piece in pieces_of(plain) if "token" in piece]
        for bias, is_said in (({str(first): -100}, False), ({"65": 100}, True)):
            answer = await client.post(
                "/v1/completions", json={**ASK, "stream": True, "ignore": None, "logit_bias": bias}
            )
            tokens = [piece["token"] for piece in pieces_of(answer.text) if "token" in piece]
            assert first not in tokens
            assert (tokens == [65] * 6) is is_said
        refused = await client.post("/v1/completions", json={**ASK, "logit_bias": {str(n_vocab): 1}})
    assert refused.status_code == 400
    assert f"there is no token {n_vocab}; this model's ids go up to" in refused.json()["error"]["message"]


async def test_several_prompts_are_answered_as_they_would_be_alone(tmp_path: Path) -> None:
    """Answer `i` of prompt `p` has the index `p * n + i`, streamed or not."""
    async with open_client(tmp_path) as (client, swarm):
        texts = ["the cat", "a dog and"]
        ids = [swarm.backbone.engine.tokenizer.encode(text) for text in texts]
        ask = {**ASK, "temperature": 1.5, "seed": 3, "n": 2}
        alone = [
            (await client.post("/v1/completions", json={**ask, "prompt": text})).json() for text in texts
        ]
        wanted = [choice["text"] for answer in alone for choice in answer["choices"]]
        assert len(set(wanted)) == 4
        for prompt in (texts, ids):
            whole = (await client.post("/v1/completions", json={**ask, "prompt": prompt})).json()
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
            assert [choice["text"] for choice in whole["choices"]] == wanted
            assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))
            assert whole["usage"]["completion_tokens"] == 4 * 6
            streamed = await client.post("/v1/completions", json={**ask, "prompt": prompt, "stream": True})
            pieces = pieces_of(streamed.text)
            for index, text in enumerate(wanted):
                of_it = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
                assert "".join(choice["text"] for choice in of_it) == text
        one = (await client.post("/v1/completions", json={**ask, "prompt": ids[1]})).json()
        assert [choice["text"] for choice in one["choices"]] == wanted[2:]


@pytest.mark.parametrize("prompt", [[1, 2, 10**6], [[1], [-1]], [1, 2**40]], ids=str)
async def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, prompt: Any) -> None:
    async with open_client(tmp_path) as (client, swarm):
        answer = await client.post("/v1/completions", json={**ASK, "prompt": prompt})
        assert (answer.status_code, swarm.backbone.engine.n_free) == (400, 2)
    assert "outside the vocabulary" in answer.json()["error"]["message"]


async def test_one_prompt_of_several_that_is_too_long_refuses_all(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, swarm):
        answer = await client.post("/v1/completions", json={**ASK, "prompt": [[1], [1] * 63]})
        assert swarm.backbone.engine.n_tokens == 0
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_what_the_swarm_did_is_told_in_headers_and_usage(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, swarm):
        await swarm.join(10**8)
        answer = await client.post("/v1/completions", json=ASK)
        streamed = await client.post(
            "/v1/completions", json={**ASK, "stream": True, "stream_options": {"include_usage": True}}
        )
    assert answer.json()["usage"]["swarm"] == {
        "share_remote": 1.0, "workers": 1, "hedges": 0, "fallbacks": 0
    }  # fmt: skip
    for response in (answer, streamed):
        assert response.headers["x-swarm-share-remote"] == "1.0"
        assert response.headers["x-swarm-workers"] == "1"
        assert response.headers["x-swarm-hedges"] == response.headers["x-swarm-fallbacks"] == "0"
    assert pieces_of(streamed.text)[-1]["usage"]["swarm"]["workers"] == 1


async def test_models_and_what_is_not_served(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert (await client.get("/v1/models/a/b")).status_code == 404
        refused = await client.post("/v1/embeddings", json={"input": "x", "model": "tiny"})
    assert refused.status_code == 400
    assert "embeddings are not served" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "unsupported"


async def test_answers_of_a_schema(tmp_path: Path) -> None:
    """By a model of random weights, also with guessed tokens."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    body = {
        **CHAT,
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 1,
        "n": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    async with open_client(tmp_path, n_ctx=2048) as (client, swarm):
        whole, _ = await both(client, body)
        swarm.backbone.engine.batcher.speculate = "always"
        guessed = (await client.post("/v1/chat/completions", json=body)).json()
        wrong = await client.post(
            "/v1/chat/completions",
            json={**CHAT, "response_format": {"type": "json_schema", "json_schema": 5}},
        )
        called = await client.post(
            "/v1/chat/completions",
            json={**CHAT, "max_tokens": 300, "tools": [TOOL], "tool_choice": "required"},
        )
    for choice in whole["choices"]:
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) == {"ok", "n"}
    assert guessed["choices"] == whole["choices"]
    assert wrong.status_code == 400
    assert called.json()["choices"][0]["finish_reason"] in ("tool_calls", "length")
    assert called.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
