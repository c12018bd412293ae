"""The backbone's dispatch: one layer's rows out to workers, its own share meanwhile, everything combined.

Every wait has a deadline; whatever has not come by then is computed by the local replica, so a worker can be late,
lost or lying and the layer is still right. A worker that failed once is out of routing before the next layer. What a
peer has no room for now, or would need too many requests for, is not sent at all.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.errors import BadReplyError, RemoteError, RequestRefusedError, UsageError
from swarmnode.models.base import ExpertCall
from swarmnode.net.peer import Asked, Body
from swarmnode.schedule.cost import WorkerCost
from swarmnode.schedule.dispatch import Share, split_share
from swarmnode.schedule.sending import SendPolicy, send_always
from swarmnode.services.account import StepAccount, WorkerShare
from swarmnode.services.forward import RemoteLayer, share_rows, share_weights
from swarmnode.services.hedges import Hedges
from swarmnode.services.magnitudes import Magnitudes
from swarmnode.services.members import Members, Worker
from swarmnode.services.pending_layer import Answer, PendingLayer
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


@dataclass
class _Request:
    """A piece of a worker's share that was asked for, until `deadline_at_s`."""

    worker: Worker
    share: Share
    deadline_at_s: float
    entry: WorkerShare
    cost: WorkerCost
    begun_s: float
    asked: Asked
    sent: str
    """The encoding of its rows."""


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


async def _settled(asked: Asked, scope: trio.CancelScope) -> None:
    await asked.wait_settled()
    scope.cancel()


async def _first_settled(requests: list[_Request], until_s: float) -> _Request | None:
    """The first of these that is settled, None if none is at that time. No checkpoint if one is already."""
    found = next((request for request in requests if request.asked.is_settled), None)
    if found is not None:
        return found
    with trio.CancelScope(deadline=until_s):
        if len(requests) == 1:
            await requests[0].asked.wait_settled()
        else:
            async with trio.open_nursery() as nursery:
                for request in requests:
                    nursery.start_soon(_settled, request.asked, nursery.cancel_scope)
    return next((request for request in requests if request.asked.is_settled), None)


