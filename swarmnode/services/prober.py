"""Asks each worker to compute one row now and then, and checks the answer against the local replica.

A probe is real work: it proves that the worker computes, holds what it claims, and computes it right. It decides
whether a worker gets rows at all (services/members.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.errors import BadReplyError, RemoteError
from swarmnode.services.forward import cosine
from swarmnode.services.members import Members, Standing, Worker
from swarmnode.services.runners import Runner
from swarmnode.wire.messages import Experts, Rows
from swarmnode.wire.tensors import encode_experts_body, parse_rows_body_untrusted

log = logging.getLogger(__name__)

TICK_S = 1.0


@dataclass
class Prober:
    """Watches every worker that is handed to `watch`, until it disconnects or announces anew."""

    model_id: bytes
    n_embd: int
    bank: ExpertBank
    compute: Runner
    members: Members
    config: DispatchConfig
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def __post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Worker](1024)

    def watch(self, worker: Worker) -> None:
        """Start probing a worker that has just announced. Called from handlers; never blocks."""
        try:
            self._send.send_nowait(worker)
        except trio.WouldBlock:
            log.warning("too many announcements at once: %s is not probed", worker.node_id.short)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            async for worker in self._receive:
                nursery.start_soon(self._watch, worker)

    async def _watch(self, worker: Worker) -> None:
        wait_s = TICK_S
        while worker in self.members.workers and worker.standing is not Standing.QUARANTINED:
            if worker.standing is Standing.SERVING:
                wait_s = TICK_S
                idle_s = trio.current_time() - worker.answered_at_s
                if idle_s >= self.config.probe_interval_s:
                    await self._probe(worker)
            elif not await self._probe(worker):
                wait_s = min(2 * wait_s, self.config.probe_backoff_max_s)
            await trio.sleep(wait_s)

    async def _probe(self, worker: Worker) -> bool:
        """One row through one expert the worker claims; True when the answer came and is right."""
        layer = int(self.rng.choice(sorted(worker.holdings)))
        expert = int(self.rng.choice(sorted(worker.holdings[layer])))
        row = self.rng.standard_normal((1, self.n_embd), np.float32)
        pair_row, pair_expert = np.zeros(1, np.int32), np.full(1, expert, np.int32)
        message = Experts(
            model=self.model_id, layer=layer, form="experts", encoding="f32", n_rows=1, n_pairs=1
        )
        body = encode_experts_body(row, pair_row, pair_expert, None, "f32")
        try:
            with trio.fail_after(self.config.probe_timeout_s):
                reply, reply_body = await worker.peer.request(message, body)
            if not isinstance(reply, Rows):
                raise BadReplyError(f"asked for rows, got {type(reply).__name__}")
            values = parse_rows_body_untrusted(reply, reply_body, 1, self.n_embd)
        except trio.TooSlowError:
            self.members.missed(worker, "no answer to a probe")
            return False
        except BadReplyError as error:
            self.members.quarantine(worker, str(error))
            return False
        except RemoteError as error:
            self.members.missed(worker, str(error))
            return False
        expected = await self.compute.run(lambda: self.bank.experts(layer, row, pair_row, pair_expert))
        if cosine(values[0], expected[0]) < self.config.probe_min_cosine:
            self.members.quarantine(worker, f"wrong numbers for layer {layer}, expert {expert}")
            return False
        self.members.probe_passed(worker)
        return True
