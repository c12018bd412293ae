"""What the workers did of one layer, told to the table of workers once for each.

A worker says how many pairs it takes at a time, and so into how many requests its share of a layer is cut. Whatever is
counted of requests is therefore counted of layers: else it could answer one of 64 and be forgiven for the others.
"""

from __future__ import annotations

from swarmnode.errors import RequestRefusedError
from swarmnode.services.members import Members, Worker


class Verdicts:
    """Of one layer. Trio's thread."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._n_pairs: dict[Worker, int] = {}
        """Answered."""
        self._failing: set[Worker] = set()
        """Those who did not answer all that they were asked."""
        self._missed: set[Worker] = set()
        self._liars: set[Worker] = set()

    def answered(self, worker: Worker, n_pairs: int) -> None:
        """A request was answered with rows that are going to be used."""
        self._n_pairs[worker] = self._n_pairs.get(worker, 0) + n_pairs
        self._members.answered(worker)

    def refused(self, worker: Worker, refusal: RequestRefusedError) -> None:
        """A request was refused: it counts once, and from the first on, so that nobody else asks meanwhile."""
        self._members.refused(worker, refusal, again=worker in self._failing)
        self._failing.add(worker)

    def missed(self, worker: Worker, reason: str) -> None:
        """A request was not answered in time, or could not even be made."""
        if worker not in self._missed:
            self._members.missed(worker, reason)
        self._missed.add(worker)
        self._failing.add(worker)

    def left(self, worker: Worker) -> None:
        """A request is not waited for any more, though its time is not over."""
        self._failing.add(worker)

    def lied(self, worker: Worker, reason: str) -> None:
        """A reply cannot be right."""
        if worker not in self._liars:
            self._members.quarantine(worker, reason)
        self._liars.add(worker)
        self._failing.add(worker)

    def end(self) -> None:
        """The layer is over: whoever answered all that it was asked has worked."""
        for worker, n_pairs in self._n_pairs.items():
            if worker in self._liars:  # nothing of it is used
                continue
            self._members.computed(worker, n_pairs, is_whole=worker not in self._failing)
