"""A worker on Vulkan beside a worker on the CPU, real processes: the answers are those without workers."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from swarmnode.compute.oracle import row_cosines
from swarmnode.config import Config, DispatchConfig
from swarmnode.models.sampling import SamplingParams
from swarmnode.services.account import Account
from swarmnode.services.engine import DoneEvent, GenerateRequest, TokenEvent
from tests.process.kit import RealSwarm, open_real_swarm
from tests.process.test_workers import TEXT, logits

from .kit import clear_prompts, vulkan_name

pytestmark = pytest.mark.vulkan

START_TIMEOUT_S = 300.0
"""The worker's self-test compiles its kernels, and the machine may be busy."""
PATIENT = Config(dispatch=DispatchConfig(deadline_s=30.0, max_deadline_s=60.0, probe_timeout_s=30.0))


async def greedy(swarm: RealSwarm, prompt: list[int], n_tokens: int) -> tuple[list[int], Account]:
    request = GenerateRequest(prompt, n_tokens, SamplingParams(temperature=0.0))
    async with aclosing(swarm.backbone.engine.generate(request)) as events:
        seen = [event async for event in events]
    (done,) = [event for event in seen if isinstance(event, DoneEvent)]
    return [event.token for event in seen if isinstance(event, TokenEvent)], done.account


@pytest.mark.real_time
async def test_greedy_answers_as_on_the_cpu_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = clear_prompts(max_tokens=32)
    async with open_real_swarm(tmp_path, config=PATIENT, device_name="CPU") as swarm:
        swarm.start_timeout_s = START_TIMEOUT_S
        tokens = swarm.backbone.engine.tokenizer.encode(TEXT)
        alone = [await greedy(swarm, *prompt) for prompt in prompts]
        alone_logits, _ = await logits(swarm, tokens)
        for name, arguments in (("gpu", [vulkan_name(), "--max-rows", "8"]), ("cpu", ["CPU"])):
            worker = await swarm.join("4MB", name, "--device", *arguments)
            with capsys.disabled():
                print(f"\n{name}: " + "; ".join(worker.lines[-2:]))
        members = swarm.backbone.members.workers
        helped = [await greedy(swarm, *prompt) for prompt in prompts]
        helped_logits, _ = await logits(swarm, tokens)
    shares = [[account.worker(member.node_id.short) for _, account in helped] for member in members]
    pairs = [sum(share.pairs for share in worker) for worker in shares]
    cosines = row_cosines(helped_logits, alone_logits)
    n_tokens = sum(n_clear for _, n_clear in prompts)
    with capsys.disabled():
        print(f"{n_tokens} greedy tokens, {pairs} pairs, least cosine of logits {cosines.min():.6f}")
    assert n_tokens >= 24
    assert [tokens for tokens, _ in helped] == [tokens for tokens, _ in alone]
    assert [member.max_rows for member in members] == [8, 512]
    assert min(pairs) > 0
    assert not any(share.late for worker in shares for share in worker)
    assert np.median(cosines) >= 0.999
    assert cosines.min() >= 0.9, "where the gate's choice is close, another expert may be taken"