@dataclass
class _Sending:
    """A layer while its rows travel."""

    rows: _RowBytes
    pending: PendingLayer
    account: StepAccount
    verdicts: Verdicts
    started_s: float
    requests: list[_Request] = field(default_factory=list)
    """All that were sent, in this order."""


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
        sending = _Sending(
            _RowBytes(call, layer.traffic_class),
            pending,
            account,
            Verdicts(self._members),
            trio.current_time(),
        )
        n_pieces = self._config.pieces_each(len(plan.remote))
        try:
            for index, share in plan.remote:
                self._send(sending, workers[index], share, n_pieces)
            hedges = Hedges(layer, workers, self.policy, self._config)
            own = pending.unsent if plan.local is None else [plan.local, *pending.unsent]
            if own:
                await self._compute.run(partial(pending.add_own, own))
            waiting_from_s = trio.current_time()
            # One after the other and without tasks: whichever comes first, the layer needs them all.
            for request in list(sending.requests):
                await self._take(sending, request, hedges)
            sending.verdicts.end()
        finally:
            for request in sending.requests:
                request.cost.in_flight -= 1
                request.asked.abandon()
        account.wait_s += trio.current_time() - waiting_from_s
        return pending

    def _send(self, sending: _Sending, worker: Worker, share: Share, max_pieces: int) -> None:
        """Send a worker's share now, in pieces that it takes. What it has no room for is left to the local replica.

        Each piece has the deadline of all of them.
        """
        call, unsent = sending.rows.call, sending.pending.unsent
        pieces, rest = split_share(
            share, call.ids, worker.max_rows, min(max_pieces, self._room(sending, worker))
        )
        if rest is not None:
            unsent.append(rest)
        deadline_at_s = sending.started_s + self._deadline_s(call, pieces, self._spoken(worker))
        for at, piece in enumerate(pieces):
            if self._begin(sending, worker, piece, deadline_at_s) is None:
                unsent += pieces[at:]
                break

    def _room(self, sending: _Sending, worker: Worker) -> int:
        """How many requests the worker takes now; 0 if it is gone, which is held against it."""
        try:
            return worker.peer.room()
        except RemoteError as error:
            self._unsendable(sending, worker, error)
            return 0

    def _unsendable(self, sending: _Sending, worker: Worker, error: Exception) -> None:
        sending.verdicts.missed(worker, str(error))
        sending.account.worker(worker.node_id.short).late += 1

    def _spoken(self, worker: Worker) -> str:
        """The encoding of rows sent to this worker, where it can hold them."""
        return spoken_encoding(self._form.encoding, worker.peer.settings.encodings)

    def _deadline_s(self, call: ExpertCall, pieces: list[Share], encoding: str) -> float:
        n_embd, n_pairs = call.rows.shape[1], sum(len(piece.flat) for piece in pieces)
        n_rows = sum(len(piece.rows) for piece in pieces)
        reply_rows = n_pairs if self._form.exact else n_rows
        sent_bytes = n_rows * row_bytes(encoding, n_embd)
        reply_bytes = reply_rows * row_bytes(ROW_ENCODINGS[encoding].reply, n_embd)
        return self._config.share_deadline_s(n_pairs, sent_bytes + reply_bytes)

    def _begin(
        self, sending: _Sending, worker: Worker, share: Share, deadline_at_s: float
    ) -> _Request | None:
        """Send a piece now; it then counts as in flight. None if that cannot be, found out before it is encoded: there
        is no room, or the worker is gone.
        """
        begun_s = trio.current_time()
        if not self._room(sending, worker):
            return None
        try:
            message, body = self._message(sending.rows, worker, share)
            asked = worker.peer.begin(message, body, traffic_class=sending.rows.traffic_class)
        except (
            RemoteError,
            UsageError,
        ) as error:  # UsageError: the peer's caps do not let the request through
            self._unsendable(sending, worker, error)
            return None
        assert asked is not None  # there is room, and nothing ran in between
        entry = sending.account.worker(worker.node_id.short)
        entry.requests += 1
        entry.bytes_out += sum(len(part) for part in body)
        cost = self.policy.cost.worker(worker.node_id)
        cost.in_flight += 1
        request = _Request(worker, share, deadline_at_s, entry, cost, begun_s, asked, message.encoding)
        sending.requests.append(request)
        return request

    async def _take(self, sending: _Sending, request: _Request, hedges: Hedges) -> None:
        """Take the reply to a piece of whoever has it first; one that comes from nobody in time is left for the local
        replica. It may be asked for a second time meanwhile.
        """
        pending = sending.pending
        hedge_at_s = hedges.at_s(request.share, request.cost, request.begun_s)
        waiting, values = [request], None
        while waiting and values is None:
            settled = await _first_settled(waiting, min(hedge_at_s, request.deadline_at_s))
            if settled is not None:
                waiting.remove(settled)
                values = await self._judged(sending, settled)
            elif trio.current_time() >= request.deadline_at_s:
                break
            else:
                hedge_at_s = math.inf
                pending.hedged.append(request.share)
                worker = hedges.worker(request.share, request.worker)
                if worker is None:
                    break
                other = self._begin(sending, worker, request.share, request.deadline_at_s)
                if other is None:
                    break
                waiting.append(other)
        if request in waiting:
            self._left(sending, request)
        if values is None:
            pending.failed.append(request.share)

    def _left(self, sending: _Sending, request: _Request) -> None:
        """A request whose answer is not waited for any more."""
        now_s, started_s = trio.current_time(), sending.started_s
        sending.verdicts.left(request.worker)
        request.entry.late += 1
        request.entry.wait_s += now_s - started_s
        waited_s = now_s - request.begun_s
        request.cost.gave_up(len(request.share.flat), waited_s, self.policy.cost.now())
        # Short waits that somebody else ended add up: a silent worker costs one deadline, in pieces or as a whole.
        if now_s >= request.deadline_at_s or request.cost.unanswered_s >= self._config.deadline_s:
            sending.verdicts.missed(request.worker, f"no answer within {1e3 * (now_s - started_s):.0f} ms")
            request.cost.unanswered_s = 0.0

    async def _judged(self, sending: _Sending, request: _Request) -> F32 | None:
        """A reply that is here, if it is one; else whoever it comes from pays for it."""
        worker, entry, pending = request.worker, request.entry, sending.pending
        values: F32 | None = None
        try:
            values = await self._reply(sending.rows.call, request)
        except BadReplyError as error:
            sending.verdicts.lied(worker, str(error))
            pending.liars.add(worker)
        except RequestRefusedError as refusal:
            sending.verdicts.refused(worker, refusal)
            self._refused(request)
        except RemoteError as error:
            sending.verdicts.missed(worker, str(error))
        entry.wait_s += trio.current_time() - sending.started_s
        if values is None:
            entry.late += 1
            return None
        took_s = request.asked.came_at_s - request.begun_s
        pending.slowest_s = max(pending.slowest_s, took_s)
        request.cost.add(len(request.share.flat), took_s, self.policy.cost.now())
        audit = self._rng.random() if self._rng.random() < self._config.audit_share else None
        pending.answers.append(Answer(worker, request.share, request.sent, values, audit))
        sending.verdicts.answered(worker, len(request.share.flat))
        return values

    def _refused(self, request: _Request) -> None:
        """For the next decisions a refusal is an answer that took until the local replica had computed it."""
        cost, n_pairs = self.policy.cost, len(request.share.flat)
        spent_s = trio.current_time() - request.begun_s
        request.cost.add(n_pairs, spent_s + cost.local.expect(n_pairs, 0, cost.now()), cost.now())

    async def _reply(self, call: ExpertCall, request: _Request) -> F32:
        reply, reply_body = await request.asked.reply()
        if not isinstance(reply, Rows):
            raise BadReplyError(f"asked for rows, got {type(reply).__name__}")
        check_reply_encoding(reply, request.sent)
        share = request.share
        expected = len(share.flat) if self._form.exact else len(share.rows)
        values = parse_rows_body_untrusted(reply, reply_body, expected, call.rows.shape[1])
        request.entry.bytes_in += len(reply_body)
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
