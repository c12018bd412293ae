"""Messages to a prompt, through the chat template that the GGUF carries (`tokenizer.chat_template`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from swarmnode.config import ModelsConfig
from swarmnode.errors import ModelFileError, UsageError
from swarmnode.models.control_marks import ControlMarks
from swarmnode.models.metadata import Metadata
from swarmnode.models.template_process import TemplateProcess
from swarmnode.models.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"


_PROBE: Sequence[Mapping[str, Any]] = (
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c", "reasoning_content": "d"},
    {"role": "user", "content": "e"},
)
_TOOL = {"type": "function", "function": {"name": "f", "description": "g", "parameters": {}}}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"h": "i"}}}
_CALLING: Sequence[Mapping[str, Any]] = (
    *_PROBE,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "j"},
)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt's text."""

    pieces: tuple[str, ...]
    """Text, control token, text, ..., text (at least one): for `Tokenizer.encode_pieces`. Only what the template
    itself writes is a control token; in the texts a spelling of one is nothing but text."""

    @property
    def text(self) -> str:
        """All of it, to look at or to measure. It does not say which control tokens are some."""
        return "".join(self.pieces)


class ChatTemplate:
    """A compiled chat template, in a process of its own that ends with this object. `source` is its text."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_tokens: Sequence[str] = (),
        config: ModelsConfig | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `now` is behind `strftime_now`, `control_tokens` are the vocabulary's.

        Raises ModelFileError for a syntax error, for a template that takes more time or memory to compile than
        `config` allows, or that makes a control token out of pieces, which nobody could tell from text that spells it.
        """
        self.source = source
        self._now = now
        self._marks = ControlMarks(control_tokens)
        self._process = TemplateProcess(
            source, bos_token, eos_token, control_tokens, config or ModelsConfig()
        )
        problem = self._process.compile()
        if problem is None and control_tokens:
            problem = self._made_of_pieces()
        if problem is not None:
            raise ModelFileError(f"{_KEY} cannot be used: {problem}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Return the prompt. Blocks for 3 s at most, by default.

        messages: OpenAI form, each with `role` and `content`. `variables`: further names for the template
        (`enable_thinking`). All of them JSON values. Raises UsageError if the template refuses the messages, takes
        too much time or memory for them, or the text gets longer than `max_prompt_chars`.
        """
        if not messages:
            raise UsageError("there is no message")
        names = {**(variables or {}), "messages": messages, "tools": tools}
        request = {
            "names": names,
            "add_generation_prompt": add_generation_prompt,
            "now": self._now().isoformat(),
        }
        text, problem = self._process.render(request)
        if problem is not None:
            raise UsageError(f"the model's chat template refuses these messages: {problem}")
        return RenderedChat(self._marks.pieces(text))

    def _made_of_pieces(self) -> str | None:
        """What is wrong if a harmless conversation spells a control token that no literal holds as a whole."""
        for messages, tools in ((_PROBE[1:2], None), (_PROBE, None), (_CALLING, [_TOOL])):
            try:
                chat = self.render(messages, tools=tools)
            except UsageError:  # a template may refuse roles: it is then not asked for more
                continue
            written, spelt = chat.pieces[1::2], self._marks.spelt_pieces(chat.text)[1::2]
            if written != spelt:
                token = next((token for token in spelt if token not in written), spelt[0] if spelt else "")
                return f"it makes the control token {token} out of pieces; it has to be written as a whole"
        return None


def template_of(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a GGUF carries (`tokenizer.chat_template`), None if it has none; ModelFileError if broken."""
    stored = Metadata(metadata)
    if not stored.has(_KEY):
        return None
    bos, eos = (
        "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return ChatTemplate(
        stored.text(_KEY), bos_token=bos, eos_token=eos, control_tokens=list(tokenizer.control_tokens)
    )
