"""A layer whose pairs were sent out: what came back, what did not, and the sum of it all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.compute.bank import ExpertBank
from swarmnode.schedule.dispatch import Share, merge_shares
from swarmnode.schedule.sending import SendPolicy
from swarmnode.services.account import StepAccount
from swarmnode.services.forward import Combiner, RemoteLayer, compute_share, rows_agree
from swarmnode.services.magnitudes import Magnitudes
from swarmnode.services.members import Members, Worker
from swarmnode.wire.tensors import as_travelled

F32: TypeAlias = npt.NDArray[np.float32]


@dataclass(eq=False)
class Answer:
    """A worker's rows for a share, whose rows were `sent` in that encoding.

    `audit` (0 to 1, or None for no audit) says which row is recomputed before use.
    """

    worker: Worker
    share: Share
    sent: str
    values: F32
    audit: float | None


class PendingLayer:
    """A layer whose remote part has come, or has not and never will.

    `finish` belongs on the compute thread, so that the caller can go on with the next layer in the same hop; `settle`
    afterwards on trio's, where accounts and standings live.
    """

    def __init__(
        self,
        layer: RemoteLayer,
        bank: ExpertBank,
        members: Members,
        account: StepAccount,
        policy: SendPolicy,
        magnitudes: Magnitudes,
        *,
        exact: bool,
        max_row_error: float,
    ) -> None:
        self._layer = layer
        self._call = call = layer.call
        self._policy = policy
        self._bank = bank
        self._members = members
        self._account = account
        self._magnitudes = magnitudes
        self._exact = exact
        self._max_row_error = max_row_error
        self._combiner = Combiner(call, exact)
        self.answers: list[Answer] = []
        self.failed: list[Share] = []
        """Sent, and not answered."""
        self.unsent: list[Share] = []
        """Whose worker had no room for them: computed here from the start."""
        self.hedged: list[Share] = []
        """Asked for twice."""
        self.slowest_s = 0.0
        """How long the slowest part took, here or at a worker."""
        self.liars: set[Worker] = set()
        """Whoever was found to give wrong rows of this layer: nothing of theirs is used, however much they sent."""
        self._caught: list[Worker] = []
        """Those of them who were found by recomputing."""
        self.unmet: list[tuple[int, npt.NDArray[np.int32]]] = []
        """After `settle`: layer and expert ids of pairs that nobody answered in time, or had room for."""

    def add_own(self, shares: list[Share]) -> None:
        """`add_local` for all of these at once. Compute thread."""
        self.add_local(shares[0] if len(shares) == 1 else merge_shares(shares, self._call.ids))

    def add_local(self, share: Share) -> None:
        """Compute the backbone's own share. Compute thread."""
        now = self._policy.cost.now
        started_s = now()
        values = compute_share(self._bank, self._call, share, self._exact)
        spent_s = now() - started_s
        self.slowest_s = max(self.slowest_s, spent_s)
        self._policy.computed(self._call.layer, share.pair_expert, spent_s)
        if not self._magnitudes.knows(self._call.layer):
            self._magnitudes.learn(self._call.layer, values)
        self._combiner.add(share, values)

    def finish(self) -> F32:
        """Audit, compute what nobody answered (or answered wrong), and sum: f32 [T, n_embd]. Compute thread.

        Sums in the order of asking, not of arrival: equal swarms give equal bits.
        """
        self._audit()
        missing = list(self.failed)
        for answer in self.answers:
            if answer.worker in self.liars:
                missing.append(answer.share)
            else:
                self._combiner.add(answer.share, answer.values)
        if missing:
            self.add_local(merge_shares(missing, self._call.ids))
        elif self._policy.n_passes == 1:  # else others had the compute thread, too
            cost = self._policy.cost
            cost.add_cut(cost.now() - self._layer.stopped_s - self.slowest_s, cost.now())
        return self._combiner.result()

    def settle(self) -> None:
        """Count the layer and quarantine who failed the audit. Trio's thread, after `finish`."""
        account, (n_rows, k) = self._account, self._call.ids.shape
        if self.answers or self.failed:
            account.remote_layers += 1
        for share in self.hedged:
            account.hedged(share.flat // k, n_rows)
        for share in self.failed:
            account.fell_back(share.flat // k, n_rows)
        self.unmet = [(self._call.layer, share.pair_expert) for share in self.failed + self.unsent]
        for answer in self.answers:
            if answer.worker in self.liars:
                account.fell_back(answer.share.flat // k, n_rows)
            else:
                account.answered(answer.worker.node_id.short, answer.share.flat // k, n_rows)
        for worker in self._caught:
            reason = f"wrong rows for layer {self._call.layer}, found by recomputing"
            self._members.quarantine(worker, reason)

    def _audit(self) -> None:
        """Find out who lies. One wrong row is enough, and is what it costs."""
        for answer in self.answers:
            if answer.worker in self.liars:
                continue
            if not all(self._holds(answer, position) for position in self._sample(answer)):
                self.liars.add(answer.worker)
                self._caught.append(answer.worker)

    def _sample(self, answer: Answer) -> set[int]:
        """Which rows of an answer are recomputed: one drawn by `audit`, and the largest if it is suspiciously large."""
        drawn = None if answer.audit is None else int(answer.audit * len(answer.values))
        largest = self._magnitudes.suspicious_row(self._call.layer, answer.values)
        return {position for position in (drawn, largest) if position is not None}

    def _holds(self, answer: Answer, position: int) -> bool:
        """Recompute one row of the answer (exact form: one pair) from what was sent, and compare.

        Eight bits of a row with one number far above all others are another row.
        """
        share, call = answer.share, self._call
        pairs = np.array([position]) if self._exact else np.flatnonzero(share.pair_row == position)
        sample = Share(
            share.flat[pairs],
            share.rows[share.pair_row[pairs[:1]]],
            np.zeros(len(pairs), np.int32),
            share.pair_expert[pairs],
        )
        row = as_travelled(call.rows[sample.rows], answer.sent)
        expected = compute_share(self._bank, call._replace(rows=row), sample, self._exact)
        self._magnitudes.learn(call.layer, expected)
        return rows_agree(expected[0], answer.values[position], self._max_row_error)
