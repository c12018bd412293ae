"""Requests are checked field by field; what is not served is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from swarmnode.api.forms import error_object
from swarmnode.api.openai import parse_chat_untrusted, parse_completion_untrusted
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
        "n",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "presence_penalty",
    ]
)


HELLO = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALLING = {"role": "assistant", "content": None}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


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
    assert (asked.prompts, asked.max_tokens, asked.stream) == (("x",), 3, True)
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


BAD_PROMPTS: list[Any] = [
    5,
    [],
    [[]],
    ["a", 1],
    [1, [2]],
    [[1], "a"],
    [True],
    [1.0],
    [[1], []],
    [None],
    {"a": 1},
]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
    ids=str,
)
def test_a_prompt_may_be_text_or_ids_one_or_several(given: Any, prompts: tuple[Any, ...]) -> None:
    asked = parse_completion_untrusted({"prompt": given, "n": 3})
    assert asked.prompts == prompts
    assert (asked.is_chat, asked.n_answers) == (False, 3 * len(prompts))


@pytest.mark.parametrize("parse", [parse_completion_untrusted, parse_chat_untrusted])
def test_logit_bias(parse: Any) -> None:
    fields = {"prompt": "x"} if parse is parse_completion_untrusted else {"messages": HELLO}
    for value, biases in ((None, ()), ({}, ()), ({"50": -100, "7": 0.5}, ((50, -100), (7, 0.5)))):
        assert parse({**fields, "logit_bias": value}).sampling.logit_bias == biases


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ([], "JSON object"),
        ({}, "prompt"),
        *(({"prompt": prompt}, "prompt: a string, a list") for prompt in BAD_PROMPTS),
        ({"prompt": ["a"] * 65}, "65 prompts with 1 answer each are more than 64"),
        ({"prompt": ["a"] * 5, "n": 16}, "5 prompts with 16 answers each"),
        ({"prompt": "x", "logit_bias": [1]}, "logit_bias: an object"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: 'a' is no token id"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias: '-1' is no token id"),
        ({"prompt": "x", "logit_bias": {"12345678901": 1}}, "logit_bias: '12345678901' is no token id"),
        ({"prompt": "x", "logit_bias": {"1" * 5000: 1}}, f"logit_bias: '{'1' * 64}' is no token id"),
        ({"prompt": "x", "logit_bias": {"\u0663": 1}}, "is no token id"),
        ({"prompt": "x", "logit_bias": {"9999999999": 1}}, "logit_bias: a token = 9999999999"),
        ({"prompt": "x", "logit_bias": {"1": 1, "01": 2}}, "each once"),
        ({"prompt": "x", "logit_bias": {"1": 100.5}}, "logit_bias: 1 = 100.5"),
        ({"prompt": "x", "logit_bias": {"1": None}}, "logit_bias: 1 = None"),
        ({"prompt": "x", "logit_bias": {"1": float("nan")}}, "logit_bias: 1 = nan"),
        ({"prompt": "x", "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias: up to 1024"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": ["a", None]}, "stop"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop": "a" * 257}, "stop"),
        ({"prompt": "x", "n": 0}, "n: an integer from 1 to 16"),
        ({"prompt": "x", "n": 17}, "n: an integer"),
        ({"prompt": "x", "echo": True}, "not served: echo"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "x", "frequency_penalty": "a"}, "frequency_penalty"),
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
        ({"messages": HELLO, "tools": []}, "tools"),
        ({"messages": HELLO, "tools": [{"type": "search"}]}, r"tools\[0\]"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"messages": HELLO, "tools": [TOOL, TOOL]}, "same name"),
        ({"messages": HELLO, "tools": [STRICT]}, "strict"),
        ({"messages": HELLO, "tools": [TOOL], "tool_choice": "often"}, "tool_choice"),
        ({"messages": HELLO, "tools": [TOOL], "tool_choice": NAMED | {"function": {"name": "h"}}}, "none of"),
        ({"messages": HELLO, "tool_choice": "auto"}, "no tools"),
        ({"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": HELLO, "tools": [TOOL], "response_format": {"type": "json_object"}}, "both"),
        ({"messages": HELLO, "response_format": "json"}, "response_format"),
        (
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format",
        ),
        ({"messages": HELLO, "top_logprobs": 2}, "needs logprobs"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, 1]}]},
            r"calls\[1\]",
        ),
        ({"messages": [CALLING | {"tool_calls": [call("{")]}]}, r"calls\[0\].function.arguments: not valid"),
        ({"messages": [CALLING | {"tool_calls": [call("[]")]}]}, "an object in JSON"),
        ({"messages": [CALLING | {"reasoning_content": 1}]}, "reasoning_content"),
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


@pytest.mark.parametrize(("stop", "stops"), [(None, ()), ("a", ("a",)), (["a", "\n"], ("a", "\n")), ([], ())])
def test_stop_is_a_string_or_several(stop: Any, stops: tuple[str, ...]) -> None:
    assert parse_completion_untrusted({"prompt": "x", "stop": stop}).stops == stops


def test_how_tools_may_be_used() -> None:
    def use(**fields: Any) -> Any:
        return parse_chat_untrusted({"messages": HELLO, **fields}).tool_use

    assert use().calling == "none"
    assert use(tools=[TOOL]).calling == "auto"
    assert use(tools=[TOOL], tool_choice="none").tools == ()
    named = use(tools=[STRICT], tool_choice=NAMED, parallel_tool_calls=False)
    assert (named.calling, named.name, named.parallel) == ("required", "f", False)
    assert use(tools=[TOOL]).parameters == {"f": {"type": "object"}}


def test_arguments_of_earlier_calls_become_values() -> None:
    messages = [*HELLO, CALLING | {"tool_calls": [call('{"a": 1}')], "name": None}]
    asked = parse_chat_untrusted({"messages": messages})
    assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert asked.messages[1]["content"] == ""
    assert "name" not in asked.messages[1]


@pytest.mark.parametrize(
    ("given", "thought"),
    [
        ({"reasoning": "hm"}, "hm"),
        ({"thinking": "hm", "reasoning": "other"}, "hm"),
        ({"reasoning_content": "", "reasoning": "other"}, ""),
        ({"reasoning_content": None, "reasoning": {"effort": "low"}}, None),
    ],
)
def test_an_earlier_thought_has_one_name(given: dict[str, Any], thought: str | None) -> None:
    asked = parse_chat_untrusted({"messages": [*HELLO, CALLING | given]})
    assert asked.messages[1].get("reasoning_content") == thought


def test_logprobs_and_formats() -> None:
    def chat(**fields: Any) -> Any:
        return parse_chat_untrusted({"messages": HELLO, **fields})

    assert [chat(logprobs=wanted).n_logprobs for wanted in (None, False, True)] == [None, None, 0]
    assert chat(logprobs=True, top_logprobs=3).n_logprobs == 3
    assert parse_completion_untrusted({"prompt": "x", "logprobs": 2}).n_logprobs == 2
    assert chat(response_format={"type": "text"}).response_format.schema is None
    assert chat(response_format={"type": "json_object"}).response_format.schema == {"type": "object"}
    given = {
        "type": "json_schema",
        "json_schema": {"name": "n", "strict": True, "schema": {"type": "string"}},
    }
    assert chat(response_format=given).response_format.schema == {"type": "string"}


@given(st.text(st.characters()) | st.text("\ud800\udfffx", max_size=5) | st.just("\ud800" * 10**6))
def test_every_error_can_be_sent(message: str) -> None:
    body = JSONResponse(error_object(message, "t")).body
    assert len(body) < 50_000
    assert json.loads(bytes(body))
