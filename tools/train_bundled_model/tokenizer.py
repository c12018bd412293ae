"""A small byte-level BPE tokenizer in the form that GGUF calls `gpt2` with the `qwen35` pre-tokenizer.

Ids: the 256 byte symbols, then one token for each learned merge, then the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

#: Qwen3.5's pre-tokenizer pattern, as llama.cpp applies it for `tokenizer.ggml.pre` = qwen35.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
#: Control tokens never show up in output text; the others are plain text that must stay one token.
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY_SIZE = 2048

_GGUF_NORMAL, _GGUF_CONTROL, _GGUF_USER_DEFINED = 1, 3, 4


@dataclass(frozen=True)
class Vocabulary:
    """What GGUF stores of a tokenizer: `tokens` (byte symbols) by id, their GGUF `types`, merges as "a b"."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges on `texts` and append the special tokens, `VOCABULARY_SIZE` tokens in all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(f"the text is too small: it gives only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def export_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Return the lists that the GGUF file stores."""
    state = json.loads(tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    kinds = dict.fromkeys(CONTROL_TOKENS, _GGUF_CONTROL) | dict.fromkeys(MARKUP_TOKENS, _GGUF_USER_DEFINED)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    return Vocabulary(tokens, [kinds.get(token, _GGUF_NORMAL) for token in tokens], merges)
