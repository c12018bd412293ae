"""The worker's one job: a pure function `(layer, rows, expert ids, weights) -> rows` over whoever is connected.

Nothing of a session is kept: the same request may be sent again, to anyone, at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import ServeConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.services.runners import Runner
from swarmnode.wire.messages import Experts, Message, Rows
from swarmnode.wire.tensors import encode_rows_body, parse_experts_body_untrusted

log = logging.getLogger(__name__)

F32: TypeAlias = npt.NDArray[np.float32]


@dataclass
class Served:
    """What this worker has computed since it started."""

    requests: int = 0
    rows: int = 0
    pairs: int = 0
    refused: int = 0
    compute_s: float = 0.0


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
    ) -> None:
        self._model_id = model_id
        self._n_embd = n_embd
        self._n_expert = n_expert
        self._bank = bank
        self._compute = compute
        self._config = config
        self._queued_pairs = 0
        self.served = Served()

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """For the peer: the message types this service answers."""
        return {Experts: self._experts}

    async def _experts(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        assert isinstance(message, Experts)
        self._admit(message)
        rows, pair_row, pair_expert, weights = parse_experts_body_untrusted(
            message, body, self._n_embd, self._n_expert
        )
        self._check_held(message.layer, pair_expert)

        def compute() -> F32:
            if weights is None:
                return self._bank.experts(message.layer, rows, pair_row, pair_expert)
            return self._bank.partial(message.layer, rows, pair_row, pair_expert, weights)

        self._queued_pairs += message.n_pairs
        started_s = trio.current_time()
        try:
            values = await self._compute.run(compute)
        finally:
            self._queued_pairs -= message.n_pairs
        spent_s = trio.current_time() - started_s
        self.served.requests += 1
        self.served.rows += message.n_rows
        self.served.pairs += message.n_pairs
        self.served.compute_s += spent_s
        reply = Rows(encoding=message.encoding, n_rows=len(values), compute_us=int(spent_s * 1e6))
        return reply, encode_rows_body(values, message.encoding)

    def _admit(self, message: Experts) -> None:
        """Refuse before any work: another model, more pairs than the queue takes."""
        if message.model != self._model_id:
            self._refuse("wrong_model", "this worker holds experts of another model")
        if message.n_pairs > self._bank.max_rows:
            self._refuse(
                "too_many_pairs", f"{message.n_pairs} pairs in one request, at most {self._bank.max_rows}"
            )
        if self._queued_pairs + message.n_pairs > self._config.max_queued_pairs:
            self._refuse("busy", f"{self._queued_pairs} pairs are waiting", self._config.retry_after_ms)

    def _check_held(self, layer: int, pair_expert: npt.NDArray[np.int32]) -> None:
        held = self._bank.holdings.get(layer, frozenset())
        missing = sorted(set(pair_expert.tolist()) - held)
        if missing:
            self._refuse("not_owner", f"layer {layer}: experts {missing[:8]} are not held here")

    def _refuse(self, code: str, reason: str, retry_after_ms: int = 0) -> None:
        self.served.refused += 1
        raise RequestRefusedError(code, reason, retry_after_ms)
