"""Answers are read the same way wherever their text is cut: thoughts, stop strings, tool calls of both forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.api.answer_text import AnswerReader, Reading

TOOLS = {
    "weather": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}
    },
    "now": {},
}
WITH_TOOLS = Reading(tools=TOOLS)


class Read:
    """What a client would have put together."""

    def __init__(self, reading: Reading, pieces: Sequence[str], reason: str = "stop") -> None:
        numbers = count()
        reader = AnswerReader(reading, lambda: f"id{next(numbers)}")
        deltas = [reader.push(piece) for piece in pieces]
        self.ended = reader.has_ended
        deltas.append(reader.finish(reason))
        self.content = "".join(delta.content for delta in deltas)
        self.reasoning = "".join(delta.reasoning for delta in deltas)
        self.reason = reader.finish_reason(reason)
        self.names: list[str] = []
        self.arguments: list[str] = []
        for part in (part for delta in deltas for part in delta.calls):
            if part.name is not None:
                assert part.index == len(self.names)
                assert part.call_id == f"id{part.index}"
                self.names.append(part.name)
                self.arguments.append("")
            self.arguments[part.index] += part.arguments
        self.n_parts = sum(len(delta.calls) for delta in deltas)

    @property
    def calls(self) -> list[tuple[str, object]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    def told(self) -> tuple[object, ...]:
        return self.content, self.reasoning, self.names, self.arguments, self.reason, self.ended


TAGGED = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nSão "Paulo"\n2</parameter>\n'
    '<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>'
)
HERMES = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a}\\"</tool_call>", "days": 3}}\n</tool_call>'
)
SWAPPED = '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>'
TEXTS = [
    "plain text",
    "<think>\nhm, \n</think>\n\nthe answer",
    "  <thin air",
    "thought\n\n</think>\n\ncontent </think> stays",
    "I look. \n" + TAGGED,
    HERMES + "\n" + HERMES,
    TAGGED + "\n" + SWAPPED + "\nand text",
    "<tool_call>no call</tool_call> <tool_call>{broken}</tool_call> a <tool_cal",
    '<tool_call>{"name": 5}</tool_call>',
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nx",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "x',
    '<tool_call>\n{"name": "wea',
    "say STOP now",
    "ST STO STOPSTOP",
]
READINGS = [
    Reading(stops=("STOP", "\n\n\n")),
    Reading(is_thinking=True, tools=TOOLS, stops=("STOP",)),
    WITH_TOOLS,
    Reading(tools=TOOLS, one_call=True),
    Reading(chat=False, stops=("OP", "STOP")),
]


@settings(max_examples=200)
@given(st.sampled_from(TEXTS), st.sampled_from(READINGS), st.sampled_from(["stop", "length"]), st.data())
def test_it_does_not_matter_where_the_text_is_cut(
    text: str, reading: Reading, reason: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert Read(reading, pieces, reason).told() == Read(reading, [text], reason).told()


@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<function=",
                ">",
                "{",
                '"',
                "a",
                "\n",
                "<think>",
                "</think>",
                "<parameter=",
                "</parameter>",
                "</function>",
                "STOP",
            ]
        ),
        max_size=12,
    )
)
def test_any_text_can_be_read_in_any_pieces(pieces: list[str]) -> None:
    for reading in READINGS:
        assert Read(reading, pieces).told() == Read(reading, list("".join(pieces))).told()


@pytest.mark.parametrize(
    ("text", "content", "ended"),
    [
        ("one two three", "one two three", False),
        ("one STOP two", "one ", True),
        ("one ST", "one ST", False),
        ("one\n\n two", "one", True),
        ("\n\nSTOP", "", True),
    ],
)
def test_stop_strings_across_pieces(text: str, content: str, ended: bool) -> None:
    read = Read(Reading(chat=False, stops=("STOP", "\n\n")), list(text))
    assert (read.content, read.ended) == (content, ended)


def test_what_may_become_a_stop_string_waits() -> None:
    reader = AnswerReader(Reading(stops=("STOP",)))
    assert [reader.push(piece).content for piece in ("a", "S", "T", "x")] == ["a", "", "", "STx"]


def test_a_stop_string_in_a_thought_is_part_of_it() -> None:
    read = Read(Reading(is_thinking=True, stops=("\n",)), ["a\nb</think>\n\nc\nd"])
    assert (read.reasoning, read.content) == ("a\nb", "c")


def test_thoughts_are_told_apart() -> None:
    for text, is_thinking in (("<think>\nhm\n</think>\n\nyes", False), ("hm</think>yes", True)):
        read = Read(Reading(is_thinking=is_thinking), list(text))
        assert (read.reasoning, read.content) == ("hm", "yes")
    cut = Read(Reading(is_thinking=True), ["never ending "], "length")
    assert (cut.reasoning, cut.content) == ("never ending", "")
    later = Read(Reading(), ["yes <think>no</think>"])
    assert (later.reasoning, later.content) == ("", "yes <think>no</think>")


def test_a_call_in_tags() -> None:
    read = Read(WITH_TOOLS, list("I look.\n\n" + TAGGED))
    assert read.content == "I look."
    expected = {"city": 'São "Paulo"\n2', "days": 3, "deep": {"a": [1]}}
    assert read.calls == [("weather", expected)]
    assert read.reason == "tool_calls"
    assert read.n_parts > 15, "texts are passed on as they come"


def test_calls_in_json() -> None:
    read = Read(WITH_TOOLS, list(HERMES + "\n" + SWAPPED))
    assert read.calls == [
        ("weather", {"city": 'a}"</tool_call>', "days": 3}),
        ("weather", {"days": 1}),
    ]
    assert read.content == ""
    assert Read(WITH_TOOLS, [HERMES[:57]], "length").arguments == ['{"city": "a}']


def test_types_of_values_in_tags() -> None:
    text = (
        "<tool_call><function=weather><parameter=city>5</parameter><parameter=days>many</parameter>"
        "<parameter=other>true</parameter></function></tool_call>"
    )
    assert Read(WITH_TOOLS, [text]).calls == [("weather", {"city": "5", "days": "many", "other": True})]
    assert Read(WITH_TOOLS, ["<tool_call><function=now></function></tool_call>"]).calls == [("now", {})]


def test_a_call_that_the_model_did_not_close_is_closed() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nx"
    assert Read(WITH_TOOLS, [text]).calls == [("weather", {"city": "x"})]
    assert Read(WITH_TOOLS, [text], "length").arguments == ['{"city": "x']
    assert Read(WITH_TOOLS, [text], "length").reason == "length"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no call</tool_call>",
        "<tool_call>{broken}</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "wea',
        "<tool_cal",
        "<tool_call> <funct",
    ],
)
def test_what_is_no_call_is_not_lost(text: str) -> None:
    for reason in ("stop", "length"):
        read = Read(WITH_TOOLS, list(text), reason)
        assert read.content.replace(" ", "") == text.replace(" ", "")
        assert read.names == []
        assert read.reason == reason


def test_without_tools_calls_are_text() -> None:
    assert Read(Reading(), list(HERMES)).content == HERMES


def test_one_call_ends_the_answer() -> None:
    read = Read(Reading(tools=TOOLS, one_call=True), [HERMES, "\n", HERMES])
    assert len(read.calls) == 1
    assert read.ended
    twin = AnswerReader(Reading(tools=TOOLS, one_call=True))
    assert [twin.ends(piece) for piece in (HERMES[:-1], ">", "x")] == [False, True, True]
