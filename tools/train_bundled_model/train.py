"""Train the bundled model on the CPU: `python -m tools.train_bundled_model.train --work DIR`.

Writes DIR/tokenizer.json, and DIR/model.pt every few minutes and at the end.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .chat import PAIRS, random_dialogue, turn
from .model import BundledModel, Config
from .text import load_stories
from .tokenizer import END_OF_TEXT, train_tokenizer

SEED = 20
WINDOW_TOKENS = 512
WINDOWS = 4  # sequences in one step
CHAT_SHARE = 0.1  # how many of them are conversations
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
BALANCE_WEIGHT = 0.01  # of the load-balancing loss: keeps every expert in use without hurting the text loss
SAVE_EVERY_S = 120.0


def tokenize_stories(tokenizer: Tokenizer, stories: list[str]) -> Tensor:
    """All stories as one row of ids, each closed by the end-of-text token."""
    ids: list[int] = []
    for story in stories:
        ids += tokenizer.encode(story).ids + [tokenizer.token_to_id(END_OF_TEXT)]
    return torch.tensor(ids)


def story_window(ring: Tensor, width: int, rng: random.Random) -> Tensor:
    """`width` tokens from a random place of the stories."""
    start = rng.randrange(len(ring) - width)
    return ring[start : start + width]


def chat_window(tokenizer: Tokenizer, width: int, rng: random.Random) -> Tensor:
    """`width` tokens of random conversations, one after the other."""
    ids: list[int] = []
    while len(ids) < width:
        ids += tokenizer.encode(random_dialogue(rng)).ids
    return torch.tensor(ids[:width])


def batches(tokenizer: Tokenizer, story_ids: Tensor, rng: random.Random) -> Iterator[Tensor]:
    """Endless batches [sequences, WINDOW_TOKENS + 1] of story windows and packed conversations.

    Story windows start at random places, so the model meets every sentence at many positions, also at the first.
    """
    width = WINDOW_TOKENS + 1
    ring = torch.cat([story_ids, story_ids[:width]])
    while True:
        yield torch.stack(
            [
                chat_window(tokenizer, width, rng) if rng.random() < CHAT_SHARE else story_window(ring, width, rng)
                for _ in range(WINDOWS)
            ]
        )


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine down to 2 % of the peak."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: BundledModel) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.97), fused=True)


def save(model: BundledModel, path: Path) -> None:
    """Write the checkpoint so that a reader never sees half of one."""
    partial = path.with_suffix(".partial")
    torch.save(model.state_dict(), partial)
    partial.replace(path)


def train(model: BundledModel, data: Iterator[Tensor], steps: int, checkpoint: Path) -> None:
    """Run `steps` optimiser steps, printing the text loss (nats a token) and the balance loss (1.0 = even)."""
    optimizer = make_optimizer(model)
    started = saved = time.monotonic()
    mean_loss = float("nan")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            logits, balance = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE_WEIGHT * balance).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if step == 0 else 0.95 * mean_loss + 0.05 * loss.item()
        now = time.monotonic()
        if step % 50 == 0:
            print(f"step {step} loss {mean_loss:.3f} balance {balance.item():.3f} {now - started:.0f} s", flush=True)
        if now - saved > SAVE_EVERY_S or step == steps - 1:
            save(model, checkpoint)
            saved = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the tokenizer and the checkpoint")
    parser.add_argument("--book", type=Path, help="the book's text file, if it is already unpacked")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    stories = load_stories(options.book)
    chats = [turn("user", question) + turn("assistant", answer) for questions, answer in PAIRS for question in questions]
    tokenizer = train_tokenizer([*stories, *chats])
    tokenizer.save(str(options.work / "tokenizer.json"))
    story_ids = tokenize_stories(tokenizer, stories)
    print(f"{sum(map(len, stories))} characters, {len(story_ids)} tokens")
    model = BundledModel(Config())
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    train(model, batches(tokenizer, story_ids, random.Random(SEED)), options.steps, options.work / "model.pt")


if __name__ == "__main__":
    main()
