"""llama.cpp as the judge: greedy tokens and raw logits, from the prebuilt library in PyPI's `llama-cpp-py-sync`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# One order of additions for every length of prompt; the library reads this when it first multiplies.
os.environ.setdefault("GGML_CPU_TILED_MM", "0")

from llama_cpp_py_sync import __version__ as library_version  # noqa: E402
from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib  # noqa: E402

Logits = npt.NDArray[np.float32]

#: How the reference is made; stored beside it.
SETTINGS = {
    "threads": 1,
    "repack": False,
    "flash_attention": True,
    "kv_cache": "f16",
    "GGML_CPU_TILED_MM": os.environ["GGML_CPU_TILED_MM"],
    "library": f"llama-cpp-py-sync {library_version}",
}
_N_CONTEXT = 1024


class LlamaPeer:
    """One model and one sequence. Call `close` at the end, or use `open_peer`."""

    def __init__(self, path: Path) -> None:
        self._ffi: Any = get_ffi()
        self._lib: Any = get_lib()
        self._quiet = self._ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda *_: None)
        self._lib.llama_log_set(self._quiet, self._ffi.NULL)
        self._lib.llama_backend_init()
        parameters = self._lib.llama_model_default_params()
        parameters.use_extra_bufts = False
        parameters.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self._context = self._lib.llama_init_from_model(self._model, self._context_parameters())
        if not self._context:
            raise ValueError("llama.cpp cannot make a context for this model")
        self.n_vocab: int = self._lib.llama_vocab_n_tokens(self._vocab)
        self._position = 0

    def _context_parameters(self) -> Any:
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = _N_CONTEXT
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.flash_attn_type = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED; the KV cache is f16 by default
        return parameters

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in the text count as such."""
        raw = text.encode()
        room = len(raw) + 8
        buffer = self._ffi.new("llama_token[]", room)
        count = self._lib.llama_tokenize(self._vocab, raw, len(raw), buffer, room, False, True)
        return list(buffer[0:count])

    def reset(self) -> None:
        """Forget the sequence."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._position = 0

    def forward(self, ids: Sequence[int]) -> Logits:
        """Append `ids` to the sequence and return the logits after each of them, [len(ids), n_vocab]."""
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = self._position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with {status}")
        self._position += len(ids)
        size = len(ids) * self.n_vocab * 4
        raw = self._ffi.buffer(self._lib.llama_get_logits(self._context), size)
        return np.frombuffer(bytes(raw), np.float32).reshape(len(ids), self.n_vocab)

    def greedy(self, ids: Sequence[int], n_tokens: int) -> tuple[list[int], list[float]]:
        """Continue a fresh sequence greedily; returns `n_tokens` ids and each one's lead over the second-best logit."""
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
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


@contextmanager
def open_peer(path: Path) -> Iterator[LlamaPeer]:
    """A peer that is closed on leaving the block."""
    peer = LlamaPeer(path)
    try:
        yield peer
    finally:
        peer.close()
