"""A small vocabulary in GGUF form for tests: 256 byte symbols, some merges, special tokens."""

from __future__ import annotations

from typing import Any

BYTE_SYMBOLS = [
    chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))
]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ã ©"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]


def make_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of the vocabulary; `changes` replace keys under `tokenizer.ggml.`, None removes one."""
    tokens = BYTE_SYMBOLS + [merge.replace(" ", "") for merge in MERGES] + CONTROL + USER_DEFINED
    n_normal = len(BYTE_SYMBOLS) + len(MERGES)
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": tokens,
        "token_type": [1] * n_normal + [3] * len(CONTROL) + [4] * len(USER_DEFINED),
        "merges": MERGES,
        "eos_token_id": tokens.index("<|im_end|>"),
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
