"""Requests are checked field by field; what is not served is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from swarmnode.api.openai import (
    ResponseForm,
    error_object,
    parse_chat_untrusted,
    parse_completion_untrusted,
    usage_of,
)
from swarmnode.errors import UsageError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stream",
        "model",
        "stop",
    ]
)


def test_a_plain_request() -> None:
    asked = parse_completion_untrusted(
        {
            "prompt": "x",
            "max_tokens": 3,
            "temperature": 0,
            "seed": 1,
            "stream": True,
            "user": "me",
            "stop": None,
        }
    )
    assert (asked.prompt, asked.max_tokens, asked.stream) == ("x", 3, True)
    assert (asked.sampling.temperature, asked.sampling.seed) == (0, 1)


def test_a_chat_request_joins_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = parse_chat_untrusted(
        {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 5, "max_tokens": None}
    )
    assert asked.messages[0]["content"] == "ab"
    assert asked.max_tokens == 5


@pytest.mark.parametrize(
    ("limits", "max_tokens"),
    [
        ({"max_tokens": 50, "max_completion_tokens": None}, 50),
        ({"max_tokens": None, "max_completion_tokens": 50}, 50),
        ({"max_tokens": 50, "max_completion_tokens": 50}, 50),
        ({"max_tokens": 50}, 50),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({}, None),
    ],
    ids=str,
)
def test_either_name_of_the_limit_counts(limits: dict[str, Any], max_tokens: int | None) -> None:
    asked = parse_chat_untrusted({"messages": [{"role": "user", "content": "x"}], **limits})
    assert asked.max_tokens == max_tokens


@pytest.mark.parametrize("other", [51, True, 50.0, "50", [50]])
def test_two_limits_that_differ_are_refused(other: object) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(UsageError, match="max_completion_tokens differ"):
        parse_chat_untrusted({"messages": messages, "max_tokens": 50, "max_completion_tokens": other})


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ([], "JSON object"),
        ({}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "x", "stop": ["a"]}, "stop"),
        ({"prompt": "x", "n": 2}, "not served: n"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "top_k": 1.5}, "top_k"),
        ({"prompt": "x", "seed": 10**30}, "seed"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "stream_options": 1}, "stream_options"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"prompt": "x", "model": 5}, "model"),
    ],
)
def test_wrong_completions_name_the_field(body: Any, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        parse_completion_untrusted(body)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, r"messages\[0\]"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "pictures"),
        ({"messages": [{"role": "user", "content": 5}]}, "text is expected"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": []}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
def test_wrong_chats_name_the_field(body: Any, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        parse_chat_untrusted(body)


@given(st.dictionaries(FIELDS, JSON, max_size=5) | JSON)
def test_any_json_is_taken_or_refused(body: Any) -> None:
    for parse in (parse_completion_untrusted, parse_chat_untrusted):
        try:
            parse(body)
        except UsageError:
            continue


def test_forms_of_answers() -> None:
    form = ResponseForm("id", "model", 1, chat=True)
    assert form.chunk("a", None, first=True)["choices"][0]["delta"] == {"content": "a", "role": "assistant"}
    assert form.chunk("", "stop", first=False)["choices"][0] == {
        "index": 0,
        "delta": {},
        "finish_reason": "stop",
    }
    assert form.whole("a", "stop", usage_of(1, 2))["usage"]["total_tokens"] == 3
    assert usage_of(3, 2)["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage_of(3, 2, 1)["prompt_tokens_details"] == {"cached_tokens": 1}
    assert form.usage_chunk(usage_of(1, 2))["choices"] == []
    plain = ResponseForm("id", "model", 1, chat=False)
    assert plain.chunk("a", None, first=True)["choices"][0]["text"] == "a"
    assert plain.whole("a", "length", usage_of(1, 2))["object"] == "text_completion"
    assert error_object("m", "t", "c")["error"]["code"] == "c"


@given(st.text(st.characters()) | st.text("\ud800\udfffx", max_size=5) | st.just("\ud800" * 10**6))
def test_every_error_can_be_sent(message: str) -> None:
    body = JSONResponse(error_object(message, "t")).body
    assert len(body) < 50_000
    assert json.loads(bytes(body))
