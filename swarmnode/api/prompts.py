"""From a request's body to the token ids of its prompt. Blocks: 8 MB of text take seconds, so it runs on a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from swarmnode.api import thinking
from swarmnode.api.json_bounds import check_marks_untrusted
from swarmnode.api.openai import CompletionRequest
from swarmnode.api.tool_prompt import told_in_messages
from swarmnode.config import ApiConfig
from swarmnode.errors import ContextFullError, UsageError
from swarmnode.models.chat import ChatTemplate, RenderedChat
from swarmnode.models.tokenizer import Tokenizer

NFC_SHRINKS = 3
"""The tokenizer composes characters first (NFC), which makes UTF-8 at most three times shorter: U+0390 in three
characters of two bytes becomes one (the maximum over all characters; tests/api/test_prompts.py)."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and whether the answer begins within a thought, because the template has opened one."""

    tokens: Sequence[int]
    is_thinking: bool = False


class Prompts:
    """The prompts of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, n_ctx: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._n_ctx = n_ctx

    def prompts(self, asked: CompletionRequest) -> list[Prompt]:
        """The prompts, token ids as they are, or the one that messages (and tools) make through the template.

        Raises ContextFullError for a text that cannot fit, before it is tokenized, and UsageError for one that the
        template or the tokenizer refuses.
        """
        return [self._given(prompt) for prompt in asked.prompts] or [self._of_chat(asked)]

    def _given(self, prompt: str | tuple[int, ...]) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(prompt)
        self._check_length(prompt)
        return Prompt(self._tokenizer.encode(prompt))

    def _of_chat(self, asked: CompletionRequest) -> Prompt:
        if self._template is None:
            raise UsageError("this model has no chat template; use /v1/completions")
        chat = self._render(self._template, asked)
        text = chat.text
        self._check_length(text)
        is_thinking = text.rstrip().endswith(thinking.OPEN)
        return Prompt(self._tokenizer.encode_pieces(chat.pieces), is_thinking)

    def _render(self, template: ChatTemplate, asked: CompletionRequest) -> RenderedChat:
        tools = list(asked.tool_use.tools)
        if "tool" in template.source:
            return template.render(asked.messages, tools=tools or None, variables=asked.template_variables)
        return template.render(told_in_messages(asked.messages, tools), variables=asked.template_variables)

    @cached_property
    def _max_bytes(self) -> int:
        """More bytes of text than this are more than `n_ctx` tokens, whatever they are."""
        tokenizer = self._tokenizer
        longest = max(
            len(tokenizer.token_bytes(token, render_special=True)) for token in range(tokenizer.n_vocab)
        )
        return self._n_ctx * longest * NFC_SHRINKS

    def _check_length(self, text: str) -> None:
        if len(text) > self._max_bytes or len(text.encode("utf-8", "surrogatepass")) > self._max_bytes:
            raise ContextFullError(
                f"a prompt of {len(text)} characters is more than {self._n_ctx} tokens, which is what the context "
                "holds: shorten it or give the backbone a larger --context"
            )


def parse_body_untrusted(
    body: bytes,
    parse: Callable[[object], CompletionRequest],
    most_marks: int = ApiConfig.max_body_marks,
) -> CompletionRequest:
    """The request in a body. Raises UsageError for what is not JSON, or too rich, and what `parse` raises."""
    check_marks_untrusted(body, most_marks)
    try:
        value = json.loads(
            body.decode("utf-8")
        )  # given bytes it would take UTF-16, too, whose marks nobody counted
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not valid JSON: {error}") from error
    return parse(value)
