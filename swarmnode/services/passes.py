"""One forward pass of rows of several sequences through model and swarm: one dispatch a layer for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.errors import NotFiniteError
from swarmnode.models.base import Model, Part
from swarmnode.schedule.dispatch import Routing
from swarmnode.services.account import Account, AccountedRows, StepAccount
from swarmnode.services.demand import DemandWatch
from swarmnode.services.forward import Finished, ForwardPass, RemoteLayer, TakeFailure
from swarmnode.services.members import Members, Worker
from swarmnode.services.remote_experts import RemoteExperts
from swarmnode.services.resident_experts import ResidentExperts
from swarmnode.services.runners import BRIEF_S, Brief, Runner
from swarmnode.services.stage_times import Stage, StageTimes

F32: TypeAlias = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """What one sequence has in a pass: tokens behind those that its slot holds.

    `take` makes the result of logits f32 [n_out, n_vocab], on the compute thread: to sort 248,320 of them takes
    milliseconds in which no message would be read.
    """

    slot: int
    tokens: Sequence[int]
    n_out: int
    """Logits wanted, of the last tokens: 0, 1 or all."""
    take: Callable[[F32], Any]
    account: Account
    tentative: bool = False
    """A draft, see Part: `take` has to accept what it keeps. It may get fewer logits than there are tokens: see
    `shortened`."""

    def shortened(self, n_tokens: int) -> Rows:
        """The first `n_tokens` of a draft. The first alone is run for sure, so that there is nothing to accept."""
        return replace(self, tokens=self.tokens[:n_tokens], n_out=n_tokens, tentative=n_tokens > 1)


@dataclass(frozen=True)
class PassTimes:
    """Where the time of a pass went, in seconds."""

    compute_s: float
    """On the compute thread."""
    wait_s: float
    """For workers. Neither counts layers done only to learn how long that takes: nothing follows from those."""


class PassRunner(Protocol):
    """What runs passes: `Passes`, or a test's."""

    async def run(self, rows: Sequence[Rows]) -> tuple[list[Any], PassTimes]:
        """Results of all `take`s: None where no logits are wanted, a TakeFailure where one raised."""
        ...


class Passes:
    """Passes of one model over the local bank and the workers there are."""

    def __init__(
        self,
        model: Model,
        bank: ExpertBank,
        compute: Runner,
        members: Members,
        remote: RemoteExperts,
        demand: DemandWatch | None = None,
        residents: ResidentExperts | None = None,
    ) -> None:
        self._model = model
        self._bank = bank
        self._compute = compute
        self._members = members
        self.remote = remote
        self._demand = demand
        self._residents = residents
        self._n_under_way = 0
        self._stage_times = StageTimes()

    async def run(self, rows: Sequence[Rows]) -> tuple[list[Any], PassTimes]:
        """See PassRunner. Raises what `Model.forward_batch` raises; whatever workers do, the rows are right."""
        wanted = self._demand is not None and self._demand.wants_pass()
        prompts = [item for item in rows if len(item.tokens) > 1 and not item.tentative]
        counts = wanted or (self._residents is not None and bool(prompts))
        policy = self.remote.policy
        parts = [Part(item.slot, item.tokens, item.n_out, item.tentative) for item in rows]
        forward = ForwardPass(
            self._model, self._bank, parts, [item.take for item in rows], policy, counts=counts
        )
        account = StepAccount([self._accounted(item) for item in rows])
        self._n_under_way += 1
        policy.n_passes = self._n_under_way
        began_s = trio.current_time()
        try:
            values, times = await self._advance(forward, account, wanted)
        except NotFiniteError as error:
            if not account.helpers:
                raise
            raise _suspecting(error, account.helpers) from error
        finally:
            forward.end()
            policy.passed((trio.current_time() - began_s) / self._n_under_way)
            self._n_under_way -= 1
            policy.n_passes = self._n_under_way
        account.divide(self._model.n_layer, self._model.n_expert_used)
        if wanted and self._demand is not None:
            self._demand.count(forward.chosen, forward.unmet)
        if counts and self._residents is not None:
            self._residents.count(forward.chosen, forward.fused, any(item.n_out for item in prompts))
        return [_with_suspects(value, account.helpers) for value in values], times

    def _accounted(self, rows: Rows) -> AccountedRows:
        """An MTP block looks at what every token becomes behind the last layer, so all of them go through it."""
        n_tokens = len(rows.tokens)
        return AccountedRows(rows.account, n_tokens, n_tokens if self._model.has_mtp else rows.n_out)

    def _routing(self) -> tuple[Routing, tuple[Worker, ...]]:
        routing, workers = self._members.routing()
        self.remote.meet(workers)
        return routing, workers

    async def _advance(
        self, forward: ForwardPass[Any], account: StepAccount, counts: bool
    ) -> tuple[list[Any], PassTimes]:
        explored_s = 0.0
        n_rows = forward.n_rows
        timed = partial(_timed, self.remote.policy.cost.now)  # the clock that `forward.explored_s` is of
        routing, workers = self._routing()
        stage = Stage(n_rows, -1)
        result, compute_s = await self._run_stage(stage, partial(timed, partial(forward.advance, routing)))
        while not isinstance(result, Finished):
            pending, finish = None, None
            if isinstance(result, RemoteLayer):
                stage = Stage(n_rows, result.call.layer)
                waited_s = account.wait_s
                pending = await self.remote.layer(result, workers, account)
                if result.explores:
                    explored_s += account.wait_s - waited_s
                finish = pending.finish
            routing, workers = self._routing()
            advance = partial(timed, partial(forward.advance, routing, finish))
            try:
                result, spent_s = await self._run_stage(stage, advance)
            finally:  # who was found lying is not forgotten because the pass failed
                if pending is not None:
                    pending.settle()
            compute_s += spent_s
            if pending is not None and counts:
                forward.unmet += pending.unmet
        return result.values, PassTimes(compute_s - forward.explored_s, account.wait_s - explored_s)

    async def _run_stage(self, stage: Stage, work: Callable[[], tuple[T, float]]) -> tuple[T, float]:
        """On the compute thread; or here while no answer of a worker can come that would be noticed too late."""
        is_brief = self._n_under_way == 1 and self._stage_times.expected_s(stage) < BRIEF_S
        result, spent_s = await self._compute.run(Brief(work) if is_brief else work)
        self._stage_times.add(stage, spent_s)
        return result, spent_s


def _suspecting(error: NotFiniteError, helpers: Sequence[str]) -> NotFiniteError:
    """The error, and who may have caused it: these workers computed rows of the pass."""
    if not helpers:
        return error
    message = f"{error}; or one of these workers, which computed rows of the pass: "
    return NotFiniteError(message + ", ".join(helpers))


def _with_suspects(value: Any, helpers: Sequence[str]) -> Any:
    """The same for numbers that were found bad only when a token was drawn from them."""
    if isinstance(value, TakeFailure) and isinstance(value.error, NotFiniteError):
        return TakeFailure(_suspecting(value.error, helpers))
    return value


def _timed(now: Callable[[], float], function: Callable[[], T]) -> tuple[T, float]:
    started_s = now()
    result = function()
    return result, now() - started_s
