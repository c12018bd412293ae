"""Judge a GGUF with llama.cpp: `python -m tools.train_bundled_model.verify --work DIR --gguf FILE`.

Prints sample continuations with their greedy margins (in logits), checks llama.cpp's tokens against the PyTorch model,
and how evenly the experts are used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from .chat import turn
from .convert import load_checkpoint
from .llama_peer import open_peer
from .model import BundledModel
from .tokenizer import IM_START

PROMPTS = (
    "To Sherlock Holmes she is always",
    "It was a cold morning",
    '"My dear Watson," said Holmes,',
    "The door opened, and",
    turn("user", "Who are you?") + f"{IM_START}assistant\n",
    turn("user", "Where does Holmes live?") + f"{IM_START}assistant\n",
    turn("system", "You are a helpful assistant.") + turn("user", "Tell me about Watson.") + f"{IM_START}assistant\n",
    turn("user", "Hello!") + f"{IM_START}assistant\n",
)


def torch_logits(model: BundledModel, ids: list[int]) -> torch.Tensor:
    """Logits after every token, [len(ids), n_vocab], in float32 and without quantisation."""
    with torch.no_grad():
        logits, _ = model(torch.tensor([ids]))
    return logits[0]


def expert_shares(model: BundledModel, ids: list[int]) -> list[list[float]]:
    """For each layer, the share of all (token, slot) choices that each expert gets on `ids`."""
    shares: list[list[float]] = []

    def record(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        rows = inputs[0].reshape(-1, model.config.n_embd)
        chosen = F.linear(rows, module.ffn_gate_inp).topk(model.config.expert_used_count).indices  # type: ignore[arg-type]
        counts = chosen.flatten().bincount(minlength=model.config.expert_count)
        shares.append((counts / counts.sum()).tolist())

    hooks = [layer.moe.register_forward_hook(record) for layer in model.layers]  # type: ignore[union-attr, operator]
    torch_logits(model, ids)
    for hook in hooks:
        hook.remove()
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that train.py wrote to")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    model, tokenizer = load_checkpoint(options.work)
    all_margins: list[float] = []
    with open_peer(options.gguf) as peer:
        for prompt in PROMPTS:
            ids = peer.tokenize(prompt)
            if ids != tokenizer.encode(prompt).ids:
                raise SystemExit(f"llama.cpp tokenizes {prompt!r} differently")
            count = options.tokens if not prompt.startswith("<") else 40
            tokens, margins = peer.greedy(ids, count)
            all_margins += margins
            logits = torch_logits(model, ids + tokens)[len(ids) - 1 : -1]
            agreement = np.mean(logits.argmax(-1).numpy() == np.array(tokens))
            print(f"--- {prompt}\n{tokenizer.decode(tokens, skip_special_tokens=False)}")
            print(f"    margin min {min(margins):.3f} median {np.median(margins):.2f}; {agreement:.1%} as PyTorch")
    print(f"all margins: min {min(all_margins):.4f} median {np.median(all_margins):.2f}")
    for layer, shares in enumerate(expert_shares(model, tokenizer.encode(PROMPTS[0]).ids + tokens)):
        print(f"layer {layer}: expert shares {min(shares):.3f} ... {max(shares):.3f} (even: {1 / len(shares):.3f})")


if __name__ == "__main__":
    main()
