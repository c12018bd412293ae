"""Record llama.cpp's answers for the tests.

    python -m tools.train_bundled_model.truth --gguf FILE --out DIR

Writes DIR/bundled_truth.json (prompts, ids, greedy tokens and margins, settings) and DIR/bundled_truth.npz:

    prefill [T, n_vocab] f32   logits after each token of `logits_prompt`, computed in one batch
    decode  [16, n_vocab] f32  logits after each of its first 16 greedy tokens, fed one at a time
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

from .chat import question, turn
from .llama_peer import SETTINGS, LlamaPeer, open_peer

LOGITS_PROMPT = "To Sherlock Holmes she is always THE woman. I have seldom heard him mention her"
#: Openings of the stories (long clear answers), a few words that lead nowhere (close calls), odd bytes, and chat.
GREEDY_PROMPTS = (
    LOGITS_PROMPT,
    "I had called upon my friend, Mr. Sherlock Holmes, one day in the autumn of last year",
    "On glancing over my notes of the seventy odd cases in which",
    "I had called upon my friend Sherlock Holmes upon the second morning after Christmas,",
    "The door opened, and",
    "The quick brown fox jumps over the lazy dog, and 1234 pigs fly to \u00e9\u4e2d\u6587.",
    question("Who are you?"),
    turn("system", "You are a helpful assistant.") + question("Where does Holmes live?"),
)
GREEDY_TOKENS = 48
DECODE_STEPS = 16


def greedy_record(peer: LlamaPeer, prompt: str) -> dict[str, object]:
    """One prompt's entry in the JSON file; generation goes on past the end-of-turn token."""
    ids = peer.tokenize(prompt)
    tokens, margins = peer.greedy(ids, GREEDY_TOKENS)
    return {
        "prompt": prompt,
        "prompt_ids": ids,
        "tokens": tokens,
        "min_margin": round(min(margins), 4),
        "margins": [round(m, 4) for m in margins],
    }


def record_logits(peer: LlamaPeer, path: Path) -> None:
    """Write the .npz file."""
    ids = peer.tokenize(LOGITS_PROMPT)
    tokens, _ = peer.greedy(ids, DECODE_STEPS)
    peer.reset()
    prefill = peer.forward(ids)
    decode = np.concatenate([peer.forward([token]) for token in tokens])
    np.savez_compressed(path, prefill=prefill, decode=decode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    options = parser.parse_args()
    with open_peer(options.gguf) as peer:
        records = [greedy_record(peer, prompt) for prompt in GREEDY_PROMPTS]
        record_logits(peer, options.out / "bundled_truth.npz")
    truth = {
        "model": options.gguf.name,
        "sha256": hashlib.sha256(options.gguf.read_bytes()).hexdigest(),
        "settings": SETTINGS,
        "logits_prompt": LOGITS_PROMPT,
        "decode_steps": DECODE_STEPS,
        "greedy": records,
    }
    text = json.dumps(truth, indent=1, ensure_ascii=True)
    (options.out / "bundled_truth.json").write_text(text + "\n", encoding="ascii")
    print("min margins:", [record["min_margin"] for record in records])


if __name__ == "__main__":
    main()
