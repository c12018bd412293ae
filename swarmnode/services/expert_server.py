"""The worker's one job: a pure function `(layer, rows, expert ids, weights) -> rows` over whoever is connected.

Nothing of a session is kept: the same request may be sent again, to anyone, at any time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import ServeConfig
from swarmnode.counts import counted
from swarmnode.errors import RequestRefusedError
from swarmnode.net.peer import Body, Handler, Peer, asked_in
from swarmnode.services.expert_work import ExpertBatches, ExpertWork, Reply
from swarmnode.services.job_queue import JobQueue
from swarmnode.services.runners import Runner
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.messages import Experts, Message, Rows
from swarmnode.wire.tensors import parse_experts_body_untrusted

log = logging.getLogger(__name__)


@dataclass
class Served:
    """What this worker has computed since it started."""

    requests: int = 0
    rows: int = 0
    pairs: int = 0
    refused: int = 0
    bytes_in: int = 0
    """Of requests and replies, without what the wire adds."""
    bytes_out: int = 0
    rows_by_layer: Counter[int] = field(default_factory=Counter)
    compute_s: float = 0.0
    """On the compute thread, without the time in the queue, with encoding the replies. A batch's time counts once."""

    @property
    def tokens(self) -> int:
        """Tokens that were helped with, at least: a token's row comes once a layer, from each backbone."""
        return max(self.rows_by_layer.values(), default=0)


class ExpertServer:
    """Answers `experts` requests from the bank. One model at a time."""

    def __init__(
        self,
        model_id: bytes,
        n_embd: int,
        n_expert: int,
        bank: ExpertBank,
        compute: Runner,
        config: ServeConfig,
        max_pairs: int,
    ) -> None:
        """Serves the experts of `bank` for that model; a request has at most `max_pairs` pairs, and as many rows."""
        self._model_id = model_id
        self._n_embd = n_embd
        self._n_expert = n_expert
        self._bank = bank
        self.max_pairs = max_pairs
        self._queue: JobQueue[ExpertWork, Reply] = JobQueue(compute, ExpertBatches(bank), config)
        self.served = Served()
        self._n_asked = 0
        self._idle = trio.Event()
        self._idle.set()

    @property
    def queued_pairs(self) -> int:
        """(row, expert) pairs that wait or are being computed."""
        return self._queue.queued_pairs

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """For the peer: the message types this service answers."""
        return {Experts: self._counted}

    async def _counted(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        self._begin()
        try:
            return await self._experts(peer, message, body)
        except RequestRefusedError:
            self.served.refused += 1
            raise
        finally:
            self._n_asked -= 1
            if self._n_asked == 0:
                self._idle.set()

    def _begin(self) -> None:
        self._n_asked += 1
        if self._idle.is_set():
            self._idle = trio.Event()

    async def drained(self) -> None:
        """Wait until no request waits or is being computed."""
        await self._idle.wait()

    async def _experts(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        assert isinstance(message, Experts)
        self._check_header(message)
        is_urgent = asked_in.get() <= TrafficClass.DECODE
        # Again in `run`, but a body is not parsed in vain.
        self._queue.check_room(peer.node_id, message.n_pairs, is_urgent=is_urgent)
        rows, pair_row, pair_expert, weights = parse_experts_body_untrusted(
            message, body, self._n_embd, self._n_expert
        )
        self._check_held(message.layer, pair_expert)

        encoding = message.reply_encoding
        work = ExpertWork(message.layer, rows, pair_row, pair_expert, weights, encoding, is_urgent)
        computed = await self._queue.run(peer.node_id, work)
        n_rows, reply_body = computed.result
        self.served.requests += 1
        self.served.rows += message.n_rows
        self.served.pairs += message.n_pairs
        self.served.compute_s += computed.own_s
        self.served.rows_by_layer[message.layer] += message.n_rows
        self.served.bytes_in += len(body)
        self.served.bytes_out += sum(len(part) for part in reply_body)
        # The asker can only set this against its round trip, and there the whole batch is between asking and answer.
        compute_us = int(computed.batch_s * 1e6)
        reply = Rows(encoding=message.reply_encoding, n_rows=n_rows, compute_us=compute_us)
        return reply, reply_body

    def _check_header(self, message: Experts) -> None:
        """Refuse before the body is looked at: another model, more than was announced."""
        if message.model != self._model_id:
            raise RequestRefusedError("wrong_model", "this worker holds experts of another model")
        # Every row that is sent belongs to a pair, so a good request has no more rows than pairs.
        if max(message.n_pairs, message.n_rows) > self.max_pairs:
            raise RequestRefusedError(
                "too_many_pairs",
                f"{counted(message.n_pairs, 'pair')} of {counted(message.n_rows, 'row')} in one request, "
                f"at most {self.max_pairs}",
            )

    def _check_held(self, layer: int, pair_expert: npt.NDArray[np.int32]) -> None:
        held = self._bank.holdings.get(layer, frozenset())
        missing = sorted(set(pair_expert.tolist()) - held)
        if missing:
            raise RequestRefusedError("not_owner", f"layer {layer}: experts {missing[:8]} are not held here")
