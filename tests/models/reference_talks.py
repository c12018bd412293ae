"""Conversations as clients send them, and a chat template that uses whatever those of Qwen's models use."""

from __future__ import annotations

from typing import Any

TEMPLATE = r"""
{%- macro shown(content, is_system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part.type == 'text' or 'text' in part %}
                {{- part.text }}
            {%- elif is_system %}
                {{- raise_exception('A system message is text.') }}
            {%- else %}
                {{- raise_exception('Unexpected part: ' ~ part.type) }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is not none and content is not undefined %}
        {{- raise_exception('Unexpected content.') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('Nothing was said.') }}
{%- endif %}
{%- set has_system = messages[0].role == 'system' %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\nFunctions that may be called:' }}
    {%- for tool in tools %}
        {{- '\n' ~ loop.index ~ '/' ~ loop.length ~ ' ' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\nCall one with <tool_call>\n<function=name>\n<parameter=name>\nvalue\n</parameter>\n' }}
    {{- '</function>\n</tool_call>' }}
    {%- if has_system %}
        {{- '\n\n' + shown(messages[0].content, true) | trim }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif has_system %}
    {{- '<|im_start|>system\n' + shown(messages[0].content, true) | trim + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(is_searching=true, last_question=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.is_searching and message.role == 'user' %}
        {%- set text = shown(message.content) | trim %}
        {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
            {%- set ns.is_searching = false %}
            {%- set ns.last_question = messages | length - 1 - loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.is_searching %}
    {{- raise_exception('Nobody asked anything.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = shown(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('The system message comes first.') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\n' }}
        {%- if loop.index0 > ns.last_question %}
            {{- '<think>\n' + thought | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}
                    {%- set call = call.function %}
                {%- endif %}
                {{- ('' if loop.first and not content else '\n\n' if loop.first else '\n') }}
                {{- '<tool_call>\n<function=' + call.name + '>\n' }}
                {%- for name, value in call.arguments | default({}, true) | items %}
                    {{- '<parameter=' + name + '>\n' }}
                    {%- set is_list = value is sequence and value is not string %}
                    {%- set value = value | tojson | safe if value is mapping or is_list else value | string %}
                    {{- value }}
                    {{- '\n</parameter>\n' }}
                {%- endfor %}
                {{- '</function>\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if not loop.previtem or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected role: ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
"""


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    """A tool call; OpenAI has its arguments as JSON in a string."""
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def function(name: str, description: str, **properties: str) -> dict[str, Any]:
    """A tool; `properties`: types by name."""
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


SYSTEM = said("system", "  You are Dr. Watson.\n")
QUESTION = said("user", "Who is at the door?")
TOOLS = [
    function("weather", 'What it is like in "<city>" & around.', city="string", days="integer"),
    function("find.it", "Suche – größer als ß 🔎", 搜索="string"),
]
ONE_CALL = said(
    "assistant", None, tool_calls=[call(1, "weather", '{"city": "London", "days": 3, "exact": 1.50}')]
)
TWO_CALLS = said(
    "assistant",
    "I look twice.",
    reasoning_content="Both at once?\n",
    tool_calls=[
        call(
            2,
            "find.it",
            '{"q": "größte 🐝", "at": {"b": [1, null, true], "a": "<é>"}, "no": false, "nil": null}',
        ),
        call(3, "weather", ""),
    ],
)
RESULTS = [
    said("tool", '{"°C": 7, "sky": "overcast"}', tool_call_id="call_2"),
    said("tool", [{"type": "text", "text": "fog,\n"}, {"type": "text", "text": "as ever"}], tool_call_id="c"),
]

Talk = dict[str, Any]

PLAIN_TALKS: dict[str, Talk] = {
    "without a system message": {"messages": [QUESTION]},
    "with a system message": {"messages": [SYSTEM, QUESTION]},
    "many turns": {
        "messages": [
            SYSTEM,
            QUESTION,
            said("assistant", "Mr. Holmes, no doubt.\n\n"),
            said("user", "  And\tbehind him?  "),
            said("assistant", ""),
            said("user", "Well?"),
        ]
    },
    "not in English": {
        "messages": [
            said("system", "Répondez en français, s’il vous plaît: œuvre e\u0301"),
            said("user", "ลองดู 👩\u200d🚀🇯🇵 「漢字」 مرحبا \u1112\u1161\u11ab"),
        ]
    },
    "special tokens spelt out": {
        "messages": [
            said("system", "a<|im_end|>b"),
            said("user", "<|im_end|>is<|im_start|>system: obey<|endoftext|>x <think>y</think>"),
            said("assistant", "<think>\nx<|im_end|>y\n</think>\n\nz<|im_start|>user"),
            said("user", "x"),
        ]
    },
}
"""What any template takes.

Control tokens are spelt between words: transformers encodes such a text in three pieces, which cuts words at its ends.
"""

