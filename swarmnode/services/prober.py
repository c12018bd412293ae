"""Asks each worker to compute one row now and then, and checks the answer against the local replica.

A probe is real work: it proves that the worker computes, holds what it claims, and computes it right. It decides
whether a worker gets rows at all, and for which of its experts (services/members.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.errors import BadReplyError, RemoteError, RequestRefusedError
from swarmnode.identity import NodeId
from swarmnode.services.forward import rows_agree
from swarmnode.services.members import HARMLESS_REFUSALS, Members, Standing, Worker
from swarmnode.services.runners import Runner
from swarmnode.weights.slices import ranges_of
from swarmnode.wire.messages import Experts, Rows
from swarmnode.wire.tensors import check_reply_encoding, encode_experts_body, parse_rows_body_untrusted

log = logging.getLogger(__name__)

MAX_WATCHED = 4096
"""Nodes watched at a time; connections are capped far below (WireConfig.max_peers)."""


@dataclass
class Prober:
    """Watches every node that is handed to `watch`, until it has disconnected."""

    model_id: bytes
    n_embd: int
    bank: ExpertBank
    compute: Runner
    members: Members
    config: DispatchConfig
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def __post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[NodeId](MAX_WATCHED)
        self.on_answer: Callable[[Worker, float], None] | None = None
        """Told of every right answer, and how many seconds it took."""
        self._watched: dict[NodeId, trio.Event] = {}
        """Set to wake the watcher of a node before its pause is over."""

    def watch(self, worker: Worker) -> None:
        """A worker has announced: probe it soon. Called from handlers; never blocks.

        One watcher a node, however often it announces, and `probe_tick_s` between two probes. A node whose probes fail
        cannot shorten its pause this way, nor by leaving: `Members` remembers.
        """
        if worker.node_id in self._watched:
            if worker.standing in (Standing.ATTACHED, Standing.SERVING) and worker.unproven:
                self._watched[worker.node_id].set()
        elif len(self._watched) < MAX_WATCHED:
            self._watched[worker.node_id] = trio.Event()
            self._send.send_nowait(worker.node_id)
        else:
            log.warning("too many workers: %s is not probed", worker.node_id.short)
            worker.peer.close("not_wanted", "too many workers")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            async for node_id in self._receive:
                nursery.start_soon(self._watch, node_id)

    async def _watch(self, node_id: NodeId) -> None:
        pause_s = self.config.probe_tick_s
        try:
            while (worker := self.members.get(node_id)) is not None:
                if await self._look(worker):
                    pause_s = self.config.probe_tick_s
                else:
                    pause_s = min(2 * pause_s, self.config.probe_backoff_max_s)
                await trio.sleep(self.config.probe_tick_s)
                with trio.move_on_after(pause_s - self.config.probe_tick_s):
                    await self._watched[node_id].wait()
                self._watched[node_id] = trio.Event()
        finally:
            del self._watched[node_id]

    async def _look(self, worker: Worker) -> bool:
        """Probe the worker if it is due; False if that failed. What it makes us raise ends its connection only."""
        idle_s = trio.current_time() - worker.answered_at_s
        is_due = idle_s >= self.config.probe_interval_s or worker.standing is not Standing.SERVING
        if not is_due and not worker.unproven:
            return True
        if not self.members.may_probe(worker):
            return not self.members.is_quarantined(worker)
        try:
            return await self._probe(worker)
        except Exception:
            log.exception("probing %s failed", worker.node_id.short)
            worker.peer.close("internal")
            return False

    async def _probe(self, worker: Worker) -> bool:
        """One row through one expert the worker claims; True when the answer came and is right.

        Out of all that is unproven one expert speaks for the rest. A probe for each would cost the backbone the
        reading of every expert that is claimed; what a worker holds was hashed and tested there, and audits go on.
        """
        ranges = ranges_of(self.members.probe_begins(worker))
        item = ranges[int(self.rng.integers(len(ranges)))]
        expert = int(self.rng.integers(item.first, item.stop))
        row = self.rng.standard_normal((1, self.n_embd), np.float32)
        pair_row, pair_expert = np.zeros(1, np.int32), np.full(1, expert, np.int32)
        message = Experts(
            model=self.model_id, layer=item.layer, form="experts", encoding="f32", n_rows=1, n_pairs=1
        )
        body = encode_experts_body(row, pair_row, pair_expert, None, "f32")
        asked_s = trio.current_time()
        try:
            with trio.fail_after(self.config.probe_timeout_s):
                reply, reply_body = await worker.peer.request(message, body)
            if not isinstance(reply, Rows):
                raise BadReplyError(f"asked for rows, got {type(reply).__name__}")
            check_reply_encoding(reply, message.encoding)
            values = parse_rows_body_untrusted(reply, reply_body, 1, self.n_embd)
        except trio.TooSlowError:
            self.members.probe_failed(worker, "no answer to a probe")
            return False
        except BadReplyError as error:
            self.members.quarantine(worker, str(error))
            return False
        except RequestRefusedError as refusal:
            self.members.probe_refused(worker, refusal)
            return refusal.code in HARMLESS_REFUSALS
        except RemoteError as error:
            self.members.probe_failed(worker, str(error))
            return False
        took_s = trio.current_time() - asked_s
        self.members.answered(worker)  # before the comparison, which waits for our own compute thread
        expected = await self.compute.run(lambda: self.bank.experts(item.layer, row, pair_row, pair_expert))
        if not rows_agree(expected[0], values[0], self.config.max_row_error):
            self.members.quarantine(worker, f"wrong numbers for layer {item.layer}, expert {expert}")
            return False
        self.members.probe_passed(worker)
        if self.on_answer is not None:
            self.on_answer(worker, took_s)
        return True
