"""Prefill and decode on this machine alone, and the passes that the swarm's figures are of as well."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio

from swarmnode.cli.bench_figures import Plan, Sample, TokenFigure, token_figure
from swarmnode.compute.bank import ExpertBank
from swarmnode.config import Config
from swarmnode.models.base import Model
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.services.account import Account
from swarmnode.services.engine import Engine
from swarmnode.services.members import Members
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.runners import ComputeGate, Threads
from swarmnode.weights.index import ModelIndex


@dataclass(frozen=True)
class Bench:
    """A loaded model, with an engine that never asks a worker."""

    index: ModelIndex
    model: Model
    bank: ExpertBank
    gate: ComputeGate
    alone: Engine
    prompts: tuple[list[int], ...]
    """One for each sequence that ever runs at once."""
    n_tokens: int
    """That are decoded."""
    config: Config

    async def prefill(self, engine: Engine, slot: int, account: Account) -> int:
        """Run the prompt of a slot from its beginning; returns the first token of the answer."""
        await self.gate.run(partial(self.model.reset, slot))
        prompt, n_chunk = self.prompts[slot], self.config.models.n_ubatch
        for start in range(0, len(prompt), n_chunk):
            logits = await engine.step(slot, prompt[start : start + n_chunk], account)
        return int(np.argmax(logits[-1]))

    async def prefill_sample(self, engine: Engine) -> Sample:
        """One prompt, timed."""
        account = Account()
        started_s = time.perf_counter()
        await self.prefill(engine, 0, account)
        return Sample(time.perf_counter() - started_s, len(self.prompts[0]), account)

    async def decode_sample(self, engine: Engine, sequences: int) -> Sample:
        """So many sequences at once, greedy; their prompts are run before the clock starts."""
        answers = [[await self.prefill(engine, slot, Account())] for slot in range(sequences)]
        account = Account()
        started_s = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for slot, answer in enumerate(answers):
                nursery.start_soon(self._decode, engine, slot, answer, account)
        seconds = time.perf_counter() - started_s
        return Sample(seconds, sequences * self.n_tokens, account, tuple(map(tuple, answers)))

    async def _decode(self, engine: Engine, slot: int, answer: list[int], account: Account) -> None:
        with engine.stepping(slot) as stepping:
            for _ in range(self.n_tokens):
                logits = await stepping.run(answer[-1:], account)
                answer.append(int(np.argmax(logits[-1])))


@asynccontextmanager
async def open_bench(
    index: ModelIndex,
    model: Model,
    bank: ExpertBank,
    gate: ComputeGate,
    plan: Plan,
) -> AsyncIterator[Bench]:
    """With an engine that runs until the block ends.

    Prompts are random tokens, the same in every run: what they say does not matter, nothing samples them."""
    config = plan.config
    rng = np.random.default_rng(0)
    prompts = tuple(
        rng.integers(model.n_vocab, size=plan.prompt_tokens).tolist() for _ in range(model.n_slots)
    )
    members = Members(model.n_expert, config.dispatch, trio.current_time)
    remote = RemoteExperts(bytes(32), bank, gate, members, config.dispatch, WireForm())
    alone = Engine(
        model,
        Tokenizer(index.metadata),
        bank,
        gate,
        members,
        remote,
        n_slots=model.n_slots,
        chunk_tokens=config.models.n_ubatch,
        threads=Threads(),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(alone.run)
        yield Bench(index, model, bank, gate, alone, prompts, plan.decode_tokens, config)
        nursery.cancel_scope.cancel()


async def measure_prefill(bench: Bench, rounds: int) -> list[TokenFigure]:
    """Prefill of one prompt without workers."""
    await bench.prefill_sample(bench.alone)  # builds graphs, pages the file in
    samples = [await bench.prefill_sample(bench.alone) for _ in range(rounds)]
    return [token_figure(samples, bench.model.n_layer)]


async def measure_decode(bench: Bench, sequences: Sequence[int], rounds: int) -> list[TokenFigure]:
    """Decode of so many sequences at once without workers."""
    samples: dict[int, list[Sample]] = {count: [] for count in sequences}
    for count in sequences:
        await bench.decode_sample(bench.alone, count)
    for _ in range(rounds):
        for count, taken in samples.items():
            taken.append(await bench.decode_sample(bench.alone, count))
    n_layer = bench.model.n_layer
    return [token_figure(taken, n_layer, sequences=count) for count, taken in samples.items()]
