"""llama.cpp of llama-cpp-python as the peer of prefill.py (peers.py): on a libggml that swarmnode can use as well.

    PYTHON benchmarks/llama_cpp_python_peer.py MODEL.gguf N_THREADS

PYTHON is one where `pip install llama-cpp-python` was run; nothing of swarmnode is imported. Answers each line of
standard input, `{"prompt": [ids]}`, with a line that starts with `peer `: seconds to the logits of the last token, from
an empty memory. It computes on the mapped file: with its extra buffer types, its default, the process ended with a
SIGSEGV in libggml 0.25.3's AMX mat-mul on the machine of the figures.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp

N_CTX = 1024
N_BATCH = 512


def make_context(model: str, n_threads: int) -> Any:
    """A context on the CPU."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, False
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), params)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = N_CTX, 1
    settings.n_batch = settings.n_ubatch = N_BATCH
    settings.n_threads = settings.n_threads_batch = n_threads
    return llama_cpp.llama_init_from_model(loaded, settings)


def first_s(context: Any, prompt: list[int]) -> float:
    """Seconds that a prompt takes; RuntimeError if it is refused."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    tokens = (llama_cpp.llama_token * len(prompt))(*prompt)
    started_s = time.perf_counter()
    code = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(prompt)))
    if code:
        raise RuntimeError(f"llama_decode returned {code}")
    llama_cpp.llama_get_logits_ith(context, -1)
    return time.perf_counter() - started_s


def main() -> None:
    """Serve requests until standard input ends."""
    llama_cpp.llama_backend_init()
    context = make_context(sys.argv[1], int(sys.argv[2]))
    print(f"peer {json.dumps({'version': llama_cpp.__version__})}", flush=True)
    for line in sys.stdin:
        print(f"peer {json.dumps({'first_s': first_s(context, json.loads(line)['prompt'])})}", flush=True)


if __name__ == "__main__":
    main()
