"""Text to token ids and back, from the vocabulary that the GGUF itself carries.

Encoding is byte-level BPE done by `tokenizers`; decoding is a table from id to bytes kept here, because a
stream of tokens must be able to stop in the middle of a code point. Behaves like llama.cpp's tokenizer for
the same file (llama-vocab.cpp: token types, special tokens, `token_to_piece`), with one addition: text is
brought to NFC first, as the models' own tokenizers do and llama.cpp does not.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from swarmnode.counts import counted
from swarmnode.errors import ModelFileError, UsageError
from swarmnode.models.metadata import Metadata, shown

#: `tokenizer.ggml.pre` -> how text is cut into words before merging (llama.cpp llama-vocab.cpp, same names).
PRE_TOKENIZER_PATTERNS: Mapping[str, str] = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

# `tokenizer.ggml.token_type` values.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_TOKEN_TYPES = range(1, 7)

#: Control tokens that end an answer whatever `eos_token_id` says (of llama.cpp's list, what Qwen files use).
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def _byte_symbols() -> dict[str, bytes]:
    """Printable stand-in for each byte: symbol -> byte value (openai/gpt-2 encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return symbols | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


_SYMBOL_BYTES = _byte_symbols()


class Tokenizer:
    """The vocabulary of one model file.

    `n_vocab`: number of tokens; `bos_id`, `eos_id`: ids or None; `end_ids`: tokens that end an answer;
    `adds_bos`: whether `encode` puts `bos_id` in front; `control_tokens`: how each is spelt -> id.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Build from GGUF metadata (`tokenizer.ggml.*`).

        Raises ModelFileError for a missing or inconsistent vocabulary, UnsupportedModelError for other kinds.
        """
        stored = Metadata(metadata, "tokenizer.ggml.")
        pattern = _checked_pattern(stored)
        self._tokens = stored.strings("tokens")
        self._types = _token_types(stored, len(self._tokens))
        merges = stored.strings("merges")
        self.n_vocab = len(self._tokens)
        self.control_tokens: Mapping[str, int] = {
            token: i for i, token in enumerate(self._tokens) if token and self.is_control(i)
        }
        self._bpe = _build_bpe(self._tokens, self._types, merges, pattern)
        self._lock = threading.Lock()
        self.bos_id = self._id_or_none(stored, "bos_token_id")
        self.eos_id = self._id_or_none(stored, "eos_token_id")
        self.adds_bos = stored.flag("add_bos_token", False) and self.bos_id is not None
        self.end_ids = self._find_end_ids(stored)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = True) -> list[int]:
        """Return the token ids of `text`.

        `parse_special`: whether control tokens spelt out in the text (`<|im_end|>`) become those tokens or stay
        plain text; user-defined tokens (`<think>`) always count. Never True for text of others.
        `add_bos=False` leaves the leading BOS token out of files that ask for one.
        Raises UsageError if the text holds a lone surrogate.
        """
        _check_unicode(text)
        ids = self._encode(text, parse_special)
        return self._with_bos(ids) if add_bos else ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Return the token ids of a rendered chat: text, control token, text, ..., text. Nothing in a text counts as
        a control token. The leading BOS token and errors as in `encode`.
        """
        _check_unicode("".join(pieces))
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self.control_tokens[piece])
            elif piece:
                ids += self._encode(piece, parse_special=False)
        return self._with_bos(ids)

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:  # the switch below belongs to the tokenizer, not to the call
            self._bpe.encode_special_tokens = not parse_special
            ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, render_special: bool = False) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Control tokens are left out unless `render_special`. Raises UsageError for an id that does not exist.
        """
        data = b"".join(self.token_bytes(i, render_special=render_special) for i in ids)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, render_special: bool = False) -> bytes:
        """Return the bytes one token stands for: maybe a part of a code point; nothing for control tokens.

        Nor anything, ever, for unused tokens (`[PAD248077]`), which only fill the embedding's rows up.
        """
        if not 0 <= token_id < self.n_vocab:
            raise UsageError(f"token id {token_id} is outside the vocabulary of {self.n_vocab}")
        text, kind = self._tokens[token_id], self._types[token_id]
        if kind in (_CONTROL, _UNKNOWN):
            return text.encode() if render_special else b""
        if kind == _USER_DEFINED:
            return text.encode()
        if kind == _UNUSED:
            return b""
        return b"".join(_SYMBOL_BYTES.get(c) or c.encode("utf-8", "replace") for c in text)

    def token_text(self, token_id: int) -> str:
        """Return the token as the file spells it (`Ġthe`, `<|im_end|>`)."""
        if not 0 <= token_id < self.n_vocab:
            raise UsageError(f"token id {token_id} is outside the vocabulary of {self.n_vocab}")
        return self._tokens[token_id]

    def stream_decoder(self, *, render_special: bool = False) -> StreamDecoder:
        """A decoder for one answer."""
        return StreamDecoder(self, render_special=render_special)

    def is_control(self, token_id: int) -> bool:
        """Whether the token is a control token, which never shows in an answer."""
        return 0 <= token_id < self.n_vocab and self._types[token_id] in (_CONTROL, _UNKNOWN)

    def _id_or_none(self, stored: Metadata, name: str) -> int | None:
        return stored.integer(name, 0, self.n_vocab - 1) if stored.has(name) else None

    def _find_end_ids(self, stored: Metadata) -> frozenset[int]:
        well_known = (self._bpe.token_to_id(token) for token in _END_TOKENS)
        named = (self._id_or_none(stored, key) for key in _END_KEYS)
        return frozenset(i for i in (*well_known, *named) if i is not None)


