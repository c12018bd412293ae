"""Messages to a prompt, through the chat template that the GGUF carries (`tokenizer.chat_template`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from swarmnode.config import ModelsConfig
from swarmnode.errors import ModelFileError, UsageError
from swarmnode.models.metadata import Metadata
from swarmnode.models.template_process import TemplateProcess
from swarmnode.models.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A compiled chat template, in a process of its own that ends with this object. `source` is its text."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        config: ModelsConfig | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `now` is behind `strftime_now`.

        Raises ModelFileError for a syntax error, or for a template that takes more time or memory to compile than
        `config` allows.
        """
        self.source = source
        self._now = now
        self._process = TemplateProcess(source, bos_token, eos_token, config or ModelsConfig())
        problem = self._process.compile()
        if problem is not None:
            raise ModelFileError(f"{_KEY} cannot be used: {problem}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text, to be encoded with `parse_special=True`. Blocks for 3 s at most, by default.

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
        return text


def template_of(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a GGUF carries (`tokenizer.chat_template`), None if it has none; ModelFileError if broken."""
    stored = Metadata(metadata)
    if not stored.has(_KEY):
        return None
    bos, eos = (
        "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return ChatTemplate(stored.text(_KEY), bos_token=bos, eos_token=eos)
