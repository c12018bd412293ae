"""Rendering chat templates as transformers does, inside a sandbox."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from swarmnode.config import ModelsConfig
from swarmnode.errors import ModelFileError, UsageError
from swarmnode.models.chat import ChatTemplate, template_of
from swarmnode.models.template_process import WALL_FACTOR
from swarmnode.models.template_renderer import CPU_SIGNAL
from swarmnode.models.tokenizer import Tokenizer

from .vocabulary import make_metadata

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
    return ChatTemplate(source, now=lambda: datetime(2026, 3, 4)).render(messages, **arguments).text


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
        ChatTemplate("{{ bos_token }}|{{ eos_token }}", bos_token="B", eos_token="E").render(HELLO).text
        == "B|E"
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
        ChatTemplate(endless, config=ModelsConfig(max_prompt_chars=1000)).render(HELLO)


def test_a_broken_template_is_the_files_fault() -> None:
    with pytest.raises(ModelFileError, match="chat_template"):
        ChatTemplate("{% for m in messages %}")


def test_a_template_that_is_no_text_is_the_files_fault() -> None:
    tokenizer = Tokenizer(make_metadata())
    assert template_of({}, tokenizer) is None
    for value in (("x",), 5, np.array([1.0])):
        with pytest.raises(ModelFileError, match=r"tokenizer\.chat_template is .*, not a string"):
            template_of({"tokenizer.chat_template": value}, tokenizer)


# -- templates that are programs without end

LIMITS = ModelsConfig(template_render_s=0.5)
LONG_LOOP = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        LONG_LOOP,
        "{% set ns = namespace(a='xxxxxxxx') %}"
        "{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set x %}{{ messages[0].content }}{% endset %}{{ (x * 999999999) | length }}",
        "{{ 'a' * 30000000000 }}",
        "{{ '%100000000000d' % 1 }}",
        "{{ 9 ** (9 ** (messages | length + 8)) }}",
        "{{ messages[0].content.ljust(30000000000) }}",
        "{{ messages[0].content | center(30000000000) }}",
        "{{ ([0] * 9999999999) | length }}",
        "{{ lipsum(n=99999999) }}",
    ],
)
def test_time_and_memory_of_a_rendering_are_limited(source: str) -> None:
    with pytest.raises(UsageError, match=r"refuses these messages: (the template takes|out of memory)"):
        ChatTemplate(source, config=LIMITS).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
        "{% if a %}" * 3000 + "x" + "{% endif %}" * 3000,
        "{% for a in b %}" * 40 + "x" + "{% endfor %}" * 40,
        "{{ a }}" * 200000,
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_time_and_memory_of_compiling_are_limited(source: str) -> None:
    with pytest.raises(ModelFileError, match=r"chat_template cannot be used: .{5,600}"):
        ChatTemplate(source, config=ModelsConfig(template_compile_s=1.0))


@pytest.mark.skipif(CPU_SIGNAL is None, reason="Windows counts no CPU time for us")
def test_the_limits_are_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load, ten seconds by the clock were once too few to compile a template; here the clock never rings."""
    rings_s: list[float] = []

    class Silent(threading.Timer):
        def __init__(self, interval: float, *arguments: Any) -> None:
            rings_s.append(interval)
            super().__init__(interval, *arguments)

        def start(self) -> None:
            pass

    monkeypatch.setattr("swarmnode.models.template_process.threading.Timer", Silent)
    with pytest.raises(UsageError, match=r"the template takes more than 0\.5 s"):
        ChatTemplate(LONG_LOOP, config=LIMITS).render(HELLO)
    with pytest.raises(ModelFileError, match=r"the template takes more than 0\.1 s"):
        ChatTemplate("{{ 9 ** (9 ** 9) }}", config=ModelsConfig(template_compile_s=0.1))
    assert rings_s == [WALL_FACTOR * limit_s for limit_s in (10.0, 0.5, 0.1)]
    assert WALL_FACTOR >= 10


def test_a_template_works_again_after_messages_that_it_does_not_survive() -> None:
    source = "{% if messages[0].content == 'loop' %}" + LONG_LOOP + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, config=LIMITS)
    assert template.render(HELLO).text == "hello"
    for _ in range(2):
        with pytest.raises(UsageError, match=r"more than 0\.5 s"):
            template.render([{"role": "user", "content": "loop"}])
        assert template.render(HELLO).text == "hello"


def test_long_messages_of_any_alphabet_fit_the_limits() -> None:
    content = "\U0001f41d\ud800" * 3_000_000
    template = ChatTemplate("{{ messages[0].content }}", config=ModelsConfig(template_render_s=60.0))
    assert template.render([{"role": "user", "content": content}]).text == content


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(UsageError, match="not JSON"):
        render(CHATML, [{"role": "user", "content": object()}])
    assert render("{{ x | length }}", variables={"x": (1, 2)}) == "2"


def test_threads_take_turns() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    texts = [str(i) * 50_000 for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        rendered = pool.map(lambda text: template.render([{"role": "user", "content": text}]).text, texts)
        assert list(rendered) == texts


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate(CHATML)
    process = template._process._process
    assert process is not None
    assert process.poll() is None
    del template
    gc.collect()
    assert process.returncode is not None
