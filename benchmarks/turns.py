"""What the next turn of a conversation costs, with the bundled model; and what a checkpoint costs at the real sizes.

    python -m benchmarks.turns [--model FILE.gguf] [--tokens 2000] [--answer 64] [--threads N]

A conversation of about so many tokens gets an answer; then it goes on in several ways, each with its prompt rendered
and encoded from text, as the API does it. Peer: the same prompt in a slot that remembers nothing. `new`: tokens behind
what prompt and answer before had in common with this prompt. Exit code 1 if the next turn runs more than 1.1 times
its new tokens, or if an answer is not what the same passes give by hand.

The line `agreement`: texts that go on behind an answer of so many tokens, greedy, against the same prompt run anew (its
first answer is then run as a prompt, not token by token: other kernels, other last bits), and against the same passes
by hand in an empty slot (which must agree).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import trio

from benchmarks.oracle import TEXT
from benchmarks.real_sizes import with_real_states
from swarmnode.compute.devices import Device
from swarmnode.config import Config, EngineConfig, Folders
from swarmnode.models.chat import ChatTemplate, template_of
from swarmnode.models.qwen35moe import Qwen35Moe
from swarmnode.models.sampling import SamplingParams
from swarmnode.models.state import SlotStates
from swarmnode.node.backbone_parts import BackboneOptions, assemble_backbone, loaded
from swarmnode.node.common import open_compute
from swarmnode.services.account import Account
from swarmnode.services.engine import DoneEvent, Engine, GenerateRequest, TokenEvent
from swarmnode.services.prefix_cache import common_prefix
from swarmnode.services.runners import Threads
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex

MAX_RATIO = 1.1
N_CTX = 4096
COPIES = 7
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    """What one prompt took."""

    prompt: list[int]
    answer: list[int]
    text: str
    cached: int
    first_token_s: float


@dataclass
class Talk:
    """An engine, and the way from messages to tokens."""

    engine: Engine
    template: ChatTemplate
    n_answer: int

    def encode(self, messages: Messages) -> list[int]:
        """As api/prompts."""
        return self.engine.tokenizer.encode_pieces(self.template.render(messages).pieces)

    async def ask(self, messages: Messages) -> Turn:
        """The greedy answer to the last message."""
        return await self.go_on(self.encode(messages), self.n_answer)

    async def go_on(self, prompt: list[int], n_tokens: int) -> Turn:
        """The greedy answer to a prompt."""
        ends = self.engine.tokenizer.end_ids
        job = GenerateRequest(prompt, n_tokens, SamplingParams(temperature=0.0), ends)
        answer: list[int] = []
        text = ""
        started_s, first_token_s = time.perf_counter(), 0.0
        async with aclosing(self.engine.generate(job)) as events:
            async for event in events:
                first_token_s = first_token_s or time.perf_counter() - started_s
                text += event.text
                if isinstance(event, TokenEvent):
                    answer.append(event.token)
        assert isinstance(event, DoneEvent)
        return Turn(prompt, answer, text, event.cached_tokens, first_token_s)

    async def by_hand(self, passes: Sequence[list[int]], n_tokens: int) -> list[int]:
        """The greedy answer after these passes, in an empty slot."""
        engine, account = self.engine, Account()
        await engine._parts.compute.run(lambda: engine.model.reset(0))
        for tokens in passes:
            logits = await engine.step(0, tokens, account)
        answer: list[int] = []
        while True:
            token = int(np.argmax(logits[-1]))
            if token in engine.tokenizer.end_ids:
                return answer
            answer.append(token)
            if len(answer) == n_tokens:
                return answer
            logits = await engine.step(0, [token], account)

    def forget(self) -> None:
        """Make the engine one that has seen nothing."""
        for slot in range(self.engine.model.n_slots):
            self.engine._prefixes.forget(slot)


def say(n_sentences: int, seed: int) -> dict[str, str]:
    """A message of the book's words."""
    words, rng = TEXT.split(), Random(seed)
    text = ". ".join(" ".join(rng.choices(words, k=12)) for _ in range(n_sentences))
    return {"role": "user", "content": text}


def conversation(talk: Talk, n_tokens: int) -> Messages:
    """System prompt, questions and answers of about so many tokens."""
    messages = [{**say(12, 0), "role": "system"}]
    while len(talk.encode([*messages, say(4, len(messages))])) < n_tokens:
        messages += [say(4, len(messages)), {**say(6, len(messages)), "role": "assistant"}]
    return [*messages, say(4, len(messages))]


