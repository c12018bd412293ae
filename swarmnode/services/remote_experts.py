"""The backbone's dispatch: one layer's rows out to workers, its own share meanwhile, everything combined.

Every wait has a deadline; whatever has not come by then is computed by the local replica, so a worker can be late,
lost or lying and the layer is still right. A worker that failed once is out of routing before the next layer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.errors import BadReplyError, RemoteError, RequestRefusedError
from swarmnode.models.base import ExpertCall
from swarmnode.schedule.dispatch import Share, merge_shares, split_share
from swarmnode.services.account import Account, WorkerShare
from swarmnode.services.forward import Combiner, RemoteLayer, compute_share, cosine, share_weights
from swarmnode.services.members import Members, Worker
from swarmnode.services.runners import Runner
from swarmnode.wire.messages import Experts, Rows
from swarmnode.wire.tensors import encode_experts_body, parse_rows_body_untrusted, pick_encoding

F32: TypeAlias = npt.NDArray[np.float32]


MIN_AUDIT_COSINE = 0.995
"""A recomputed row against the worker's: see DispatchConfig.probe_min_cosine."""

HARMLESS_REFUSALS = frozenset({"busy", "overflow", "cancelled"})
"""Refusals that say nothing against a worker: it works, just not on this."""


@dataclass(frozen=True)
class WireForm:
    """What travels. The default halves the bytes and lets each worker sum its own pairs; `EXACT` is bit-exact."""

    form: str = "partial"
    encoding: str = "f16"

    @property
    def exact(self) -> bool:
        """True when the reply is one row a pair, so that the sum is done here in k order."""
        return self.form == "experts"


EXACT = WireForm("experts", "f32")


@dataclass
class _Answer:
    """A worker's rows for a share, and whether a sample of them is recomputed before use."""

    worker: Worker
    share: Share
    values: F32
    audited: bool


