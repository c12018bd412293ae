"""The backbone's dispatch: one layer's rows out to workers, its own share meanwhile, everything combined.

Every wait has a deadline; whatever has not come by then is computed by the local replica, so a worker can be late,
lost or lying and the layer is still right. A worker that failed once is out of routing before the next layer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    """A piece of a worker's share, asked for (or, `asked` None, still to be asked for) until `deadline_at_s`."""

    worker: Worker
    share: Share
    deadline_at_s: float
    entry: WorkerShare
    cost: WorkerCost
    begun_s: float
    asked: Asked | None = None
    sent: str = ""
    """The encoding of its rows, once they are encoded."""

    @property
    def is_settled(self) -> bool:
        """There is nothing to wait for: an answer is here, or none will come, or it has to be asked again."""
        return self.asked is None or self.asked.is_settled


class _RowBytes:
    """The rows of a layer as they travel. A single row is the same in all shares, and is encoded once."""

    def __init__(self, call: ExpertCall) -> None:
        self.call = call
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
    found = next((request for request in requests if request.is_settled), None)
    if found is not None:
        return found
    asked = [request.asked for request in requests if request.asked is not None]
    with trio.CancelScope(deadline=until_s):
        if len(asked) == 1:
            await asked[0].wait_settled()
        else:
            async with trio.open_nursery() as nursery:
                for item in asked:
                    nursery.start_soon(_settled, item, nursery.cancel_scope)
    return next((request for request in requests if request.is_settled), None)


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
        started_s = trio.current_time()
        rows = _RowBytes(call)
        requests: list[_Request] = []
        try:
            for index, piece, deadline_s in self._pieces(layer, workers):
                request = self._request(workers[index], piece, started_s + deadline_s, account)
                requests.append(request)
                self._begin(rows, request)
            hedges = Hedges(layer, workers, self.policy, self._config)
            if plan.local is not None:
                await self._compute.run(partial(pending.add_local, plan.local))
            waiting_from_s = trio.current_time()
            # One after the other and without tasks: whichever comes first, the layer needs them all.
            for request in list(requests):
                tries = [request]
                try:
                    await self._take(rows, tries, pending, started_s, hedges, account)
                finally:
                    requests += tries[1:]
        finally:
            for request in requests:
                request.cost.in_flight -= 1
                if request.asked is not None:
                    request.asked.abandon()
        account.wait_s += trio.current_time() - waiting_from_s
        return pending

    def _pieces(self, layer: RemoteLayer, workers: tuple[Worker, ...]) -> Iterator[tuple[int, Share, float]]:
        """Each worker's share, in pieces that it takes, with the deadline of the whole share in seconds."""
        for index, share in layer.plan.remote:
            worker = workers[index]
            deadline_s = self._deadline_s(layer.call, share, self._spoken(worker))
            for piece in split_share(share, layer.call.ids, worker.max_rows):
                yield index, piece, deadline_s

    def _spoken(self, worker: Worker) -> str:
        """The encoding of rows sent to this worker, where it can hold them."""
        return spoken_encoding(self._form.encoding, worker.peer.settings.encodings)

    def _deadline_s(self, call: ExpertCall, share: Share, encoding: str) -> float:
        n_rows, n_embd = len(share.rows), call.rows.shape[1]
        reply_rows = len(share.flat) if self._form.exact else n_rows
        sent_bytes = n_rows * row_bytes(encoding, n_embd)
        reply_bytes = reply_rows * row_bytes(ROW_ENCODINGS[encoding].reply, n_embd)
        return self._config.share_deadline_s(len(share.flat), sent_bytes + reply_bytes)

    def _request(self, worker: Worker, share: Share, deadline_at_s: float, account: StepAccount) -> _Request:
        """A request that is about to begin. Until it is over it counts as in flight."""
        cost = self.policy.cost.worker(worker.node_id)
        cost.in_flight += 1
        entry = account.worker(worker.node_id.short)
        return _Request(worker, share, deadline_at_s, entry, cost, trio.current_time())

    def _begin(self, rows: _RowBytes, request: _Request) -> None:
        """Send a piece now; if that cannot be, `_take` tries again and says why not."""
        request.entry.requests += 1
        try:
            message, body, traffic_class = self._message(rows, request)
            request.asked = request.worker.peer.begin(message, body, traffic_class=traffic_class)
        except (RemoteError, UsageError):
            request.asked = None

    async def _take(
        self,
        rows: _RowBytes,
        tries: list[_Request],
        pending: PendingLayer,
        started_s: float,
        hedges: Hedges,
        account: StepAccount,
    ) -> None:
        """Take the reply to a piece, asked for by `tries[0]`, of whoever has it first; one that comes from nobody in
        time is left for the local replica. A second request is added to `tries`.
        """
        request = tries[0]
        hedge_at_s = hedges.at_s(request.share, request.cost, request.begun_s)
        waiting, values = [request], None
        while waiting and values is None:
            settled = await _first_settled(waiting, min(hedge_at_s, request.deadline_at_s))
            if settled is not None:
                waiting.remove(settled)
                values = await self._judged(rows, settled, pending, started_s)
            elif trio.current_time() >= request.deadline_at_s:
                break
            else:
                hedge_at_s = math.inf
                pending.hedged.append(request.share)
                worker = hedges.worker(request.share, request.worker)
                if worker is None:
                    break
                other = self._request(worker, request.share, request.deadline_at_s, account)
                tries.append(other)
                waiting.append(other)
                self._begin(rows, other)
        if request in waiting:
            self._left(request, started_s)
        if values is None:
            pending.failed.append(request.share)

    def _left(self, request: _Request, started_s: float) -> None:
        """A request whose answer is not waited for any more."""
        now_s = trio.current_time()
        request.entry.late += 1
        request.entry.wait_s += now_s - started_s
        waited_s = now_s - request.begun_s
        request.cost.gave_up(len(request.share.flat), waited_s, self.policy.cost.now())
        # Short waits that somebody else ended add up: a silent worker costs one deadline, in pieces or as a whole.
        if now_s >= request.deadline_at_s or request.cost.unanswered_s >= self._config.deadline_s:
            self._members.missed(request.worker, f"no answer within {1e3 * (now_s - started_s):.0f} ms")
            request.cost.unanswered_s = 0.0

    async def _judged(
        self, rows: _RowBytes, request: _Request, pending: PendingLayer, started_s: float
    ) -> F32 | None:
        """A reply that is here (or is asked for only now), if it is one; else whoever it comes from pays for it."""
        worker, entry = request.worker, request.entry
        values: F32 | None = None
        try:
            if request.asked is not None:
                values = await self._reply(rows, request)
            else:
                with trio.CancelScope(deadline=request.deadline_at_s):
                    values = await self._reply(rows, request)
            if values is None:
                waited_ms = 1e3 * (request.deadline_at_s - started_s)
                self._members.missed(worker, f"no answer within {waited_ms:.0f} ms")
        except BadReplyError as error:
            self._members.quarantine(worker, str(error))
        except RequestRefusedError as refusal:
            self._members.refused(worker, refusal)
            self._refused(request)
        except (
            RemoteError,
            UsageError,
        ) as error:  # UsageError: the peer's caps do not let the request through
            self._members.missed(worker, str(error))
        entry.wait_s += trio.current_time() - started_s
        if values is None:
            entry.late += 1
            return None
        if request.asked is not None:
            took_s = request.asked.came_at_s - request.begun_s
            pending.slowest_s = max(pending.slowest_s, took_s)
            request.cost.add(len(request.share.flat), took_s, self.policy.cost.now())
        audit = self._rng.random() if self._rng.random() < self._config.audit_share else None
        pending.answers.append(Answer(worker, request.share, request.sent, values, audit))
        self._members.computed(worker, len(request.share.flat))
        return values

    def _refused(self, request: _Request) -> None:
        """For the next decisions a refusal is an answer that took until the local replica had computed it."""
        cost, n_pairs = self.policy.cost, len(request.share.flat)
        spent_s = trio.current_time() - request.begun_s
        request.cost.add(n_pairs, spent_s + cost.local.expect(n_pairs, 0, cost.now()), cost.now())

    async def _reply(self, rows: _RowBytes, request: _Request) -> F32:
        if request.asked is None:
            message, body, traffic_class = self._message(rows, request)
            reply, reply_body = await request.worker.peer.request(message, body, traffic_class=traffic_class)
        else:
            reply, reply_body = await request.asked.reply()
        if not isinstance(reply, Rows):
            raise BadReplyError(f"asked for rows, got {type(reply).__name__}")
        check_reply_encoding(reply, request.sent)
        share = request.share
        expected = len(share.flat) if self._form.exact else len(share.rows)
        values = parse_rows_body_untrusted(reply, reply_body, expected, rows.call.rows.shape[1])
        request.entry.bytes_in += len(reply_body)
        return values

    def _message(self, rows: _RowBytes, request: _Request) -> tuple[Experts, Body, TrafficClass]:
        call, share = rows.call, request.share
        weights = None if self._form.exact else share_weights(call, share)
        encoding, data = rows.encoded(share, self._form.encoding, request.worker.peer.settings.encodings)
        request.sent = encoding
        body = (data, *encode_pairs(len(share.rows), share.pair_row, share.pair_expert, weights))
        message = Experts(
            model=self._model_id,
            layer=call.layer,
            form=self._form.form,
            encoding=encoding,
            n_rows=len(share.rows),
            n_pairs=len(share.flat),
        )
        request.entry.bytes_out += sum(len(part) for part in body)
        few = len(call.rows) <= self._config.decode_rows
        return message, body, TrafficClass.DECODE if few else TrafficClass.PREFILL
