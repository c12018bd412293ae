"""OpenAI's requests, as far as they are served. Pure: JSON values in.

A field that is known to OpenAI but not served is refused by name, never ignored: the answer would not be what was asked
for. Fields that cannot change the answer (`user`, `metadata`) are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnode.api.fields import MAX_NAME_CHARS, flag, integer, mapping, object_of, text
from swarmnode.api.messages import messages_of
from swarmnode.api.response_format import FREE, ResponseFormat, response_format_of
from swarmnode.api.tools import ToolUse, tool_use_of
from swarmnode.counts import counted
from swarmnode.errors import UsageError
from swarmnode.models.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256
MAX_TOKENS = 1 << 20
MAX_CHOICES = 16
MAX_ANSWERS = 64
"""Of all prompts of a request together: as many as may wait (ApiConfig.max_waiting)."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_ID_CHARS = 10
MAX_CHAT_LOGPROBS = 20
MAX_TEXT_LOGPROBS = 5
"""Both as OpenAI."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
_NO_EFFECT = frozenset({"user", "metadata", "store"})
_COMMON = (
    frozenset(
        {"model", "stream", "stream_options", "max_tokens", "n", "stop", "logprobs", "logit_bias", *_SAMPLING}
    )
    | _NO_EFFECT
)
COMPLETION_FIELDS = _COMMON | {"prompt"}
CHAT_FIELDS = _COMMON | {
    "messages",
    "max_completion_tokens",
    "chat_template_kwargs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
}


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request: of a chat, or of the continuation of texts."""

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts, or token ids; none: it is a chat."""
    messages: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    sampling: SamplingParams
    template_variables: Mapping[str, Any]
    n: int = 1
    """Answers wanted, to each prompt."""
    stops: tuple[str, ...] = ()
    n_logprobs: int | None = None
    """See GenerateRequest."""
    tool_use: ToolUse = field(default_factory=ToolUse)
    response_format: ResponseFormat = FREE

    @property
    def is_chat(self) -> bool:
        """Whether `messages` are what is asked."""
        return not self.prompts

    @property
    def n_answers(self) -> int:
        """Of all prompts."""
        return self.n * max(1, len(self.prompts))


def parse_completion_untrusted(body: object) -> CompletionRequest:
    """The body of POST /v1/completions; raises UsageError naming the field."""
    fields = object_of(body, COMPLETION_FIELDS)
    asked = CompletionRequest(
        prompts=_prompts(fields.get("prompt")),
        messages=(),
        max_tokens=integer(fields, "max_tokens", 1, MAX_TOKENS),
        template_variables={},
        n_logprobs=integer(fields, "logprobs", 0, MAX_TEXT_LOGPROBS),
        **_common(fields),
    )
    if asked.n_answers > MAX_ANSWERS:
        raise UsageError(
            f"prompt: {counted(len(asked.prompts), 'prompt')} with {counted(asked.n, 'answer')} each "
            f"are more than {MAX_ANSWERS} answers"
        )
    return asked


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """As OpenAI: a string, a list of strings, a list of token ids (one prompt), or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise UsageError(
        "prompt: a string, a list of strings, a list of token ids or a list of such lists is expected, none empty"
    )


def _are_ids(values: list[Any]) -> bool:
    """Whether they are whole numbers, at least one; whether there are such tokens only the model knows."""
    return bool(values) and all(type(value) is int for value in values)


def parse_chat_untrusted(body: object) -> CompletionRequest:
    """The body of POST /v1/chat/completions; raises UsageError naming the field."""
    fields = object_of(body, CHAT_FIELDS)
    tool_use, form = tool_use_of(fields), response_format_of(fields)
    if form is not FREE and tool_use.calling != "none":
        raise UsageError(
            "response_format and tools: both at a time are not served; give one of them, or tool_choice none"
        )
    return CompletionRequest(
        prompts=(),
        template_variables=mapping(fields, "chat_template_kwargs"),
        messages=messages_of(fields.get("messages")),
        max_tokens=_chat_max_tokens(fields),
        n_logprobs=_chat_logprobs(fields),
        tool_use=tool_use,
        response_format=form,
        **_common(fields),
    )


def _chat_max_tokens(fields: Mapping[str, Any]) -> int | None:
    """Either name is good; null is as if it were not there."""
    old, new = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if old is not None and new is not None and (type(old) is not type(new) or old != new):
        raise UsageError("max_tokens and max_completion_tokens differ: give one of them")
    return integer(fields, "max_tokens" if new is None else "max_completion_tokens", 1, MAX_TOKENS)


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    wanted, n_top = flag(fields, "logprobs"), integer(fields, "top_logprobs", 0, MAX_CHAT_LOGPROBS)
    if not wanted:
        if n_top:
            raise UsageError("top_logprobs: needs logprobs true")
        return None
    return n_top or 0


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds of requests have."""
    model = fields.get("model")
    return {
        "model": None if model is None else text(model, "model"),
        "stream": flag(fields, "stream"),
        "include_usage": flag(mapping(fields, "stream_options"), "include_usage"),
        "sampling": _sampling(fields),
        "n": integer(fields, "n", 1, MAX_CHOICES) or 1,
        "stops": _stops(fields.get("stop")),
    }


def _stops(value: object) -> tuple[str, ...]:
    """One string or several; empty ones would end everything."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise UsageError(f"stop: a string or a list of up to {MAX_STOPS} is expected")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise UsageError(f"stop: strings of 1 to {MAX_STOP_CHARS} characters are expected")
    return tuple(stops)


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{name}: a number is expected")
    return SamplingParams(**given, logit_bias=_bias(mapping(fields, "logit_bias")))


def _bias(biases: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Names of a JSON object are strings: `{"50": -100}`."""
    found = []
    for name, bias in biases.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= MAX_ID_CHARS):
            raise UsageError(f"logit_bias: {name[:MAX_NAME_CHARS]!r} is no token id")
        found.append((int(name), bias))
    return tuple(found)
