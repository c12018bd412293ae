"""Small vocabularies in GGUF form for tests: 256 byte symbols, merges, special tokens."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import models, pre_tokenizers, trainers

BYTE_SYMBOLS = [
    chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))
]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ã ©"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]
QWEN_CONTROL = [
    *CONTROL,
    *(f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")),
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name")),
    "<tts_pad>",
]
QWEN_USER_DEFINED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *USER_DEFINED]
UNUSED = ["[PAD0]", "[PAD1]"]


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


def make_trained_metadata(texts: Iterable[str], pre: str) -> dict[str, Any]:
    """GGUF metadata of a vocabulary whose merges cross every border between words of `texts`.

    It is learned on all pairs and triples of neighbouring characters, so that a text that is cut into words
    elsewhere gets other ids. The special tokens are some of Qwen3.5's; unused ones fill the vocabulary up.
    """
    bpe = BpeTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=100_000, initial_alphabet=sorted(BYTE_SYMBOLS), show_progress=False
    )
    composed = [unicodedata.normalize("NFC", text) for text in texts]
    bpe.train_from_iterator(
        (text[i : i + n] for text in composed for n in (2, 3) for i in range(len(text))), trainer
    )
    learned = json.loads(bpe.to_str())["model"]
    tokens = [*learned["vocab"], *QWEN_CONTROL, *QWEN_USER_DEFINED, *UNUSED]
    types = [1] * len(learned["vocab"]) + [3] * len(QWEN_CONTROL) + [4] * len(QWEN_USER_DEFINED)
    return make_metadata(
        pre=pre,
        tokens=tokens,
        token_type=types + [5] * len(UNUSED),
        merges=[" ".join(merge) for merge in learned["merges"]],
        eos_token_id=tokens.index("<|im_end|>"),
    )