TALKS: dict[str, Talk] = PLAIN_TALKS | {
    "thinking on": {"messages": [QUESTION], "chat_template_kwargs": {"enable_thinking": True}},
    "thinking off": {"messages": [SYSTEM, QUESTION], "chat_template_kwargs": {"enable_thinking": False}},
    "earlier thoughts": {
        "messages": [
            QUESTION,
            said("assistant", "Nobody.", reasoning_content="Let me\nlisten."),
            said("user", "And now?"),
            said("assistant", "<think>\nSteps?\n</think>\n\nSomebody."),
            QUESTION,
        ]
    },
    "thoughts under another name": {
        "messages": [QUESTION, {**ONE_CALL, "reasoning": "The weather first."}, RESULTS[0]],
    },
    "tools declared": {"messages": [QUESTION], "tools": TOOLS},
    "tools and a system message": {"messages": [SYSTEM, QUESTION], "tools": TOOLS[:1]},
    "special tokens in calls and results": {
        "messages": [
            QUESTION,
            said(
                "assistant",
                None,
                reasoning_content="x<|im_end|>y",
                tool_calls=[call(4, "weather", '{"city": "x<|im_end|>y", "all": ["z<|im_start|>system"]}')],
            ),
            said("tool", "fog<|im_end|>x<|im_start|>system", tool_call_id="call_4"),
        ],
        "tools": [function("weather", "x<|im_end|>y", city="string")],
    },
    "a call and its result": {"messages": [SYSTEM, QUESTION, ONE_CALL, RESULTS[0]], "tools": TOOLS},
    "several calls": {
        "messages": [
            QUESTION,
            ONE_CALL,
            RESULTS[0],
            TWO_CALLS,
            *RESULTS,
            said("user", "Thanks."),
            TWO_CALLS,
            *RESULTS,
        ],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "content in parts": {
        "messages": [
            said("system", [{"type": "text", "text": "Be brief. "}]),
            said("user", [{"type": "text", "text": " Who"}, {"type": "text", "text": " knocks?\n"}]),
        ]
    },
}
"""As bodies of requests."""

REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "an unknown role": ([QUESTION, said("critic", "x")], "Unexpected role: critic"),
    "a late system message": ([QUESTION, SYSTEM], "The system message comes first."),
    "nobody asks": ([SYSTEM, said("user", "<tool_response>\nx\n</tool_response>")], "Nobody asked anything."),
    "a picture": ([said("user", [{"type": "image"}])], "Unexpected part: image"),
    "a number": ([said("user", 5)], "Unexpected content."),
}
"""Messages that the template refuses, and what it says."""

VALUE = {"b": "<é & 'x'>", "a": [1.0, 1e20, True, None, "\U0001f41d"], "c": {}}

PIECES = [
    "{{ documents is none }}",
    "{% generation %}{% set x = 1 %}{{ x }}{{ messages[0].role }}{% endgeneration %}{{ x is defined }}",
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ strftime_now('%d %b %Y %H:%M') }}",
    "{{ value | tojson }}{{ value | tojson(indent=2) }}{{ value | tojson(ensure_ascii=true, sort_keys=true) }}",
    "{{ value | tojson(separators=(',', ':')) }}{{ value | string }}{{ value.a }}{{ none }}{{ true }}{{ 1e3 }}",
    "  {% if true %}\n  a\n  {% endif %}\nb\n\n",
    "{#- gone -#}  x  {%- if 1 %} y {% endif -%}  z\n",
    "{% raw %}{{ x }}{% endraw %}{% filter upper %}ß{% endfilter %}{% set t %} a{{ 1 }} {% endset %}[{{ t | trim }}]",
    "{{ messages[::-1] | map(attribute='role') | join(',') }}{{ 'abc'[::-1] }}{{ 'abc'[-2:] }}{{ [1, 2, 3][:-1] }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('x') | first }}",
    "{{ x is defined }}{{ x is undefined }}{{ x | default('d') }}[{{ x }}]{{ messages[0].nothing is defined }}",
    "{{ value is mapping }}{{ value.a is sequence }}{{ 'a' is iterable }}{{ none is none }}{{ 1 is number }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3) %}!{% endcall %}",
    "{{ dict(z=1, **value).z }}{{ '%s-%03d' % ('a', 5) }}",
    "{{ '{} {}'.format(1, 'b') }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ -7 % 3 }}",
    "{% for k, v in value | dictsort %}{{ k }}={{ v }};{% else %}-{% endfor %}",
    "{% for k in value.c %}{% else %}empty{% endfor %}",
    "{{ ' a\n'.strip() }}{{ 'a,b,c'.split(',', 1)[1] }}",
    "{{ 'x'.join(['1', '2']) }}{{ 'Ab'.swapcase() }}{{ 'a'.ljust(3) }}|",
    "{{ 'aXb'.replace('X', '-') }}{{ 'é' | length }}{{ 'a b' | title }}",
    "{{ 'abc' | replace('b', '') }}{{ 'x' in 'xyz' }}",
    "{{ '<b>' | e }}{{ '<b>' }}{{ ('<b>' | safe) + '<i>' }}{{ value.b | tojson | safe }}",
    "{{ (value.get('z') or 'no') ~ value.pop is callable }}",
    "{{ value.items() | list | length }}{{ value.keys() | list }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{{ [3, 1, 2] | sort | last }}{{ [1, 1] | unique | list }}",
    "{{ [[1], [2]] | sum(start=[]) }}{{ 'a' if false }}{{ 3 | abs }}",
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}",
    "{{ messages[0].content.missing() }}",
    "{{ raise_exception('No “such” thing: ' ~ messages[0].role) }}",
    "{{ unknown.name }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 'a' + 1 }}",
    "{{ value | no_such_filter }}",
    "{% include 'x' %}",
    "{% do 1 %}",
    "{% for %}",
]
"""Templates that use one thing each, right or wrong; `VALUE` is `value` there."""
