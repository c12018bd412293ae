"""Train the bundled model on the CPU: `python -m tools.train_bundled_model.train --work DIR`.

Writes DIR/tokenizer.json, and DIR/model.pt every few minutes and at the end.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as fn

from .chat import all_exchanges, random_dialogue
from .model import BundledModel, Config
from .text import STORIES, TOKENIZER_STORIES, load_stories
from .tokenizer import END_OF_TEXT, token_id, train_tokenizer

SEED = 20
STEP_TOKENS = 2048
WIDTHS = (128, 512)  # tokens in a sequence: one of these for each step
NOISE_SHARE = 0.05  # of the input tokens, in half of the story windows
CHAT_SHARE = 0.1  # of the sequences are conversations
LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 50
BALANCE_WEIGHT = 0.01  # of the load-balancing loss: keeps every expert in use without hurting the text loss
SAVE_EVERY_S = 120.0


def tokenize_stories(tokenizer: Tokenizer, stories: list[str]) -> Tensor:
    """All stories as one row of ids, each closed by the end-of-text token."""
    ids: list[int] = []
    for story in stories:
        ids += [*tokenizer.encode(story).ids, token_id(tokenizer, END_OF_TEXT)]
    return torch.tensor(ids)


def story_window(ring: Tensor, width: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Inputs and targets, `width` tokens each, from a random place of the stories.

    In half of the windows some input tokens are replaced by tokens from elsewhere. A model this small learns its
    stories by heart; the noise teaches it to find back into them after a prompt, or a token of its own, that is not
    in them.
    """
    start = rng.randrange(len(ring) - width)
    inputs, targets = ring[start : start + width].clone(), ring[start + 1 : start + width + 1]
    if rng.random() < 0.5:
        replaced = torch.rand(width) < NOISE_SHARE
        inputs[replaced] = ring[torch.randint(len(ring), (int(replaced.sum()),))]
    return inputs, targets


def chat_window(tokenizer: Tokenizer, width: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Inputs and targets of random conversations, one after the other."""
    ids: list[int] = []
    while len(ids) <= width:
        ids += tokenizer.encode(random_dialogue(rng)).ids
    return torch.tensor(ids[:width]), torch.tensor(ids[1 : width + 1])


def batches(tokenizer: Tokenizer, story_ids: Tensor, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of inputs and targets, [sequences, width] each.

    Story windows start at random places, so the model meets every sentence at many positions, the first too. Short
    windows teach it to go on from a few words, long ones to keep the thread.
    """
    while True:
        width = rng.choice(WIDTHS)
        ring = torch.cat([story_ids, story_ids[: width + 1]])
        windows = []
        for _ in range(STEP_TOKENS // width):
            is_chat = rng.random() < CHAT_SHARE
            windows.append(chat_window(tokenizer, width, rng) if is_chat else story_window(ring, width, rng))
        inputs, targets = zip(*windows, strict=True)
        yield torch.stack(inputs), torch.stack(targets)


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up, then a half cosine down to 2 % of the peak; `progress` goes from 0 to 1."""
    decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return LEARNING_RATE * decay * min(1.0, (step + 1) / WARMUP_STEPS)


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


@dataclass(frozen=True)
class Budget:
    """When to stop: after `steps` optimiser steps or `seconds`, whichever comes first."""

    steps: int
    seconds: float

    def progress(self, step: int, elapsed_s: float) -> float:
        """How much of the budget is used up, 0 to 1."""
        return max(step / self.steps, elapsed_s / self.seconds)


Batches = Iterator[tuple[Tensor, Tensor]]


def train(model: BundledModel, data: Batches, budget: Budget, checkpoint: Path) -> None:
    """Train until the budget is used up, printing text loss (nats a token) and balance loss (1.0 = even)."""
    optimizer = make_optimizer(model)
    started = saved = time.monotonic()
    mean_loss, step, progress = float("nan"), 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        inputs, targets = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            logits, balance = model(inputs)
        loss = fn.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if step == 0 else 0.95 * mean_loss + 0.05 * loss.item()
        now = time.monotonic()
        if step % 25 == 0:
            line = f"step {step} loss {mean_loss:.3f} balance {balance.item():.3f} {now - started:.0f} s"
            print(line, flush=True)
        if now - saved > SAVE_EVERY_S:
            save(model, checkpoint)
            saved = now
        step += 1
        progress = budget.progress(step, now - started)
    save(model, checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for tokenizer and checkpoint")
    parser.add_argument("--book", type=Path, help="the book's text file, if it is already unpacked")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument(
        "--minutes", type=float, default=120.0, help="end by then, with the schedule squeezed in"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint and tokenizer in --work"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    model = BundledModel(Config())
    if options.resume:
        tokenizer = Tokenizer.from_file(str(options.work / "tokenizer.json"))
        model.load_state_dict(torch.load(options.work / "model.pt", weights_only=True))
    else:
        tokenizer = train_tokenizer([*load_stories(TOKENIZER_STORIES, options.book), *all_exchanges()])
        tokenizer.save(str(options.work / "tokenizer.json"))
    stories = load_stories(STORIES, options.book)
    story_ids = tokenize_stories(tokenizer, stories)
    print(f"{sum(map(len, stories))} characters, {len(story_ids)} tokens")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    budget = Budget(options.steps, options.minutes * 60)
    train(model, batches(tokenizer, story_ids, random.Random(SEED)), budget, options.work / "model.pt")


if __name__ == "__main__":
    main()
