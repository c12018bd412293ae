"""Encoding, decoding, streaming and the checks on a vocabulary."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ModelFileError, UnsupportedModelError, UsageError
from swarmnode.models.tokenizer import StreamDecoder, Tokenizer

from .reference_texts import TEXTS
from .vocabulary import BYTE_SYMBOLS, MERGES, UNUSED, make_metadata, make_trained_metadata

TOKENIZER = Tokenizer(make_metadata())
TRAINED = Tokenizer(make_trained_metadata(TEXTS.values(), "qwen35"))
SPELLING = {TRAINED.token_bytes(i, render_special=True): i for i in range(TRAINED.n_vocab - len(UNUSED))}
LONGEST = max(map(len, SPELLING))
N_NORMAL = len(BYTE_SYMBOLS) + len(MERGES)
END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = range(N_NORMAL, N_NORMAL + 5)


def spelled(ids: list[int]) -> list[str]:
    return [TOKENIZER.token_text(i) for i in ids]


def test_merges_apply_in_order_within_words() -> None:
    assert spelled(TOKENIZER.encode("hello worhe")) == ["hello", "Ġwor", "he"]


def test_digits_are_single_tokens_and_newlines_stay_with_punctuation() -> None:
    assert spelled(TOKENIZER.encode("12.\n\n")) == ["1", "2", ".", "Ċ", "Ċ"]


def test_control_tokens_count_only_when_asked_for() -> None:
    assert TOKENIZER.encode("<|im_end|>", parse_special=True) == [IM_END]
    plain = TOKENIZER.encode("<|im_end|>")
    assert IM_END not in plain
    assert TOKENIZER.decode(plain) == "<|im_end|>"


def test_user_defined_tokens_always_count_and_show() -> None:
    assert TOKENIZER.encode("<think>he</think>") == [THINK, TOKENIZER.encode("he")[0], END_THINK]
    assert TOKENIZER.decode([THINK, END_THINK]) == "<think></think>"


def test_control_tokens_show_only_when_asked_for() -> None:
    assert TOKENIZER.decode([IM_START, END_OF_TEXT]) == ""
    assert TOKENIZER.decode([IM_START], render_special=True) == "<|im_start|>"
    assert TOKENIZER.is_control(IM_START)
    assert not TOKENIZER.is_control(THINK)


def test_text_is_brought_to_nfc() -> None:
    assert TOKENIZER.encode("e\u0301") == TOKENIZER.encode("\u00e9")
    assert spelled(TOKENIZER.encode("\u00e9")) == ["Ã©"]


def test_end_ids_are_the_stored_and_the_well_known() -> None:
    assert TOKENIZER.eos_id == IM_END
    assert TOKENIZER.end_ids == {IM_END, END_OF_TEXT}
    assert Tokenizer(make_metadata(eot_token_id=3)).end_ids == {IM_END, END_OF_TEXT, 3}


def test_bos_is_added_only_if_the_file_says_so() -> None:
    asked = Tokenizer(make_metadata(bos_token_id=END_OF_TEXT, add_bos_token=True))
    assert asked.encode("!") == [END_OF_TEXT, 0]
    assert asked.encode("!", add_bos=False) == [0]
    assert Tokenizer(make_metadata(bos_token_id=END_OF_TEXT, add_bos_token=False)).encode("!") == [0]
    assert not Tokenizer(make_metadata(add_bos_token=True)).adds_bos


@given(st.text(st.characters(codec="utf-8")))
def test_every_text_survives_encode_and_decode(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == unicodedata.normalize("NFC", text)


@given(st.lists(st.integers(0, N_NORMAL + 4)))
def test_a_stream_gives_the_text_of_the_whole(ids: list[int]) -> None:
    stream = StreamDecoder(TOKENIZER)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(ids)


def test_a_stream_holds_back_half_a_code_point() -> None:
    ids = TOKENIZER.encode("\U0001f41d!")
    stream = StreamDecoder(TOKENIZER)
    assert [stream.push(i) for i in ids] == ["", "", "", "\U0001f41d", "!"]
    assert stream.finish() == ""
    cut = StreamDecoder(TOKENIZER)
    assert cut.push(ids[0]) == ""
    assert cut.finish() == "\ufffd"


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_streams_back_from_whatever_tokens_spell_it(name: str) -> None:
    """Its own ids, and any other cut of its bytes: within characters, across words, around special tokens."""
    text = TEXTS[name]
    ids = TRAINED.encode(text, parse_special=True)
    assert streamed(ids) == unicodedata.normalize("NFC", text)
    rng = random.Random(name)
    for _ in range(20):
        assert streamed(any_spelling(text.encode(), rng)) == text
    assert streamed([SPELLING[bytes([byte])] for byte in text.encode()]) == text


def streamed(ids: list[int]) -> str:
    """What a client has read after each piece is right so far: no character is ever taken back."""
    stream = StreamDecoder(TRAINED, render_special=True)
    pieces = [stream.push(i) for i in ids]
    whole = b"".join(TRAINED.token_bytes(i, render_special=True) for i in ids)
    read = ""
    for piece in pieces:
        read += piece
        assert whole.startswith(read.encode())
    assert stream.finish() == ""
    assert read.encode() == whole
    return read


def any_spelling(data: bytes, rng: random.Random) -> list[int]:
    """Tokens that spell the bytes, at each place any that fits."""
    ids = []
    while data:
        known = [data[:n] for n in range(1, LONGEST + 1) if data[:n] in SPELLING]
        chosen = rng.choice(known)
        ids.append(SPELLING[chosen])
        data = data[len(chosen) :]
    return ids


def test_unused_tokens_stand_for_nothing() -> None:
    unused = range(TRAINED.n_vocab - len(UNUSED), TRAINED.n_vocab)
    assert [TRAINED.token_text(i) for i in unused] == UNUSED
    assert TRAINED.decode(unused, render_special=True) == ""


def test_a_lone_surrogate_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="character 1"):
        TOKENIZER.encode("a\ud800")


@pytest.mark.parametrize("token_id", [-1, N_NORMAL + 5])
def test_ids_outside_the_vocabulary_are_usage_errors(token_id: int) -> None:
    for function in (TOKENIZER.token_bytes, TOKENIZER.token_text):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            function(token_id)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"model": None}, ModelFileError, "no tokenizer"),
        ({"model": "llama"}, UnsupportedModelError, "llama"),
        ({"pre": "gpt-4o"}, UnsupportedModelError, "qwen35"),
        ({"pre": None}, UnsupportedModelError, "tokenizer.ggml.pre"),
        ({"tokens": None}, ModelFileError, "tokens"),
        ({"tokens": [1, 2]}, ModelFileError, "tokens"),
        ({"token_type": [1]}, ModelFileError, "token_type"),
        ({"token_type": [9] * (N_NORMAL + 5)}, ModelFileError, "token_type"),
        ({"merges": "h e"}, ModelFileError, "merges"),
        ({"merges": ["h zz"]}, ModelFileError, "h zz"),
        ({"merges": ["he"]}, ModelFileError, "'he'"),
        ({"tokens": ["!", "!"], "token_type": [1, 1]}, ModelFileError, "twice"),
        ({"tokens": ["!", '"'], "token_type": [1, 1]}, ModelFileError, "byte symbols"),
        ({"eos_token_id": 10**6}, ModelFileError, "eos_token_id"),
        ({"bos_token_id": "x"}, ModelFileError, "bos_token_id"),
        ({"bos_token_id": True}, ModelFileError, "bos_token_id"),
        ({"model": np.array([1, 2])}, ModelFileError, "tokenizer.ggml.model"),
        ({"model": ("gpt2", "x")}, ModelFileError, "tokenizer.ggml.model"),
        ({"pre": ("qwen35",)}, ModelFileError, "tokenizer.ggml.pre"),
        ({"pre": "x" * 10**6}, UnsupportedModelError, "^.{0,200}$"),
        ({"token_type": 1}, ModelFileError, "token_type"),
        ({"token_type": "1" * (N_NORMAL + 5)}, ModelFileError, "token_type"),
        ({"token_type": ("x",) * (N_NORMAL + 5)}, ModelFileError, "token_type"),
        ({"token_type": np.full(N_NORMAL + 5, np.nan)}, ModelFileError, "token_type"),
        ({"token_type": np.full(N_NORMAL + 5, True)}, ModelFileError, "token_type"),
        ({"tokens": "abc"}, ModelFileError, "tokens"),
        ({"add_bos_token": np.array([True, False])}, ModelFileError, "add_bos_token"),
        ({"add_bos_token": "false"}, ModelFileError, "add_bos_token"),
        ({"add_bos_token": 1}, ModelFileError, "add_bos_token"),
    ],
)
def test_a_bad_vocabulary_is_named(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        Tokenizer(make_metadata(**changes))
