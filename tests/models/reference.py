"""Hugging Face transformers' tokenizers of the Qwen family, with the vocabulary of a GGUF.

Pattern, normalisation, the way bytes are spelt, the handling of added tokens and the rendering of templates are
transformers' own. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

CLASSES = {
    "qwen2": ("transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer"),
    "qwen35": ("transformers.models.qwen3_5.tokenization_qwen3_5", "Qwen3_5Tokenizer"),
}
"""`tokenizer.ggml.pre` -> where transformers has the class of the models that llama.cpp's converter gives this name."""

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


class Reference:
    """What transformers makes of texts and conversations."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """`metadata`: `tokenizer.ggml.*`. Takes seconds the first time: transformers is imported."""
        module, name = CLASSES[metadata["tokenizer.ggml.pre"]]
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
        transformers = importlib.import_module("transformers")
        tokens = list(metadata["tokenizer.ggml.tokens"])
        types = [int(kind) for kind in metadata["tokenizer.ggml.token_type"]]
        kinds = dict(zip(tokens, types, strict=True))
        self._tokenizer = getattr(importlib.import_module(module), name)(
            vocab={token: i for i, token in enumerate(tokens) if types[i] == _NORMAL},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
            unk_token=None,
            eos_token=None,
            pad_token=None,
        )
        for token, kind in kinds.items():
            if kind in (_CONTROL, _USER_DEFINED):
                added = transformers.AddedToken(token, normalized=False, special=kind == _CONTROL)
                self._tokenizer.add_tokens([added], special_tokens=kind == _CONTROL)
        self._tokenizer.chat_control_tokens = []  # tokens that are user-defined in the GGUF stay tokens
        ids = [
            self._tokenizer.convert_tokens_to_ids(token) for token in tokens if kinds[token] <= _USER_DEFINED
        ]
        if ids != list(range(len(ids))):
            raise ValueError("the reference numbers the tokens in another way")

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=not parse_special
        )
        return ids

    def decode(self, ids: Sequence[int], *, render_special: bool) -> str:
        """Text of ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not render_special)
        return text

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """A prompt's text; raises what the template raises."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, **names
        )
        return text

    def chat(self, template: str, messages: Sequence[Mapping[str, Any]], **names: Any) -> list[int]:
        """A prompt's ids, ready for an answer. A control token that the messages spell is encoded as text."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=template,
            add_generation_prompt=True,
            return_dict=False,
            sanitize_control_tokens=True,
            **names,
        )
        return ids
