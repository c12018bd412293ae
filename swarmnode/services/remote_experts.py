"""The backbone's dispatch: one layer's rows out to workers, its own share meanwhile, everything combined.

Every wait has a deadline; whatever has not come by then is computed by the local replica, so a worker can be late,
lost or lying and the layer is still right. A worker that failed once is out of routing before the next layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
from swarmnode.services.forward import Combiner, RemoteLayer, compute_share, share_weights
from swarmnode.services.members import Members, Worker
from swarmnode.services.runners import Runner
from swarmnode.wire.messages import Experts, Rows
from swarmnode.wire.tensors import encode_experts_body, parse_rows_body_untrusted, pick_encoding

F32: TypeAlias = npt.NDArray[np.float32]


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
class _Gathered:
    """Results of one layer's remote shares while they come in."""

    done: list[tuple[Share, F32]] = field(default_factory=list)
    failed: list[Share] = field(default_factory=list)


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
    ) -> None:
        self._model_id = model_id
        self._bank = bank
        self._compute = compute
        self._members = members
        self._config = config
        self._form = form

    async def layer(
        self, layer: RemoteLayer, workers: tuple[Worker, ...], account: Account
    ) -> Callable[[], F32]:
        """Gather all parts of the layer; returns the last step, to be run on the compute thread.

        The last step computes what no worker answered and sums everything: f32 [T, n_embd]. It is returned rather
        than run so that the caller can go on with the next layer in the same hop to the compute thread.
        """
        call, plan = layer.call, layer.plan
        combiner = Combiner(call, self._form.exact)
        gathered = _Gathered()
        async with trio.open_nursery() as nursery:
            for index, share in plan.remote:
                deadline_s = self._config.share_deadline_s(len(share.flat))
                for piece in split_share(share, call.ids, workers[index].max_rows):
                    nursery.start_soon(self._ask, workers[index], call, piece, deadline_s, gathered, account)
            if plan.local is not None:
                local = plan.local
                values = await self._compute.run(
                    lambda: compute_share(self._bank, call, local, self._form.exact)
                )
                combiner.add(local, values)
            started_s = trio.current_time()
        account.wait_s += trio.current_time() - started_s
        return self._finish(call, combiner, gathered, account)

    async def _ask(
        self,
        worker: Worker,
        call: ExpertCall,
        share: Share,
        deadline_s: float,
        gathered: _Gathered,
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
            gathered.failed.append(share)
            return
        gathered.done.append((share, values))
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

    def _finish(
        self, call: ExpertCall, combiner: Combiner, gathered: _Gathered, account: Account
    ) -> Callable[[], F32]:
        for share, values in gathered.done:
            combiner.add(share, values)
            account.remote += len(share.flat)
        account.remote_layers += 1
        missing = merge_shares(gathered.failed, call.ids) if gathered.failed else None
        if missing is not None:
            account.fallback += len(missing.flat)

        def finish() -> F32:
            if missing is not None:
                combiner.add(missing, compute_share(self._bank, call, missing, self._form.exact))
            return combiner.result()

        return finish
