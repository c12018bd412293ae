"""What one worker was asked for of one layer: its share, in pieces, and who is asked for them a second time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from swarmnode.net.peer import Asked
from swarmnode.schedule.cost import WorkerCost
from swarmnode.schedule.dispatch import Share
from swarmnode.services.account import StepAccount, WorkerShare
from swarmnode.services.members import Worker


@dataclass(frozen=True)
class Patience:
    """How long a share is waited for."""

    deadline_s: float
    """At most."""
    ends_s: float
    """When that is over, on trio's clock. A hedge has what is left of it."""
    work_s: float
    """What compute and transfer may take on the slowest device and link that are waited for."""


@dataclass(eq=False)
class Errand:
    """A worker's share of a layer. Its time is that of the whole, in however many requests it is asked for."""

    worker: Worker
    cost: WorkerCost
    account: StepAccount
    begun_s: float
    patience: Patience
    is_hedge: bool = False
    """These are pieces of another one, which is late."""
    pieces: list[Piece] = field(default_factory=list)
    n_unanswered: int = 0
    """Pieces that this worker has not answered."""
    came_at_s: float = 0.0
    """When the last answer so far was here."""
    has_failed: bool = False
    """Of something that it was asked for, the answer was no answer, or is not waited for any more."""
    is_left: bool = False
    """That was after it had let us wait."""
    act_at_s: float = math.inf
    """When something is to be done about what is not answered, before the deadline."""

    @property
    def entry(self) -> WorkerShare:
        """The worker's in the step's account."""
        return self.account.worker(self.worker.node_id.short)

    @property
    def n_pairs(self) -> int:
        """Of all its pieces."""
        return sum(len(piece.share.flat) for piece in self.pieces)

    @property
    def open_pieces(self) -> list[Piece]:
        """Those for which somebody is waited for."""
        return [piece for piece in self.pieces if piece.waiting]

    @property
    def is_open(self) -> bool:
        """Whether there are any."""
        return any(piece.waiting for piece in self.pieces)

    def answered(self, came_at_s: float, now_s: float) -> None:
        """One of its pieces was answered at that time of trio's clock. With the last one its time is known, and
        remembered as of `now_s` of the cost model's.
        """
        self.n_unanswered -= 1
        self.came_at_s = max(self.came_at_s, came_at_s)
        if not self.n_unanswered and not self.has_failed:
            self.cost.add(self.n_pairs, self.came_at_s - self.begun_s, now_s)


@dataclass(eq=False)
class Request:
    """A piece as one worker was asked for it."""

    errand: Errand
    piece: Piece
    asked: Asked
    sent: str
    """The encoding of its rows."""


@dataclass(eq=False)
class Piece:
    """As many pairs of a share as its worker takes in a request."""

    share: Share
    waiting: list[Request] = field(default_factory=list)
    """Requests for it whose answer is not here, the first one first."""
    asked: set[Worker] = field(default_factory=set)
    """Everybody who was asked for it, or would have been if there had been room."""
    is_hedged: bool = False


async def first_settled(requests: Sequence[Request], until: Callable[[], float]) -> Request | None:
    """The first of these that is settled, None if none is at that time. No checkpoint if one is already.

    `until` is only asked when there is something to wait for.
    """
    found = next((request for request in requests if request.asked.is_settled), None)
    if found is not None:
        return found
    with trio.CancelScope(deadline=until()):
        if len(requests) == 1:
            await requests[0].asked.wait_settled()
        else:
            woken = trio.Event()
            for request in requests:
                request.asked.wake(woken)
            await woken.wait()
    return next((request for request in requests if request.asked.is_settled), None)
