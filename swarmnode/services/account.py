"""What the swarm did for one answer: told to the person at the end, and live while it runs.

A step serves several answers at once. `StepAccount` counts it as a whole and divides it: pairs exactly, by rows; bytes
by pairs; waits are everyone's, because all rows of a step wait for the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class WorkerShare:
    """One worker's part. Pairs are (row, expert) pairs; bytes are message bodies; waits last until a reply is taken."""

    pairs: int = 0
    requests: int = 0
    late: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    wait_s: float = 0.0


@dataclass
class Account:
    """Counts of one generation.

    `pairs` is all of them; `remote` were answered by workers, `fallback` were sent out but computed by the local
    replica after all, the rest was local from the start. Of both, `hedged` were late and asked for a second time, of
    another worker or of the local replica.
    """

    pairs: int = 0
    remote: int = 0
    fallback: int = 0
    hedged: int = 0
    layers: int = 0
    remote_layers: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were not run, because a slot held them."""
    drafted_tokens: int = 0
    """Tokens of the answer that were guessed, and tried out several at once."""
    accepted_tokens: int = 0
    """Guesses that were right."""
    wait_s: float = 0.0
    """Time the forward pass stood still for workers, beyond its own share of the layer."""
    workers: dict[str, WorkerShare] = field(default_factory=dict)

    def worker(self, name: str) -> WorkerShare:
        """The entry of one worker, made when it is new."""
        return self.workers.setdefault(name, WorkerShare())

    def copy(self) -> Account:
        """As it is now: the answer runs ahead of whoever listens, and its account goes on."""
        workers = {name: replace(share) for name, share in self.workers.items()}
        return replace(self, workers=workers)

    @property
    def helpers(self) -> list[str]:
        """The workers whose rows were used: of those in `workers`, some were asked and did not answer."""
        return [name for name, share in self.workers.items() if share.pairs]

    @property
    def remote_share(self) -> float:
        """Part of all pairs that workers computed, 0 to 1."""
        return self.remote / self.pairs if self.pairs else 0.0

    @staticmethod
    def total(accounts: Sequence[Account], n_each: int) -> Account:
        """Of answers to several prompts, `n_each` to each, one prompt's behind the other's. A prompt's tokens count
        once (`cached_tokens`: where most were held).
        """
        if len(accounts) == 1:
            return accounts[0]
        total = Account()
        for first in range(0, len(accounts), n_each):
            total.cached_tokens += max(item.cached_tokens for item in accounts[first : first + n_each])
        for account in accounts:
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(account, name))
            for worker, share in account.workers.items():
                entry = total.worker(worker)
                for item in fields(WorkerShare):
                    setattr(entry, item.name, getattr(entry, item.name) + getattr(share, item.name))
        return total

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the API's `swarm` field."""
        return {
            "pairs": self.pairs,
            "pairs_remote": self.remote,
            "pairs_fallback": self.fallback,
            "pairs_hedged": self.hedged,
            "share_remote": round(self.remote_share, 4),
            "cached_tokens": self.cached_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "layers": self.layers,
            "layers_remote": self.remote_layers,
            "wait_ms": round(self.wait_s * 1e3, 2),
            "workers": {
                name: {
                    "pairs": share.pairs,
                    "requests": share.requests,
                    "late": share.late,
                    "bytes_out": share.bytes_out,
                    "bytes_in": share.bytes_in,
                    "wait_ms": round(share.wait_s * 1e3, 2),
                }
                for name, share in self.workers.items()
            },
        }


_SUMMED = [item.name for item in fields(Account) if item.name not in ("cached_tokens", "workers")]


@dataclass(frozen=True)
class AccountedRows:
    """Rows of one answer in a step: `n_rows` go through the layers, the last `n_out` of them through the last one."""

    account: Account
    n_rows: int
    n_out: int


class StepAccount:
    """Counts of one step, until `divide`."""

    def __init__(self, parts: Sequence[AccountedRows]) -> None:
        self._parts = parts
        self._remote = [0] * len(parts)
        self._fallback = [0] * len(parts)
        self._hedged = [0] * len(parts)
        self._workers: dict[str, WorkerShare] = {}
        self._by_worker: dict[str, list[int]] = {}
        self.remote_layers = 0
        self.wait_s = 0.0
        """As Account.wait_s."""

    def worker(self, name: str) -> WorkerShare:
        """The entry of one worker, made when it is new. Its pairs are counted by `answered`."""
        return self._workers.setdefault(name, WorkerShare())

    @property
    def helpers(self) -> tuple[str, ...]:
        """The workers whose rows were used."""
        return tuple(self._by_worker)

    def answered(self, name: str, pair_rows: npt.NDArray[np.int64], n_rows: int) -> None:
        """A worker answered pairs of these rows (one entry a pair) of a layer of `n_rows` rows."""
        self.worker(name).pairs += len(pair_rows)
        mine = self._by_worker.setdefault(name, [0] * len(self._parts))
        for index, n_pairs in enumerate(self._by_part(pair_rows, n_rows)):
            self._remote[index] += n_pairs
            mine[index] += n_pairs

    def fell_back(self, pair_rows: npt.NDArray[np.int64], n_rows: int) -> None:
        """Pairs that were sent out were computed here after all."""
        for index, n_pairs in enumerate(self._by_part(pair_rows, n_rows)):
            self._fallback[index] += n_pairs

    def hedged(self, pair_rows: npt.NDArray[np.int64], n_rows: int) -> None:
        """Pairs were asked for a second time."""
        for index, n_pairs in enumerate(self._by_part(pair_rows, n_rows)):
            self._hedged[index] += n_pairs

    def divide(self, n_layer: int, n_used: int) -> None:
        """Add to each answer's account what its rows had of the step: `n_layer` layers, `n_used` experts a row in each;
        in the last one only the rows of the logits have any.
        """
        for index, part in enumerate(self._parts):
            account = part.account
            account.pairs += n_used * (part.n_rows * (n_layer - 1) + part.n_out)
            account.remote += self._remote[index]
            account.fallback += self._fallback[index]
            account.hedged += self._hedged[index]
            account.layers += n_layer
            account.remote_layers += self.remote_layers
            account.wait_s += self.wait_s
            for name, share in self._workers.items():
                self._add_worker(account, index, name, share)

    def _add_worker(self, account: Account, index: int, name: str, share: WorkerShare) -> None:
        n_pairs = self._by_worker[name][index] if name in self._by_worker else 0
        # Of a worker that answered nothing there are no pairs to divide its bytes by.
        portion = n_pairs / share.pairs if share.pairs else 1 / len(self._parts)
        if not portion:
            return
        entry = account.worker(name)
        entry.pairs += n_pairs
        entry.requests += share.requests
        entry.late += share.late
        entry.bytes_out += round(portion * share.bytes_out)
        entry.bytes_in += round(portion * share.bytes_in)
        entry.wait_s += share.wait_s

    def _by_part(self, pair_rows: npt.NDArray[np.int64], n_rows: int) -> list[int]:
        if len(self._parts) == 1:
            return [len(pair_rows)]
        counts = [part.n_rows for part in self._parts]
        if sum(counts) != n_rows:  # the last layer
            counts = [part.n_out for part in self._parts]
        owners = np.repeat(np.arange(len(counts)), counts)
        return [int(n) for n in np.bincount(owners[pair_rows], minlength=len(counts))]
