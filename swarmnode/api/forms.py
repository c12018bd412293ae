"""OpenAI's response objects, whole and in chunks. Pure: what an answer is made of in, JSON values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnode.api.deltas import CallPart, Delta
from swarmnode.models.logprobs import TokenLogprobs
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.services.account import Account

MAX_MESSAGE_CHARS = 2000
"""What an error repeats of a request is short: no echo of 8 MB."""
_LEAST_LOGPROB = -9999.0
"""For a probability of 0: JSON has no infinity."""


@dataclass
class Choice:
    """One answer, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, delta: Delta) -> None:
        """The next piece."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.calls:
            if part.name is not None:
                self.calls.append(_call(part))
            else:
                self.calls[part.index]["function"]["arguments"] += part.arguments


@dataclass(frozen=True)
class ResponseForm:
    """Builds the JSON of the answers to one request: `chat` or text completion, whole or in chunks."""

    answer_id: str
    model: str
    created_s: int
    chat: bool
    tokenizer: Tokenizer
    has_usage: bool = False
    """The stream ends with usage: all pieces have that field then."""

    def chunk(
        self,
        index: int,
        delta: Delta,
        finish_reason: str | None,
        *,
        first: bool = False,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> dict[str, Any]:
        """A piece of answer `index`; `first`: its first one."""
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            choice["delta"] = _delta(delta, first)
        else:
            choice["text"] = delta.content
        choice |= {"finish_reason": finish_reason, "logprobs": self._logprobs(logprobs)}
        usage = {"usage": None} if self.has_usage else {}
        return self._head("chat.completion.chunk" if self.chat else "text_completion", [choice]) | usage

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """All answers in one piece."""
        filled = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._head("chat.completion" if self.chat else "text_completion", filled) | {
            "usage": dict(usage)
        }

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last piece of a stream that asked for usage."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion", []) | {
            "usage": dict(usage)
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        filled: dict[str, Any] = {"index": index}
        if self.chat:
            # A model that only calls tools says nothing, and OpenAI's word for that is null.
            content = choice.content or (None if choice.calls else "")
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.calls:
                message["tool_calls"] = choice.calls
            filled["message"] = message
        else:
            filled["text"] = choice.content
        return filled | {
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice.logprobs or None),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        return (chat_logprobs if self.chat else text_logprobs)(self.tokenizer, logprobs)

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """A chat answer's `logprobs`. `bytes` are exact; `token` is text, and shows U+FFFD for parts of characters."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token, render_special=True)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(item.token, item.logprob) | {"top_logprobs": [entry(*other) for other in item.top]}
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """A completion's `logprobs`. Each of `top_logprobs` has the token that was taken, too, though it is none of the
    most probable ones, and the best first."""

    def text(token: int) -> str:
        return tokenizer.token_bytes(token, render_special=True).decode("utf-8", "replace")

    def top(item: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        others = {item.token: item.logprob, **dict(item.top)} if item.top else {}
        for token, value in sorted(others.items(), key=lambda pair: -pair[1]):
            found.setdefault(text(token), _finite(value))  # several tokens may have one text: the best one's
        return found

    tops = [top(item) for item in logprobs]
    return {
        "tokens": [text(item.token) for item in logprobs],
        "token_logprobs": [_finite(item.logprob) for item in logprobs],
        "top_logprobs": tops if any(tops) else None,
    }


@dataclass(frozen=True)
class Counts:
    """Tokens of the answers to one request."""

    prompt: int
    new: int = 0
    reasoning: int = 0
    """Of the new ones, those of thoughts."""


def usage_of(counts: Counts, account: Account) -> dict[str, Any]:
    """OpenAI's usage object, and in `swarm` in short what the swarm did."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.new,
        "total_tokens": counts.prompt + counts.new,
        "prompt_tokens_details": {"cached_tokens": account.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        "swarm": swarm_figures(account),
    }


def swarm_figures(account: Account) -> dict[str, Any]:
    """Share of expert rows that workers computed, how many workers did, and rows that were late or lost."""
    return {
        "share_remote": round(account.remote_share, 4),
        "workers": sum(share.pairs > 0 for share in account.workers.values()),
        "hedges": account.hedged,
        "fallbacks": account.fallback,
    }


def swarm_headers(account: Account) -> dict[str, str]:
    """The same as headers of an answer."""
    return {f"x-swarm-{name.replace('_', '-')}": str(value) for name, value in swarm_figures(account).items()}


def error_object(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; `kind` is its `type`. A message may hold what a request held, so it is made short, and
    what UTF-8 cannot hold (lone surrogates) is spelt out."""
    sendable = message[:MAX_MESSAGE_CHARS].encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": sendable, "type": kind, "param": None, "code": code}}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _delta(delta: Delta, first: bool) -> dict[str, Any]:
    filled: dict[str, Any] = {"role": "assistant"} if first else {}
    if delta.content or (first and not delta.reasoning and not delta.calls):
        filled["content"] = delta.content
    if delta.reasoning:
        filled["reasoning_content"] = delta.reasoning
    if delta.calls:
        filled["tool_calls"] = [_streamed(part) for part in delta.calls]
    return filled


def _streamed(part: CallPart) -> dict[str, Any]:
    if part.name is not None:
        return {"index": part.index} | _call(part)
    return {"index": part.index, "function": {"arguments": part.arguments}}


def _call(part: CallPart) -> dict[str, Any]:
    return {
        "id": part.call_id,
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }
