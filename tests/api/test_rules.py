"""Answers that must have a form have it, whatever the model would say: any allowed token, at random."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from swarmnode.api.answer_text import Reading
from swarmnode.api.openai import parse_chat_untrusted
from swarmnode.api.prompts import Prompt
from swarmnode.api.rules import Rules
from swarmnode.errors import MissingExtraError, UsageError
from swarmnode.models.chat import ChatTemplate
from swarmnode.models.grammar import GrammarConstraint, Grammars
from swarmnode.models.sampling import Sampler, SamplingParams
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.index import ModelIndex
from tests.api.test_answer_text import Read
from tests.models.vocabulary import UNUSED, make_trained_metadata

HELLO = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Holmes", "Watson"]},
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
}
JSON_TEMPLATE = ChatTemplate("{{ tools }}")
TAGGED_TEMPLATE = ChatTemplate("{# <function= #}{{ tools }}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with ModelIndex.open(bundled_model()) as index:
        return Tokenizer(index.metadata)


def answer(
    tokenizer: Tokenizer,
    seed: int,
    template: ChatTemplate = JSON_TEMPLATE,
    is_thinking: bool = False,
    **fields: Any,
) -> str:
    """What a model that knows nothing says, up to its end."""
    asked = parse_chat_untrusted({"messages": HELLO, **fields})
    constraint = Rules(tokenizer, template).constraint(asked, Prompt([1], is_thinking))
    assert constraint is not None
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=seed)
    sampler = Sampler(params, constraint=constraint.copy())
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(2000):
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        if is_thinking and len(tokens) == 5:
            logits[tokenizer.encode("</think>")] = 1e6
        token = sampler.sample(logits)
        if token in tokenizer.end_ids:
            return tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError(tokenizer.decode(tokens))


@pytest.mark.parametrize("seed", range(5))
def test_json_of_a_schema(tokenizer: Tokenizer, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    value = json.loads(answer(tokenizer, seed, response_format=form))
    assert set(value) == {"name", "n"}
    assert value["name"] in ("Holmes", "Watson")
    assert 0 <= value["n"] <= 99


def test_a_thought_may_come_first(tokenizer: Tokenizer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    text = answer(tokenizer, 1, is_thinking=True, response_format=form)
    read = Read(Reading(is_thinking=True), [text])
    assert read.reasoning
    assert set(json.loads(read.content)) == {"name", "n"}


@pytest.mark.parametrize("template", [JSON_TEMPLATE, TAGGED_TEMPLATE], ids=["json", "tags"])
@pytest.mark.parametrize("seed", range(4))
def test_a_tool_that_must_be_called_is_called_rightly(
    tokenizer: Tokenizer, seed: int, template: ChatTemplate
) -> None:
    text = answer(tokenizer, seed, template, tools=[WEATHER, NOW], tool_choice="required")
    parameters = {"weather": PARAMETERS, "now": {}}
    ((name, arguments),) = Read(Reading(tools=parameters), list(text)).calls
    assert name in ("weather", "now")
    assert isinstance(arguments, dict)
    if name == "weather":
        assert set(arguments) - {"city"} == {"unit", "days"}
        assert arguments["unit"] in ("C", "F")
        assert 1 <= arguments["days"] <= 7


@pytest.mark.parametrize("template", [JSON_TEMPLATE, TAGGED_TEMPLATE], ids=["json", "tags"])
def test_the_tool_that_is_named(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    text = answer(tokenizer, 0, template, tools=[WEATHER, NOW], tool_choice=choice)
    assert Read(Reading(tools={}), [text]).calls == [("now", {})]


def test_strings_in_tags_have_fewer_rules(tokenizer: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(UsageError, match="format of the parameter day"):
        answer(tokenizer, 0, TAGGED_TEMPLATE, tools=[tool], tool_choice="required")
    assert "<tool_call>" in answer(tokenizer, 0, JSON_TEMPLATE, tools=[tool], tool_choice="required")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "foo"}, "foo"),
        ({"$ref": "http://127.0.0.1/x"}, "not fetch"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible"),
    ],
)
def test_schemas_that_cannot_be_kept_to(tokenizer: Tokenizer, schema: dict[str, Any], says: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(UsageError, match=says):
        answer(tokenizer, 0, response_format=form)


def test_without_the_library_it_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"tools": [NOW], "tool_choice": "required"},
    ):
        with pytest.raises(MissingExtraError, match="extra `json`"):
            answer(tokenizer, 0, **fields)


def test_a_thought_ends_with_no_token_that_ends_answers() -> None:
    """A vocabulary has several of those (<|im_end|>, <|endoftext|>); the grammar begins behind the thought."""
    unused: Any = None
    constraint = GrammarConstraint(unused, 12, end_id=7, end_ids=frozenset({5, 7}), thought_end=9)
    assert constraint.allowed().tolist() == [0, 1, 2, 3, 4, 6, 8, 9, 10, 11]


def test_no_form_has_a_place_for_unused_tokens() -> None:
    tokenizer = Tokenizer(make_trained_metadata(["abc"], "qwen35"))
    first_unused = tokenizer.n_vocab - len(UNUSED)
    constraint = Grammars(tokenizer).of_schema({"type": "string"})
    constraint.accept(tokenizer.encode('"')[0])
    allowed = constraint.allowed()
    assert tokenizer.encode("[")[0] in allowed
    assert allowed.max() < first_unused
