"""Rendering chat templates as transformers does, inside a sandbox."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from swarmnode.errors import ModelFileError, UsageError
from swarmnode.models.chat import ChatTemplate

CHATML = (
    "{%- for m in messages %}\n"
    "    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n' }}{%- endif %}\n"
    "{%- endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **arguments: Any) -> str:
    return ChatTemplate(source, now=lambda: datetime(2026, 3, 4)).render(messages, **arguments)


def test_messages_and_the_generation_prompt() -> None:
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_variables_reach_the_template_but_do_not_replace_the_messages() -> None:
    variables = {"enable_thinking": False, "messages": []}
    assert render(CHATML, variables=variables).endswith("hello<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_blocks_leave_no_blanks() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_functions_that_templates_expect() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}") == "2026-03-04"
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}") == "3"
    assert (
        ChatTemplate("{{ bos_token }}|{{ eos_token }}", bos_token="B", eos_token="E").render(HELLO) == "B|E"
    )


def test_tools_are_none_or_given() -> None:
    source = "{% if tools %}{{ tools[0].name }}{% else %}-{% endif %}"
    assert render(source) == "-"
    assert render(source, tools=[{"name": "search"}]) == "search"


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", HELLO, "roles must alternate"),
        (CHATML, [{"role": "user"}], "content"),
        (CHATML, [{"role": "user", "content": ["part"]}], "refuses"),
        (CHATML, [], "no message"),
        ("{{ 1 / 0 }}", HELLO, "division"),
        ("{{ messages.append(1) }}", HELLO, "unsafe|not safe"),
        ("{{ ''.__class__.__mro__ }}", HELLO, "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", HELLO, "recursion"),
    ],
)
def test_what_a_template_refuses_is_a_usage_error(
    source: str, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        render(source, messages)


def test_a_prompt_without_end_is_cut_off() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(UsageError, match="more than 1000 characters"):
        ChatTemplate(endless, max_chars=1000).render(HELLO)


def test_a_broken_template_is_the_files_fault() -> None:
    with pytest.raises(ModelFileError, match="chat_template"):
        ChatTemplate("{% for m in messages %}")