class PendingLayer:
    """A layer whose remote part has come, or has not and never will.

    `finish` belongs on the compute thread, so that the caller can go on with the next layer in the same hop; `settle`
    afterwards on trio's, where accounts and standings live.
    """

    def __init__(
        self, call: ExpertCall, bank: ExpertBank, members: Members, account: Account, exact: bool
    ) -> None:
        self._call = call
        self._bank = bank
        self._members = members
        self._account = account
        self._exact = exact
        self._combiner = Combiner(call, exact)
        self.answers: list[_Answer] = []
        self.failed: list[Share] = []
        self._wrong: list[_Answer] = []

    def add_local(self, share: Share) -> None:
        """Compute the backbone's own share. Compute thread."""
        self._combiner.add(share, compute_share(self._bank, self._call, share, self._exact))

    def finish(self) -> F32:
        """Audit, compute what nobody answered (or answered wrong), and sum: f32 [T, n_embd]. Compute thread."""
        for answer in self.answers:
            if answer.audited and not self._holds(answer):
                self._wrong.append(answer)
            else:
                self._combiner.add(answer.share, answer.values)
        missing = self.failed + [answer.share for answer in self._wrong]
        if missing:
            self.add_local(merge_shares(missing, self._call.ids))
        return self._combiner.result()

    def settle(self) -> None:
        """Count the layer and quarantine who failed the audit. Trio's thread, after `finish`."""
        self._account.remote_layers += 1
        for answer in self.answers:
            self._account.remote += len(answer.share.flat)
        self._account.fallback += sum(len(share.flat) for share in self.failed)
        for answer in self._wrong:
            self._account.remote -= len(answer.share.flat)
            self._account.fallback += len(answer.share.flat)
            self._members.quarantine(
                answer.worker, f"wrong rows for layer {self._call.layer}, found by recomputing"
            )

    def _holds(self, answer: _Answer) -> bool:
        """Recompute the share's last row (exact form: its last pair) and compare."""
        share = answer.share
        first = len(share.flat) - 1
        if not self._exact:
            first = int(np.searchsorted(share.pair_row, share.pair_row[-1]))
        sample = Share(
            share.flat[first:],
            share.rows[-1:],
            np.zeros(len(share.flat) - first, np.int32),
            share.pair_expert[first:],
        )
        expected = compute_share(self._bank, self._call, sample, self._exact)
        return cosine(expected[0], answer.values[-1]) >= MIN_AUDIT_COSINE


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
    ) -> None:
        self._model_id = model_id
        self._bank = bank
        self._compute = compute
        self._members = members
        self._config = config
        self._form = form
        self._rng = rng or random.Random()

    async def layer(self, layer: RemoteLayer, workers: tuple[Worker, ...], account: Account) -> PendingLayer:
        """Send the workers' shares, compute the own one meanwhile, and wait for the answers or their deadlines."""
        call, plan = layer.call, layer.plan
        pending = PendingLayer(call, self._bank, self._members, account, self._form.exact)
        async with trio.open_nursery() as nursery:
            for index, share in plan.remote:
                deadline_s = self._config.share_deadline_s(len(share.flat))
                for piece in split_share(share, call.ids, workers[index].max_rows):
                    nursery.start_soon(self._ask, workers[index], call, piece, deadline_s, pending, account)
            if plan.local is not None:
                await self._compute.run(partial(pending.add_local, plan.local))
            started_s = trio.current_time()
        account.wait_s += trio.current_time() - started_s
        return pending

    async def _ask(
        self,
        worker: Worker,
        call: ExpertCall,
        share: Share,
        deadline_s: float,
        pending: PendingLayer,
        account: Account,
    ) -> None:
        """Send one share and take its reply; a share that fails in any way is left for the local replica."""
        entry = account.worker(worker.node_id.short)
        entry.requests += 1
        started_s = trio.current_time()
        values: F32 | None = None
        try:
            with trio.move_on_after(deadline_s) as deadline:
                values = await self._request(worker, call, share, entry)
            if deadline.cancelled_caught:
                self._members.missed(worker, f"no answer within {deadline_s * 1e3:.0f} ms")
        except BadReplyError as error:
            self._members.quarantine(worker, str(error))
        except RequestRefusedError as error:
            if error.code not in HARMLESS_REFUSALS:
                self._members.missed(worker, str(error))
        except RemoteError as error:
            self._members.missed(worker, str(error))
        entry.wait_s += trio.current_time() - started_s
        if values is None:
            entry.late += 1
            pending.failed.append(share)
            return
        audited = self._rng.random() < self._config.audit_share
        pending.answers.append(_Answer(worker, share, values, audited))
        entry.pairs += len(share.flat)
        worker.tally.pairs += len(share.flat)
        self._members.answered(worker)

    async def _request(self, worker: Worker, call: ExpertCall, share: Share, entry: WorkerShare) -> F32:
        rows = call.rows[share.rows]
        weights = None if self._form.exact else share_weights(call, share)
        encoding = self.encoding_for(rows)
        body = encode_experts_body(rows, share.pair_row, share.pair_expert, weights, encoding)
        message = Experts(
            model=self._model_id,
            layer=call.layer,
            form=self._form.form,
            encoding=encoding,
            n_rows=len(share.rows),
            n_pairs=len(share.flat),
        )
        reply, reply_body = await worker.peer.request(message, body)
        if not isinstance(reply, Rows):
            raise BadReplyError(f"asked for rows, got {type(reply).__name__}")
        expected = len(share.flat) if self._form.exact else len(share.rows)
        values = parse_rows_body_untrusted(reply, reply_body, expected, call.rows.shape[1])
        entry.bytes_out += sum(len(part) for part in body)
        entry.bytes_in += len(reply_body)
        return values

    def encoding_for(self, rows: F32) -> str:
        """The encoding of these rows and of the reply: f32 instead of f16 when a number is too large for f16."""
        return pick_encoding(rows, self._form.encoding)