async def compare(talk: Talk, n_tokens: int) -> bool:
    """Print every way to go on; whether the next turn ran few enough tokens."""
    messages = conversation(talk, n_tokens)
    one = await talk.ask(messages)
    told = {"role": "assistant", "content": one.text}
    thought = {"role": "assistant", "content": one.text[len(one.text) // 2 :]}
    ways = {
        "the next turn": [*messages, told, say(4, 100)],
        "its message edited": [*messages, told, say(4, 101)],
        "the same again": [*messages, told, say(4, 101)],
        "the answer rendered otherwise": [*messages, thought, say(4, 102)],
        "another system prompt": [{**say(12, 50), "role": "system"}, say(4, 103)],
        "the first system prompt again": [messages[0], say(4, 104)],
    }
    print(
        f"first turn: {len(one.prompt)} tokens in {1e3 * one.first_token_s:.0f} ms, answer {len(one.answer)}\n"
    )
    print(f"{'':32}{'prompt':>8}{'new':>6}{'run':>6}{'ratio':>7}{'ms':>7}{'fresh ms':>10}  same answer")
    seen = [[*one.prompt, *one.answer]]
    turns: list[tuple[str, int, Turn]] = []
    for name, way in ways.items():
        turn = await talk.ask(way)
        n_old = max(common_prefix(before, turn.prompt[:-1]) for before in seen)
        seen.append([*turn.prompt, *turn.answer])
        turns.append((name, len(turn.prompt) - n_old, turn))
    for (name, n_new, turn), way in zip(turns, ways.values(), strict=True):
        talk.forget()
        fresh = await talk.ask(way)
        n_run = len(turn.prompt) - turn.cached
        same = "yes" if fresh.answer == turn.answer else f"first {common_prefix(fresh.answer, turn.answer)}"
        print(
            f"{name:32}{len(turn.prompt):8}{n_new:6}{n_run:6}{n_run / n_new:7.2f}"
            f"{1e3 * turn.first_token_s:7.0f}{1e3 * fresh.first_token_s:10.0f}  {same}"
        )
    _, n_new, turn = turns[0]
    ratio = (len(turn.prompt) - turn.cached) / n_new
    verdict = "ok  " if ratio <= MAX_RATIO else "MISS"
    print(f"{verdict} the next turn runs {ratio:.2f} times its new tokens, at most {MAX_RATIO} wanted")
    return ratio <= MAX_RATIO


async def agree(talk: Talk, n_texts: int, n_tokens: int) -> bool:
    """Print how many answers are the same, run anew and by hand; whether the latter all are."""
    firsts, n_exact = [], 0
    for seed in range(n_texts):
        encode = talk.engine.tokenizer.encode
        opening = encode(f"{TEXT} {say(12, seed)['content']}")
        talk.forget()
        answer = (await talk.go_on(opening, n_tokens)).answer
        prompt = [*opening, *answer, *encode(f" {say(1, seed)['content']}")]
        turn = await talk.go_on(prompt, n_tokens)
        talk.forget()
        firsts.append(common_prefix(turn.answer, (await talk.go_on(prompt, n_tokens)).answer))
        assert len(opening) <= turn.cached, "it did not go on"
        single = [[token] for token in prompt[len(opening) : turn.cached]]
        n_exact += turn.answer == await talk.by_hand([opening, *single, prompt[turn.cached :]], n_tokens)
    n_same = sum(first == n_tokens for first in firsts)
    verdict = "ok  " if n_exact == n_texts else "MISS"
    print(
        f"{verdict} agreement of {n_texts} answers of {n_tokens} tokens: {n_same} as when run anew (the others for the "
        f"first {[first for first in firsts if first < n_tokens]} tokens), {n_exact} as the same passes by hand"
    )
    return n_exact == n_texts


def checkpoint_costs(index: ModelIndex, device: Device, own_bytes: int) -> str:
    """Bytes and milliseconds of a checkpoint with the recurrent layers of a 122B model."""
    architecture = Qwen35Moe()
    real = with_real_states(architecture.read_hparams(index))
    states = SlotStates(device, architecture, real, n_slots=1, n_ctx=256, n_ubatch=1)
    try:
        made_ms, restored_ms = [], []
        for _ in range(COPIES):
            started_s = time.perf_counter()
            copies = states.read_recurrent(0)
            copied_s = time.perf_counter()
            states.write_recurrent(0, copies)
            made_ms.append(1e3 * (copied_s - started_s))
            restored_ms.append(1e3 * (time.perf_counter() - copied_s))
        budget = EngineConfig().checkpoint_bytes
        return (
            f"one checkpoint: {own_bytes / 1e6:.1f} MB here; at the real sizes ({sum(real.recurrent)} such layers) "
            f"{states.recurrent_bytes / 1e6:.1f} MB, {statistics.median(made_ms):.0f} ms to make (the first one "
            f"{made_ms[0]:.0f} ms: new memory), {statistics.median(restored_ms):.0f} ms to restore; "
            f"{budget // states.recurrent_bytes} of them in {budget / 1e6:.0f} MB, the bound of all slots together"
        )
    finally:
        states.close()


async def measure(options: argparse.Namespace) -> bool:
    """Load the model, print everything; whether the bound is kept."""
    base = Config()
    config = replace(base, compute=replace(base.compute, n_threads=options.threads))
    backbone_options = BackboneOptions(
        folders=Folders.under(Path("/nonexistent")),
        network="public",
        listen=("127.0.0.1", 0),
        config=config,
        n_ctx=N_CTX,
    )
    with ModelIndex.open(options.model or bundled_model()) as index:
        async with (
            open_compute(backbone_options) as (gate, device),
            loaded(backbone_options, index, device, gate) as (model, bank),
        ):
            parts = assemble_backbone(
                backbone_options, index, build_manifest(index), model, bank, gate, Threads()
            )
            engine = parts.engine
            template = template_of(index.metadata, engine.tokenizer)
            assert template is not None, "the model has no chat template"
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
                good = await compare(Talk(engine, template, options.answer), options.tokens)
                good &= await agree(Talk(engine, template, options.answer), options.texts, 40)
                nursery.cancel_scope.cancel()
            print(await gate.run(partial(checkpoint_costs, index, device, model.checkpoint_bytes)))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--texts", type=int, default=12, help="texts of which the answers are compared")
    parser.add_argument("--threads", type=int, default=0)
    return 0 if trio.run(measure, parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
