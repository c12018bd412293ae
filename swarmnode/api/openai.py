"""OpenAI's request and response forms, as far as they are served. Pure: JSON values in, JSON values out.

A field that is known to OpenAI but not served is refused by name, never ignored: the answer would not be what was asked
for. Fields that cannot change the answer (`user`, `metadata`) are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.models.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256
MAX_TOKENS = 1 << 20
MAX_NAMES = 8
MAX_NAME_CHARS = 64
MAX_MESSAGE_CHARS = 2000
"""What an error repeats of a request is short: no echo of 8 MB."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_NO_EFFECT = frozenset({"user", "metadata", "store"})
_COMMON = frozenset({"model", "stream", "stream_options", "max_tokens", *_SAMPLING}) | _NO_EFFECT
COMPLETION_FIELDS = _COMMON | {"prompt"}
CHAT_FIELDS = _COMMON | {"messages", "max_completion_tokens", "chat_template_kwargs"}


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request. Exactly one of `prompt` and `messages` is set."""

    model: str | None
    prompt: str | None
    messages: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    sampling: SamplingParams
    template_variables: Mapping[str, Any]


def parse_completion_untrusted(body: object) -> CompletionRequest:
    """The body of POST /v1/completions; raises UsageError naming the field."""
    fields = _object(body, COMPLETION_FIELDS)
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise UsageError("prompt: give one string (lists and token ids are not served)")
    return _common(fields, prompt=prompt, messages=(), max_tokens=fields.get("max_tokens"), variables={})


def parse_chat_untrusted(body: object) -> CompletionRequest:
    """The body of POST /v1/chat/completions; raises UsageError naming the field."""
    fields = _object(body, CHAT_FIELDS)
    variables = fields.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise UsageError("chat_template_kwargs: an object is expected")
    messages = _messages(fields.get("messages"))
    return _common(
        fields, prompt=None, messages=messages, max_tokens=_chat_max_tokens(fields), variables=variables
    )


def _chat_max_tokens(fields: Mapping[str, Any]) -> object:
    """Either name is good; null is as if it were not there."""
    old, new = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if old is not None and new is not None and (type(old) is not type(new) or old != new):
        raise UsageError("max_tokens and max_completion_tokens differ: give one of them")
    return old if new is None else new


def _common(
    fields: Mapping[str, Any],
    *,
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: object,
    variables: Mapping[str, Any],
) -> CompletionRequest:
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise UsageError("stream_options: an object is expected")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise UsageError("model: a string is expected")
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS):
        raise UsageError(f"max_tokens: an integer from 1 to {MAX_TOKENS} is expected")
    return CompletionRequest(
        model=model,
        prompt=prompt,
        messages=messages,
        max_tokens=max_tokens if isinstance(max_tokens, int) else None,
        stream=_flag(fields, "stream"),
        include_usage=_flag(options, "include_usage"),
        sampling=_sampling(fields),
        template_variables=variables,
    )


def _object(body: object, known: frozenset[str] | set[str]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise UsageError("the body must be a JSON object")
    unknown = sorted(name for name, value in body.items() if name not in known and value is not None)
    if unknown:
        names = ", ".join(name[:MAX_NAME_CHARS] for name in unknown[:MAX_NAMES])
        raise UsageError(f"not served: {names}; served are {', '.join(sorted(known))}")
    return body


def _messages(value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UsageError("messages: a list of at least one message is expected")
    messages: list[Mapping[str, Any]] = []
    for position, item in enumerate(value):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise UsageError(f"messages[{position}]: an object with role and content is expected")
        messages.append({**item, "content": _content(item.get("content"), position)})
    return messages


def _content(value: object, position: int) -> str:
    """A message's text; lists of text parts are joined."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in value
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    raise UsageError(f"messages[{position}].content: text is expected (pictures and sound are not served)")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name}: true or false is expected")
    return bool(value)


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{name}: a number is expected")
    return SamplingParams(**given)


@dataclass(frozen=True)
class ResponseForm:
    """Builds the JSON of one answer: `chat` or text completion, whole or in chunks."""

    answer_id: str
    model: str
    created_s: int
    chat: bool

    def chunk(self, text: str, finish_reason: str | None, first: bool) -> dict[str, Any]:
        """One streamed piece."""
        if self.chat:
            delta: dict[str, Any] = {"content": text} if text or first else {}
            if first:
                delta["role"] = "assistant"
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        else:
            choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
        return self._head("chat.completion.chunk" if self.chat else "text_completion") | {"choices": [choice]}

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        if self.chat:
            message = {"role": "assistant", "content": text}
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason}
        else:
            choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
        head = self._head("chat.completion" if self.chat else "text_completion")
        return head | {"choices": [choice], "usage": dict(usage)}

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last piece of a stream that asked for usage."""
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return head | {"choices": [], "usage": dict(usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created_s, "model": self.model}


def usage_of(prompt_tokens: int, new_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error_object(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; `kind` is its `type`. A message may hold what a request held, so it is made short, and
    what UTF-8 cannot hold (lone surrogates) is spelt out."""
    sendable = message[:MAX_MESSAGE_CHARS].encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": sendable, "type": kind, "param": None, "code": code}}
