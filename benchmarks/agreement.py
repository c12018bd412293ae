"""How close our logits are to llama.cpp's on the same GGUF, and whether greedy answers are the same tokens.

    python -m benchmarks.agreement --reference DIR [--threads N]

DIR holds GGUFs, `truth.json` ({file: {"greedy": {name: {"prompt": ids, "greedy": ids}}}}) and for each GGUF an
.npz of the same name: `tokens` i32 [T], `prefill` and `decode` f32 [T, n_vocab] (all tokens in one batch, and one at
a time). llama.cpp must have run with GGML_CPU_TILED_MM=0 and without weight repacking, f16 KV and flash attention.
Logits are bit-equal only where ggml was built for the same CPU features on both sides (AVX512-FP16 is one that changes
them). Exit code 0: all cosines at least MIN_COSINE and all greedy answers equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import build_report, open_device
from swarmnode.models.base import ExpertCall, F32Array, Model, run_pass
from swarmnode.models.registry import open_model
from swarmnode.weights.index import ModelIndex

MIN_COSINE = 0.9995
"""Between CPUs with other kernels a right engine has 0.9998; experts scaled by 0.9 or one of four dropped give less."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores this process may use")
    options = parser.parse_args()
    print(build_report())
    truth = json.loads((options.reference / "truth.json").read_text())
    agrees = [check_file(options.reference / name, truth[name], options.threads) for name in truth]
    return 0 if all(agrees) else 1


def check_file(path: Path, truth: dict[str, Any], n_threads: int) -> bool:
    """Compare one model with its truth and print a line for each measure; whether all of them agree."""
    with ModelIndex.open(path) as index:
        device = open_device("CPU", n_threads)
        bank = bind_all(index, ExpertBank(device))
        recorded = np.load(path.with_suffix(".npz"))
        model = open_model(
            index, device, n_ctx=min(1024, index.integer("context_length", 1, 1 << 24)), n_slots=1
        )
        experts = local_experts(bank)
        print(f"{path.name}: {model.n_layer} layers, state {model.state_bytes / 1e6:.1f} MB")
        tokens = recorded["tokens"].tolist()
        model.reset(0)
        prefill = run_pass(model.forward(0, tokens, all_logits=True), experts)
        model.reset(0)
        decode = np.concatenate([run_pass(model.forward(0, [token]), experts) for token in tokens])
        agrees = [
            compare("prefill", prefill, recorded["prefill"]),
            compare("decode", decode, recorded["decode"]),
        ]
        agrees.append(compare_greedy(model, experts, truth["greedy"]))
        model.close()
        bank.close()
    return all(agrees)


def bind_all(index: ModelIndex, bank: ExpertBank) -> ExpertBank:
    """Bind every routed expert of the file to the bank, without a copy."""
    for layer, layout in index.expert_layers.items():
        stacked = {kind: index.data(f"blk.{layer}.{kind}.weight") for kind in layout.kinds}
        bank.bind(layout, range(layout.n_expert), stacked)
    return bank


def local_experts(bank: ExpertBank) -> Callable[[ExpertCall], F32Array]:
    """Compute a call on the bank."""
    return lambda call: bank.moe(call.layer, call.rows, call.ids, call.weights)


def compare(name: str, ours: F32Array, theirs: F32Array) -> bool:
    """Print largest difference, smallest cosine and share of equal argmax of two [T, n_vocab]."""
    difference = float(np.abs(ours - theirs).max())
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    cosine = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    same = float((ours.argmax(1) == theirs.argmax(1)).mean())
    bits = "bit-equal" if np.array_equal(ours, theirs) else "not bit-equal"
    print(f"  {name}: max|d| {difference:.3g}, min cosine {cosine.min():.9f}, argmax {same:.0%}, {bits}")
    return float(cosine.min()) >= MIN_COSINE


def compare_greedy(
    model: Model, experts: Callable[[ExpertCall], F32Array], truth: dict[str, dict[str, list[int]]]
) -> bool:
    """Print how many prompts get the same greedy tokens."""
    n_equal = 0
    for entry in truth.values():
        ours = greedy(model, experts, entry["prompt"], len(entry["greedy"]))
        n_equal += ours == entry["greedy"]
    print(f"  greedy: {n_equal} of {len(truth)} answers equal")
    return n_equal == len(truth)


def greedy(model: Model, experts: Callable[[ExpertCall], F32Array], prompt: list[int], n: int) -> list[int]:
    """The n most probable tokens after a prompt, one after another."""
    model.reset(0)
    tokens: list[int] = []
    logits = run_pass(model.forward(0, prompt), experts)
    while True:
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == n:
            return tokens
        logits = run_pass(model.forward(0, tokens[-1:]), experts)


if __name__ == "__main__":
    sys.exit(main())
