"""Messages to a prompt, through the chat template that the GGUF carries (`tokenizer.chat_template`).

Templates are jinja2 written for Hugging Face transformers (utils/chat_template_utils.py): this gives them the
functions and whitespace rules they expect there, inside jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarmnode.config import ModelsConfig
from swarmnode.errors import ModelFileError, UsageError
from swarmnode.models.tokenizer import Tokenizer

#: What a template may raise when a message lacks a field or has another type than it expects.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """A compiled chat template. `source` is its text."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_chars: int = ModelsConfig.max_prompt_chars,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `now` is behind `strftime_now`. Raises ModelFileError for a syntax error."""
        self.source = source
        self._max_chars = max_chars
        extensions = [loopcontrols]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["bos_token"] = bos_token
        environment.globals["eos_token"] = eos_token
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFileError(f"tokenizer.chat_template is not a valid template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text, to be encoded with `parse_special=True`.

        messages: OpenAI form, each with `role` and `content`. `variables`: further names for the template
        (`enable_thinking`). Raises UsageError if the template refuses the messages or the text gets longer
        than `max_chars`.
        """
        if not messages:
            raise UsageError("there is no message")
        names = {**(variables or {}), "messages": messages, "tools": tools}
        pieces: list[str] = []
        n_chars = 0
        try:
            for piece in self._template.generate(names, add_generation_prompt=add_generation_prompt):
                n_chars += len(piece)
                if n_chars > self._max_chars:
                    raise UsageError(f"the messages make a prompt of more than {self._max_chars} characters")
                pieces.append(piece)
        except _RENDER_ERRORS as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        return "".join(pieces)


def template_of(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a GGUF carries (`tokenizer.chat_template`), None if it has none; ModelFileError if broken."""
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    bos, eos = (
        "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return ChatTemplate(source, bos_token=bos, eos_token=eos)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter, as templates for language models expect."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