class StreamDecoder:
    """Turns a stream of tokens into text as soon as whole code points are there.

    The pieces joined are what `Tokenizer.decode` gives for all ids; no piece ends inside a code point.
    """

    def __init__(self, tokenizer: Tokenizer, *, render_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._render_special = render_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, often empty in the middle of a code point."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, render_special=self._render_special))

    def finish(self) -> str:
        """Return what is left at the end: U+FFFD if the last code point never got complete, else nothing."""
        return self._utf8.decode(b"", final=True)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid Unicode at character {error.start}") from error


def _checked_pattern(stored: Metadata) -> str:
    if not stored.has("model"):
        raise ModelFileError("the file has no tokenizer (tokenizer.ggml.model is missing)")
    kind = stored.text("model")
    if kind != "gpt2":
        stored.unsupported("model", f"= {shown(kind)}; supported: 'gpt2' (byte-level BPE)")
    known = ", ".join(sorted(PRE_TOKENIZER_PATTERNS))
    if not stored.has("pre"):
        stored.unsupported("pre", f"is missing; supported: {known}")
    pre = stored.text("pre")
    if pre not in PRE_TOKENIZER_PATTERNS:
        stored.unsupported("pre", f"= {shown(pre)}; supported: {known}")
    return PRE_TOKENIZER_PATTERNS[pre]


def _token_types(stored: Metadata, n_vocab: int) -> list[int]:
    types = stored.integers("token_type", _TOKEN_TYPES.start, _TOKEN_TYPES.stop - 1)
    if len(types) != n_vocab:
        stored.fail(
            "token_type", f"has {counted(len(types), 'entry', 'entries')} for {counted(n_vocab, 'token')}"
        )
    return types


def _build_bpe(tokens: list[str], types: list[int], merges: list[str], pattern: str) -> BpeTokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError("tokenizer.ggml.tokens holds the same token twice")
    missing = sum(symbol not in vocab for symbol in _SYMBOL_BYTES)
    if missing:
        # `tokenizers` would drop these bytes from the text without a word.
        raise ModelFileError(f"tokenizer.ggml.tokens lacks {missing} of the 256 byte symbols")
    bpe = BpeTokenizer(models.BPE(vocab=vocab, merges=_merge_pairs(merges, vocab)))
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_symbols])
    control = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN) and t]
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED and t]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    return bpe


def _merge_pairs(merges: list[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Split 'left right' and check that both sides and the result are tokens."""
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(
                f"tokenizer.ggml.merges: {shown(merge)} does not join two tokens into a third"
            )
        pairs.append((left, right))
    return pairs
