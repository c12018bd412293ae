"""The backbone's dispatch: one layer's rows out to workers, its own share meanwhile, everything combined.

Every wait has a deadline; whatever has not come by then is computed by the local replica, so a worker can be late,
lost or lying and the layer is still right. A worker that failed once is out of routing before the next layer. What a
peer has no room for now, or would need too many requests for, is not sent at all.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.errors import BadReplyError, RemoteError, UsageError
from swarmnode.models.base import ExpertCall
from swarmnode.net.peer import Body
from swarmnode.schedule.cost import CostModel
from swarmnode.schedule.dispatch import Share, split_share
from swarmnode.schedule.sending import SendPolicy, send_always
from swarmnode.services.account import StepAccount
from swarmnode.services.errands import Errand, Patience, Piece, Request
from swarmnode.services.forward import RemoteLayer, share_rows, share_weights
from swarmnode.services.hedges import Hedges
from swarmnode.services.layer_answers import LayerAnswers, Sent
from swarmnode.services.magnitudes import Magnitudes
from swarmnode.services.members import Members, Worker
from swarmnode.services.pending_layer import PendingLayer
from swarmnode.services.runners import Runner
from swarmnode.services.verdicts import Verdicts
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.encodings import ROW_ENCODINGS, row_bytes, spoken_encoding
from swarmnode.wire.messages import Experts, Rows
from swarmnode.wire.tensors import (
    check_reply_encoding,
    encode_pairs,
    encode_rows_or_f32,
    parse_rows_body_untrusted,
)

F32: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class WireForm:
    """What travels. The default halves the bytes and lets each worker sum its own pairs; `EXACT` is bit-exact."""

    form: str = "partial"
    encoding: str = "f16"
    """Of the rows sent; the replies' follows from it (`ROW_ENCODINGS`)."""

    def check_width(self, n_embd: int) -> None:
        """UsageError if rows of this width are no whole number of the encoding's items."""
        multiple = ROW_ENCODINGS[self.encoding].item_numbers
        if n_embd % multiple:
            raise UsageError(
                f"{self.encoding} rows need an n_embd that is a multiple of {multiple}, and this model's is {n_embd}: "
                f"start without --{self.encoding}"
            )

    @property
    def exact(self) -> bool:
        """True when the reply is one row a pair, so that the sum is done here in k order."""
        return self.form == "experts"


EXACT = WireForm("experts", "f32")


class _RowBytes:
    """The rows of a layer as they travel. A single row is the same in all shares, and is encoded once."""

    def __init__(self, call: ExpertCall, traffic_class: TrafficClass) -> None:
        self.call = call
        self.traffic_class = traffic_class
        self._single: dict[tuple[str, tuple[str, ...]], tuple[str, memoryview]] = {}

    def encoded(self, share: Share, wanted: str, spoken: tuple[str, ...]) -> tuple[str, memoryview]:
        """(encoding, bytes) of a share's rows for a peer that reads `spoken`: the wanted one or the next."""
        if len(self.call.rows) > 1:
            return _encoded(share_rows(self.call, share), wanted, spoken)
        if (wanted, spoken) not in self._single:
            self._single[wanted, spoken] = _encoded(self.call.rows, wanted, spoken)
        return self._single[wanted, spoken]


def _encoded(rows: F32, wanted: str, spoken: tuple[str, ...]) -> tuple[str, memoryview]:
    return encode_rows_or_f32(rows, spoken_encoding(wanted, spoken), spoken)


