"""llama.cpp as the peer of decode.py: runs under `.venv-bench` (`make bench-setup`), never imported.

    .venv-bench/bin/python benchmarks/llama_peer.py MODEL.gguf N_THREADS [--repack]

Answers each line of standard input, `{"prompt": [ids], "n_predict": 32}`, with a line that starts with `peer `:
times as llama.cpp's own server reports them. With `--repack` weights are copied into the layout its kernels like best,
as it does by default; without, it computes on the mapped file as swarmnode does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xllamacpp

N_CTX = 1024
N_BATCH = 512


def make_server(model: str, n_threads: int, repack: bool) -> Any:
    """A server on the CPU without a listening socket."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = N_CTX
    params.n_batch = params.n_ubatch = N_BATCH
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.no_extra_bufts = not repack
    params.verbosity = -1
    return xllamacpp.Server(params)


def peak_bytes() -> int:
    """VmHWM of this process."""
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index("VmHWM:") + 1])


def answer(server: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One completion: seconds to the first token, decode steps a second."""
    fixed = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    reply = server.handle_completions({**request, **fixed})
    timings = (json.loads(reply) if isinstance(reply, str) else reply)["timings"]
    # Its clock for decode starts with the first token, which it counts.
    steps = timings["predicted_n"] - 1
    return {
        "first_s": timings["prompt_ms"] / 1e3,
        "decode_per_s": 1e3 * steps / timings["predicted_ms"],
        "peak_bytes": peak_bytes(),
    }


def main() -> None:
    """Serve requests until standard input ends."""
    server = make_server(sys.argv[1], int(sys.argv[2]), "--repack" in sys.argv[3:])
    print(f"peer {json.dumps({'version': xllamacpp.__version__})}", flush=True)
    for line in sys.stdin:
        print(f"peer {json.dumps(answer(server, json.loads(line)))}", flush=True)


if __name__ == "__main__":
    main()
