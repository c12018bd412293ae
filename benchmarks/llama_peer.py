"""llama.cpp as a peer of benchmarks (peers.py): runs under `.venv-bench` (`make bench-setup`), never imported.

    .venv-bench/bin/python benchmarks/llama_peer.py MODEL.gguf N_THREADS [--parallel N] [--repack]

Answers each line of standard input, `{"prompt": [ids], "n_predict": 32}`, with a line that starts with `peer `:
times as llama.cpp's own server reports them; of `{"prompts": [[ids], ...]}`, which run at once, the time of all. With
`--repack` weights are copied into the layout its kernels like best, as it does by default; without, it computes on the
mapped file as swarmnode does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp

N_CTX = 1024
"""Of one slot; of each of several, SHORT_CTX."""
SHORT_CTX = 256
N_BATCH = 512


def make_server(model: str, n_threads: int, repack: bool, n_parallel: int) -> Any:
    """A server on the CPU without a listening socket."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = N_CTX if n_parallel == 1 else n_parallel * SHORT_CTX
    params.n_batch = params.n_ubatch = N_BATCH
    params.n_parallel = n_parallel
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.no_extra_bufts = not repack
    params.verbosity = -1
    return xllamacpp.Server(params)


def peak_bytes() -> int:
    """VmHWM of this process."""
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index("VmHWM:") + 1])


def complete(server: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One completion, greedy and as long as asked for; RuntimeError if it is not."""
    fixed = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    reply = server.handle_completions({**request, **fixed})
    parsed: dict[str, Any] = json.loads(reply) if isinstance(reply, str) else reply
    if parsed.get("timings", {}).get("predicted_n") != request["n_predict"]:
        raise RuntimeError(f"the peer did not answer as asked: {parsed}")
    return parsed


def answer_together(server: Any, prompts: list[list[int]], n_predict: int) -> dict[str, Any]:
    """Completions at once, each in a slot: seconds until the last one is complete."""
    requests = [{"prompt": prompt, "n_predict": n_predict} for prompt in prompts]
    with ThreadPoolExecutor(len(requests)) as threads:
        started_s = time.perf_counter()
        list(threads.map(lambda request: complete(server, request), requests))
        return {"wall_s": time.perf_counter() - started_s}


def answer(server: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One completion: seconds to the first token, decode steps a second."""
    reply = complete(server, request)
    timings = reply["timings"]
    # Its clock for decode starts with the first token, which it counts.
    steps = timings["predicted_n"] - 1
    return {
        "first_s": timings["prompt_ms"] / 1e3,
        "decode_per_s": 1e3 * steps / timings["predicted_ms"],
        "peak_bytes": peak_bytes(),
    }


def main() -> None:
    """Serve requests until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("n_threads", type=int)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--repack", action="store_true")
    options = parser.parse_args()
    server = make_server(options.model, options.n_threads, options.repack, options.parallel)
    print(f"peer {json.dumps({'version': xllamacpp.__version__})}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "prompts" in request:
            reply = answer_together(server, request["prompts"], request["n_predict"])
        else:
            reply = answer(server, request)
        print(f"peer {json.dumps(reply)}", flush=True)


if __name__ == "__main__":
    main()