class RemoteExperts:
    """Computes one `RemoteLayer` with the help of the workers it names."""

    def __init__(
        self,
        model_id: bytes,
        bank: ExpertBank,
        compute: Runner,
        members: Members,
        config: DispatchConfig,
        form: WireForm,
        rng: random.Random | None = None,
        policy: SendPolicy | None = None,
    ) -> None:
        self._model_id = model_id
        self._bank = bank
        self._compute = compute
        self._members = members
        self._config = config
        self._form = form
        self._rng = rng or random.Random()
        self.policy: SendPolicy = policy or send_always(config, time.perf_counter)
        self._magnitudes = Magnitudes()
        self._met: tuple[tuple[Worker, ...], CostModel] = ((), self.policy.cost)

    async def layer(
        self, layer: RemoteLayer, workers: tuple[Worker, ...], account: StepAccount
    ) -> PendingLayer:
        """Send the workers' shares, compute the own one meanwhile, and wait for the answers or their deadlines."""
        call, plan = layer.call, layer.plan
        pending = PendingLayer(
            layer,
            self._bank,
            self._members,
            account,
            self.policy,
            self._magnitudes,
            exact=self._form.exact,
            max_row_error=self._config.max_row_error,
        )
        sent = Sent(pending, account, Verdicts(self._members), trio.current_time())
        rows = _RowBytes(call, layer.traffic_class)
        n_pieces = self._config.pieces_each(len(plan.remote))
        hedges = Hedges(layer, workers, self._members, self.policy, self._config)
        answers = self._answers(sent, rows, hedges)
        try:
            for index, share in plan.remote:
                self._send(sent, rows, workers[index], share, n_pieces)
            own = pending.unsent if plan.local is None else [plan.local, *pending.unsent]
            if own:
                await self._compute.run(partial(pending.add_own, own))
            waiting_from_s = trio.current_time()
            await answers.wait()
            sent.verdicts.end()
        finally:
            sent.end()
        account.wait_s += trio.current_time() - waiting_from_s
        return pending

    def meet(self, workers: tuple[Worker, ...]) -> None:
        """Before a pass is planned: what their connections say of workers of which nothing else may be known."""
        cost = self.policy.cost
        if self._met[0] is workers and self._met[1] is cost:
            return
        self._met = (workers, cost)
        for worker in workers:
            known = cost.worker(worker.node_id)
            known.rtt_s = worker.peer.rtt_s
            known.max_requests = worker.peer.settings.max_requests

    def probed(self, worker: Worker, seconds: float) -> None:
        """A worker has answered a probe, in so many seconds."""
        cost = self.policy.cost
        cost.worker(worker.node_id).probed(seconds, cost.now())

    def _answers(self, sent: Sent, rows: _RowBytes, hedges: Hedges) -> LayerAnswers:
        return LayerAnswers(
            sent,
            hedges,
            self.policy.cost,
            self._config,
            self._rng,
            partial(self._ask, sent, rows),
            partial(self._errand, sent, is_hedge=True),
            partial(self._values, rows.call),
        )

    def _send(self, sent: Sent, rows: _RowBytes, worker: Worker, share: Share, max_pieces: int) -> None:
        """Send a worker's share now, in pieces that it takes. What it has no room for is left to the local replica.

        Each piece has the deadline of all of them.
        """
        unsent = sent.pending.unsent
        pieces, rest = split_share(
            share, rows.call.ids, worker.max_rows, min(max_pieces, self._room(sent, worker))
        )
        if rest is not None:
            unsent.append(rest)
        if not pieces:
            return
        errand = self._errand(sent, worker, self._patience(sent, rows.call, pieces, self._spoken(worker)))
        sent.shares.append(errand)
        for at, piece in enumerate(pieces):
            if not self._ask(sent, rows, errand, Piece(piece)):
                unsent += pieces[at:]
                break

    def _errand(self, sent: Sent, worker: Worker, patience: Patience, *, is_hedge: bool = False) -> Errand:
        """Nothing is asked for yet."""
        cost = self.policy.cost.worker(worker.node_id)
        return Errand(worker, cost, sent.account, trio.current_time(), patience, is_hedge)

    def _room(self, sent: Sent, worker: Worker) -> int:
        """How many requests the worker takes now; 0 if it is gone, which is held against it."""
        try:
            return worker.peer.room()
        except RemoteError as error:
            self._unsendable(sent, worker, error)
            return 0

    def _unsendable(self, sent: Sent, worker: Worker, error: Exception) -> None:
        sent.verdicts.missed(worker, str(error))
        sent.account.worker(worker.node_id.short).late += 1

    def _spoken(self, worker: Worker) -> str:
        """The encoding of rows sent to this worker, where it can hold them."""
        return spoken_encoding(self._form.encoding, worker.peer.settings.encodings)

    def _patience(self, sent: Sent, call: ExpertCall, pieces: list[Share], encoding: str) -> Patience:
        n_embd, n_pairs = call.rows.shape[1], sum(len(piece.flat) for piece in pieces)
        n_rows = sum(len(piece.rows) for piece in pieces)
        reply_rows = n_pairs if self._form.exact else n_rows
        n_bytes = n_rows * row_bytes(encoding, n_embd)
        n_bytes += reply_rows * row_bytes(ROW_ENCODINGS[encoding].reply, n_embd)
        deadline_s = self._config.share_deadline_s(n_pairs, n_bytes)
        return Patience(deadline_s, sent.started_s + deadline_s, self._config.share_work_s(n_pairs, n_bytes))

    def _ask(self, sent: Sent, rows: _RowBytes, errand: Errand, piece: Piece) -> bool:
        """Send a piece now; it then counts as in flight. False if that cannot be, found out before it is encoded: there
        is no room, or the worker is gone.
        """
        worker = errand.worker
        piece.asked.add(worker)
        if not self._room(sent, worker):
            return False
        try:
            message, body = self._message(rows, worker, piece.share)
            asked = worker.peer.begin(message, body, traffic_class=rows.traffic_class)
        except (
            RemoteError,
            UsageError,
        ) as error:  # UsageError: the peer's caps do not let the request through
            self._unsendable(sent, worker, error)
            return False
        assert asked is not None  # there is room, and nothing ran in between
        errand.entry.bytes_out += sum(len(part) for part in body)
        sent.begin(errand, piece, Request(errand, piece, asked, message.encoding))
        return True

    async def _values(self, call: ExpertCall, request: Request) -> F32:
        """The rows of a reply, which is here. Raises RemoteError."""
        reply, reply_body = await request.asked.reply()
        if not isinstance(reply, Rows):
            raise BadReplyError(f"asked for rows, got {type(reply).__name__}")
        check_reply_encoding(reply, request.sent)
        share = request.piece.share
        expected = len(share.flat) if self._form.exact else len(share.rows)
        values = parse_rows_body_untrusted(reply, reply_body, expected, call.rows.shape[1])
        request.errand.entry.bytes_in += len(reply_body)
        errand = request.errand
        took_s = trio.current_time() - errand.begun_s
        errand.cost.computed(len(share.flat), 1e-6 * reply.compute_us, took_s, self.policy.cost.now())
        return values

    def _message(self, rows: _RowBytes, worker: Worker, share: Share) -> tuple[Experts, Body]:
        call = rows.call
        weights = None if self._form.exact else share_weights(call, share)
        encoding, data = rows.encoded(share, self._form.encoding, worker.peer.settings.encodings)
        body = (data, *encode_pairs(len(share.rows), share.pair_row, share.pair_expert, weights))
        message = Experts(
            model=self._model_id,
            layer=call.layer,
            form=self._form.form,
            encoding=encoding,
            n_rows=len(share.rows),
            n_pairs=len(share.flat),
        )
        return message, body
