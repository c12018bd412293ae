"""llama.cpp as the judge: greedy tokens and raw logits, through the low-level API of `llama-cpp-python`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# One order of additions for every length of prompt; the library reads this when it first multiplies.
os.environ["GGML_CPU_TILED_MM"] = "0"

import llama_cpp

Logits = npt.NDArray[np.float32]

#: How the reference is made; stored beside it.
SETTINGS = {
    "threads": 1,
    "repack": False,
    "flash_attention": True,
    "kv_cache": "f16",
    "GGML_CPU_TILED_MM": "0",
    "library": f"llama-cpp-python {llama_cpp.__version__}",
}
_N_CONTEXT = 1024
_FLASH_ATTENTION_ON = 1


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # the library is not installed where types are checked
def _silence(_level: int, _text: bytes, _user_data: object) -> None:
    """Swallow llama.cpp's log."""


class LlamaPeer:
    """One model and one sequence. Call `close` at the end, or use `open_peer`."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_silence, None)
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = False
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._context = llama_cpp.llama_init_from_model(self._model, _context_parameters())
        if not self._context:
            raise ValueError("llama.cpp cannot make a context for this model")
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._position = 0

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in the text count as such."""
        raw = text.encode()
        buffer = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), buffer, len(buffer), False, True)
        return list(buffer[:count])

    def reset(self) -> None:
        """Forget the sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._position = 0

    def forward(self, ids: Sequence[int]) -> Logits:
        """Append `ids` to the sequence and return the logits after each of them, [len(ids), n_vocab]."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = self._position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with {status}")
        self._position += len(ids)
        raw = llama_cpp.llama_get_logits(self._context)
        size = len(ids) * self.n_vocab * ctypes.sizeof(ctypes.c_float)
        return np.frombuffer(ctypes.string_at(raw, size), np.float32).reshape(len(ids), self.n_vocab)

    def greedy(self, ids: Sequence[int], n_tokens: int) -> tuple[list[int], list[float]]:
        """Continue a fresh sequence greedily by `n_tokens` ids.

        Returns the ids and, for each, its lead over the second-best logit.
        """
        self.reset()
        row = self.forward(ids)[-1]
        tokens: list[int] = []
        margins: list[float] = []
        for _ in range(n_tokens):
            second, best = np.partition(row, -2)[-2:]
            tokens.append(int(row.argmax()))
            margins.append(float(best - second))
            row = self.forward(tokens[-1:])[-1]
        return tokens, margins

    def close(self) -> None:
        """Free the library's memory."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _context_parameters() -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = _N_CONTEXT
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.flash_attn_type = _FLASH_ATTENTION_ON  # the KV cache is f16 by default
    return parameters


@contextmanager
def open_peer(path: Path) -> Iterator[LlamaPeer]:
    """A peer that is closed on leaving the block."""
    peer = LlamaPeer(path)
    try:
        yield peer
    finally:
        peer.close()
