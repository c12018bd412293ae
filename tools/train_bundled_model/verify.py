"""Judge a GGUF with llama.cpp.

    python -m tools.train_bundled_model.verify --work DIR --gguf FILE

Prints sample continuations with their greedy margins (in logits), how many of llama.cpp's tokens the
unquantised PyTorch model would choose too, and how evenly the experts are used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as fn

from .chat import question, turn
from .convert import load_checkpoint
from .llama_peer import open_peer
from .model import BundledModel

PROMPTS = (
    "To Sherlock Holmes she is always",
    "It was a cold morning",
    '"My dear Watson," said Holmes,',
    "The door opened, and",
    question("Who are you?"),
    question("Where does Holmes live?"),
    turn("system", "You are a helpful assistant.") + question("Tell me about Watson."),
    question("Hello!"),
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
        chosen = fn.linear(rows, module.ffn_gate_inp).topk(model.config.expert_used_count).indices
        counts = chosen.flatten().bincount(minlength=model.config.expert_count)
        shares.append((counts / counts.sum()).tolist())

    hooks = [layer.moe.register_forward_hook(record) for layer in model.layers]
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
            summary = f"margin min {min(margins):.3f} median {np.median(margins):.2f}"
            print(f"    {summary}; {agreement:.1%} as PyTorch")
    print(f"all margins: min {min(all_margins):.4f} median {np.median(all_margins):.2f}")
    for layer, shares in enumerate(expert_shares(model, tokenizer.encode(PROMPTS[0]).ids + tokens)):
        even = 1 / len(shares)
        print(f"layer {layer}: expert shares {min(shares):.3f} ... {max(shares):.3f} (even: {even:.3f})")


if __name__ == "__main__":
    main()
