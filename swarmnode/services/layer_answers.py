"""The answers to what was sent out of one layer: waited for, judged, and asked for elsewhere when they are late."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.config import DispatchConfig
from swarmnode.errors import BadReplyError, RemoteError, RequestRefusedError
from swarmnode.schedule.cost import CostModel
from swarmnode.services.account import StepAccount
from swarmnode.services.errands import Errand, Patience, Piece, Request, first_settled
from swarmnode.services.hedges import Hedges
from swarmnode.services.members import Worker
from swarmnode.services.pending_layer import Answer, PendingLayer
from swarmnode.services.verdicts import Verdicts

F32: TypeAlias = npt.NDArray[np.float32]


@dataclass
class Sent:
    """What a layer has under way."""

    pending: PendingLayer
    account: StepAccount
    verdicts: Verdicts
    started_s: float
    shares: list[Errand] = field(default_factory=list)
    """As planned, one a worker."""
    hedges: list[Errand] = field(default_factory=list)
    """Asked for a second time."""
    requests: list[Request] = field(default_factory=list)
    """All of them, in the order of asking."""

    def begin(self, errand: Errand, piece: Piece, request: Request) -> None:
        """A request is under way."""
        if not errand.pieces:
            errand.cost.in_flight += 1
        errand.cost.n_requests += 1
        errand.entry.requests += 1
        errand.pieces.append(piece)
        errand.n_unanswered += 1
        piece.waiting.append(request)
        self.requests.append(request)

    def end(self) -> None:
        """Nothing is waited for any more. Once."""
        for request in self.requests:
            request.errand.cost.n_requests -= 1
            request.asked.abandon()
        for errand in self.shares + self.hedges:
            errand.cost.in_flight -= bool(errand.pieces)


class LayerAnswers:
    """Trio's thread."""

    def __init__(
        self,
        sent: Sent,
        hedges: Hedges,
        cost: CostModel,
        config: DispatchConfig,
        rng: random.Random,
        ask: Callable[[Errand, Piece], bool],
        errand: Callable[[Worker, Patience], Errand],
        read: Callable[[Request], Awaitable[F32]],
    ) -> None:
        """`ask`: send a piece to an errand's worker, if that takes it; `errand`: of a worker for pieces of
        one that is late; `read`: the values of a reply, see `RemoteExperts`.
        """
        self._sent = sent
        self._hedges = hedges
        self._cost = cost
        self._config = config
        self._rng = rng
        self._ask = ask
        self._errand = errand
        self._read = read
        self._open: deque[Piece] = deque()
        self._asked_twice: list[Piece] = []
        self._is_timed = False
        """It is known when each share will be late: not worked out before there is something to wait for."""

    async def wait(self) -> None:
        """Until every piece is answered or left for the local replica: by its deadline at the latest.

        Waits for one after the other, without tasks: whichever comes first, the layer needs them all. What has to be
        done about a late one is done while others are waited for.
        """
        pieces = [piece for errand in self._sent.shares for piece in errand.pieces]
        self._open.extend(pieces)
        while self._open:
            if not self._open[0].waiting:
                self._open.popleft()
                continue
            settled = await first_settled(self._watched(), self._next_s)
            if settled is None:  # it is time to act, unless answers have come that were not looked at
                settled = next((request for request in self._under_way() if request.asked.is_settled), None)
            if settled is not None:
                await self._take(settled)
            else:
                self._act()
        answers = self._sent.pending.answers
        if len(answers) > 1:  # summed in the order of asking, not of arrival
            places = {id(piece.share): place for place, piece in enumerate(pieces)}
            answers.sort(key=lambda answer: places[id(answer.share)])

    def _under_way(self) -> Iterator[Request]:
        for piece in self._open:
            yield from piece.waiting

    def _watched(self) -> list[Request]:
        """Requests for the first piece that is not answered, and for those that were asked for twice."""
        if not self._asked_twice:
            return self._open[0].waiting
        self._asked_twice = [piece for piece in self._asked_twice if piece.waiting]
        pieces = {self._open[0]: None, **dict.fromkeys(self._asked_twice)}
        return [request for piece in pieces for request in piece.waiting]

    def _next_s(self) -> float:
        if not self._is_timed:
            self._is_timed = True
            for errand in self._sent.shares:
                errand.act_at_s = self._hedges.at_s(errand) if errand.is_open else math.inf
        return min(
            min(errand.act_at_s, errand.patience.ends_s) for errand in self._sent.shares if errand.is_open
        )

    def _act(self) -> None:
        """It is time to do something about some of them."""
        now_s = trio.current_time()
        for errand in self._sent.shares:
            if errand.is_open and now_s >= errand.patience.ends_s:
                for piece in errand.open_pieces:
                    self._give_up(piece)
            elif errand.is_open and now_s >= errand.act_at_s:
                self._hedge(errand, now_s)

    def _hedge(self, errand: Errand, now_s: float) -> None:
        """Ask elsewhere for all that is late, unless that is under way, or leave it for the local replica."""
        errand.act_at_s = math.inf
        pieces = [piece for piece in errand.open_pieces if piece.waiting[-1].errand is errand]
        n_pairs, here_s = sum(len(piece.share.flat) for piece in pieces), self._hedges.here_s(pieces)
        made: dict[Worker, Errand] = {}
        all_here_s: float | None = None
        for piece in pieces:
            if self._ask_elsewhere(errand, piece, n_pairs, here_s, made):
                continue
            if all_here_s is None:
                all_here_s = self._hedges.here_s(errand.pieces)
            local_at_s = self._hedges.local_at_s(errand, piece, all_here_s)
            if now_s >= local_at_s:
                self._note_hedge(piece)
                self._give_up(piece)
            else:
                errand.act_at_s = min(errand.act_at_s, local_at_s)

    def _ask_elsewhere(
        self, late: Errand, piece: Piece, n_pairs: int, here_s: float, made: dict[Worker, Errand]
    ) -> bool:
        while (worker := self._hedges.worker(piece, n_pairs, here_s)) is not None:
            errand = made.get(worker) or self._errand(worker, late.patience)
            if self._ask(errand, piece):
                if worker not in made:  # at once: it is to be ended whatever comes
                    made[worker] = errand
                    self._sent.hedges.append(errand)
                self._note_hedge(piece)
                self._asked_twice.append(piece)
                return True
        return False

    def _note_hedge(self, piece: Piece) -> None:
        if not piece.is_hedged:
            piece.is_hedged = True
            self._sent.pending.hedged.append(piece.share)

    def _give_up(self, piece: Piece) -> None:
        """A piece is left for the local replica."""
        for request in piece.waiting:
            self._left(request)
        self._over(piece)
        self._sent.pending.failed.append(piece.share)

    def _over(self, piece: Piece) -> None:
        """Nobody is waited for any more; whoever else was asked has it neither held against it nor counted."""
        for request in piece.waiting:
            request.errand.has_failed = True
            request.asked.abandon()
        piece.waiting.clear()

    def _left(self, request: Request) -> None:
        """A request whose answer is not waited for any more, though nobody was in the way of it."""
        errand, now_s, sent = request.errand, trio.current_time(), self._sent
        sent.verdicts.left(errand.worker)
        errand.entry.late += 1
        errand.entry.wait_s += now_s - sent.started_s
        waited_s = now_s - errand.begun_s
        if not errand.is_left:
            errand.is_left = True
            errand.cost.gave_up(errand.n_pairs, waited_s, self._cost.now(), errand.patience.deadline_s)
        # Short waits that somebody else ended add up: a silent worker costs one deadline, in pieces or as a whole.
        is_over = now_s >= errand.patience.ends_s and not errand.is_hedge
        if is_over or errand.cost.unanswered >= 1:
            sent.verdicts.missed(errand.worker, f"no answer within {1e3 * (now_s - sent.started_s):.0f} ms")
            errand.cost.unanswered = 0.0

    async def _take(self, settled: Request) -> None:
        """A reply is here, or never will be."""
        piece = settled.piece
        piece.waiting.remove(settled)
        values = await self._judged(settled)
        if values is not None:
            for other in piece.waiting:
                if not other.errand.is_hedge:  # it was late, and this is the hedge
                    self._left(other)
            self._over(piece)
        elif not piece.waiting:
            self._sent.pending.failed.append(piece.share)
        elif settled.errand.is_hedge:
            piece.waiting[0].errand.act_at_s = trio.current_time()  # somebody else, then

    async def _judged(self, request: Request) -> F32 | None:
        """A reply that is here, if it is one; else whoever it comes from pays for it."""
        errand, sent = request.errand, self._sent
        worker, entry, pending = errand.worker, errand.entry, sent.pending
        values: F32 | None = None
        try:
            values = await self._read(request)
        except BadReplyError as error:
            sent.verdicts.lied(worker, str(error))
            pending.liars.add(worker)
        except RequestRefusedError as refusal:
            sent.verdicts.refused(worker, refusal)
            self._refused(errand)
        except RemoteError as error:
            sent.verdicts.missed(worker, str(error))
        entry.wait_s += trio.current_time() - sent.started_s
        if values is None:
            entry.late += 1
            errand.has_failed = True
            return None
        came_at_s = request.asked.came_at_s
        begun_s = sent.started_s if errand.is_hedge else errand.begun_s
        pending.slowest_s = max(pending.slowest_s, came_at_s - begun_s)
        errand.answered(came_at_s, self._cost.now())
        audit = self._rng.random() if self._rng.random() < self._config.audit_share else None
        share = request.piece.share
        pending.answers.append(Answer(worker, share, request.sent, values, audit))
        sent.verdicts.answered(worker, len(share.flat))
        return values

    def _refused(self, errand: Errand) -> None:
        """For the next decisions a refusal is an answer that took until the local replica had computed it."""
        if errand.has_failed:
            return
        cost, n_pairs = self._cost, errand.n_pairs
        spent_s = trio.current_time() - errand.begun_s
        errand.cost.refused(n_pairs, spent_s + cost.local.expect(n_pairs, 0, cost.now()), cost.now())
