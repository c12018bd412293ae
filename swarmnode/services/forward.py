"""One forward pass, cut where rows have to travel. Runs on the compute thread; knows no trio and no sockets.

`ForwardPass.advance` runs the model until a layer needs other nodes (`RemoteLayer`) or the logits are there. Layers
whose experts are all local never leave the compute thread, so a swarm of nobody costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.combine import combine_top_k
from swarmnode.compute.expert_graph import StackedExperts
from swarmnode.models.base import ExpertCall, Model, Part
from swarmnode.schedule.dispatch import DispatchPlan, Routing, Share, unowned
from swarmnode.schedule.sending import Planner, SendPolicy
from swarmnode.wire.constants import TrafficClass

F32: TypeAlias = npt.NDArray[np.float32]
I32: TypeAlias = npt.NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteLayer:
    """A layer some of whose pairs belong to workers."""

    call: ExpertCall
    plan: DispatchPlan
    routing: Routing = field(default_factory=Routing)
    """By which it was planned."""
    stopped_s: float = 0.0
    """When the pass stopped for it, on the cost model's clock."""
    explores: bool = False
    """It is sent to learn how long that takes."""
    has_answers: bool = False
    """Rows of answers are in it, for each of whose tokens somebody waits; else all are of prompts."""

    @property
    def traffic_class(self) -> TrafficClass:
        """Before whose rows it travels: not by its size, as a step has rows of any number of answers."""
        return TrafficClass.DECODE if self.has_answers else TrafficClass.PREFILL


@dataclass
class Combiner:
    """Collects the parts of one layer and sums them.

    `experts` form: unweighted rows per pair, summed over k in k order: bit-equal to the local graph.
    `partial` form: one weighted sum per row and party, added in the order of `add`: equal to the local result up to
    float32 rounding of the regrouped sum.
    """

    call: ExpertCall
    exact: bool
    _pairs: F32 = field(init=False)
    _sum: F32 | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        n_rows, k = self.call.ids.shape
        if self.exact:
            self._pairs = np.empty((n_rows * k, self.call.rows.shape[1]), np.float32)

    def add(self, share: Share, values: F32) -> None:
        """Take the result for a share: f32 [P, n_embd] in the `experts` form, f32 [R, n_embd] in `partial`."""
        if self.exact:
            self._pairs[share.flat] = values
            return
        if self._sum is None:
            self._sum = np.zeros_like(self.call.rows)
        if len(self._sum) == 1:
            self._sum += values
        else:
            self._sum[share.rows] += values

    def result(self) -> F32:
        """The layer's routed output, f32 [T, n_embd]. Every pair must have been added."""
        if self._sum is not None:
            return self._sum
        n_rows, k = self.call.ids.shape
        return combine_top_k(self._pairs.reshape(n_rows, k, -1), self.call.weights)


def share_rows(call: ExpertCall, share: Share) -> F32:
    """The rows of a share, f32 [R, n_embd], C order; not to be written to."""
    return call.rows if len(call.rows) == 1 else call.rows[share.rows]


def share_weights(call: ExpertCall, share: Share) -> F32:
    """The gate's weights of a share's pairs, f32 [P]."""
    return call.weights.ravel()[share.flat]


def compute_share(bank: ExpertBank, call: ExpertCall, share: Share, exact: bool) -> F32:
    """Compute a share on the local replica: f32 [P, n_embd] (`experts`) or f32 [R, n_embd] (`partial`)."""
    rows = share_rows(call, share)
    if exact:
        return bank.experts(call.layer, rows, share.pair_row, share.pair_expert)
    return bank.partial(call.layer, rows, share.pair_row, share.pair_expert, share_weights(call, share))


class Paused:
    """A pass of several rows after one of its layers: others may have the compute thread now."""


@dataclass(frozen=True)
class TakeFailure:
    """What a part's `take` raised. The pass is over, and the other parts have theirs."""

    error: Exception


@dataclass(frozen=True)
class Finished(Generic[T]):
    """The end of a pass, and what was made of each part's logits: None where none were wanted."""

    values: list[T | TakeFailure | None]


class ForwardPass(Generic[T]):
    """One `Model.forward_batch` in progress. Each `take` makes a result of its part's logits, f32 [n_out, n_vocab]; it
    is not called where none are wanted.
    """

    def __init__(
        self,
        model: Model,
        bank: ExpertBank,
        parts: Sequence[Part],
        takes: Sequence[Callable[[F32], T]],
        policy: SendPolicy,
        *,
        counts: bool = False,
    ) -> None:
        """`policy`: what is sent out; `counts`: keep what the gate chose in `chosen` and `unmet`."""
        self._bank = bank
        self._policy = policy
        self._now = policy.cost.now
        self._planner: Planner | None = None
        self._takes = takes
        self._n_parts = len(parts)
        self.n_rows = sum(len(part.tokens) for part in parts)
        """Tokens in it."""
        self._has_answers = any(len(part.tokens) == 1 or part.tentative for part in parts)
        self._n_used = model.n_expert_used
        self._routing = Routing()
        self._steps: Generator[ExpertCall, F32, list[F32]] = model.forward_batch(
            parts, stacked=self._stacked, chosen=self._keep_fused if counts else None
        )
        self._routed: F32 | None = None
        """The routed output that a pause has kept back."""
        self._counts = counts
        self.explored_s = 0.0
        """Spent on layers that were computed here only to learn how long that takes."""
        self.chosen: list[tuple[int, I32]] = []
        """Layer and expert ids, of all pairs."""
        self.fused: list[tuple[int, I32]] = []
        """Those of layers that were computed in the pass's own graph, of which the policy is not told."""
        self.unmet: list[tuple[int, I32]] = []
        """Those of pairs that no worker could have been asked for."""

    def advance(
        self, routing: Routing, finish: Callable[[], F32] | None = None
    ) -> RemoteLayer | Paused | Finished[T]:
        """Go on to the next layer that needs a worker, to a pause, or to the end.

        `routing` is a snapshot taken on the trio side right before: Members must not be touched from this thread.
        `finish` makes the routed output, f32 [T, n_embd], of the RemoteLayer returned before; None otherwise.
        """
        planner = self._planner = self._planner or self._policy.begin(self._n_parts)
        self._routing = routing
        routed = self._routed if finish is None else finish()
        self._routed = None
        try:
            call = next(self._steps) if routed is None else self._steps.send(routed)
            while True:
                plan = planner.plan(routing, call.layer, call.ids)
                if self._counts:
                    self._keep(call.layer, call.ids)
                if plan is not None:
                    return RemoteLayer(
                        call, plan, routing, self._now(), planner.is_exploring, self._has_answers
                    )
                routed = self._local(call, planner.is_exploring)
                if len(call.rows) > 1:
                    self._routed = routed
                    return Paused()
                call = self._steps.send(routed)
        except StopIteration as end:
            logits: list[F32] = end.value
            return Finished([_taken(take, out) for take, out in zip(self._takes, logits, strict=True)])

    def end(self) -> None:
        """It is over, or given up. Trio's thread, while `advance` does not run."""
        if self._planner is not None:
            self._planner.ended()

    def _local(self, call: ExpertCall, explores: bool) -> F32:
        started_s = self._now()
        routed = self._bank.moe(call.layer, call.rows, call.ids, call.weights)
        spent_s = self._now() - started_s
        self._policy.computed(call.layer, call.ids.ravel(), spent_s)
        if explores:
            self.explored_s += spent_s
        return routed

    def _keep(self, layer: int, ids: I32) -> None:
        self.chosen.append((layer, ids))
        self.unmet.append((layer, unowned(self._routing, layer, ids)))

    def _keep_fused(self, layer: int, ids: I32) -> None:
        self._keep(layer, ids)
        self.fused.append((layer, ids))

    def _stacked(self, layer: int) -> StackedExperts | None:
        """For a pass of one token: the experts of a layer that is computed here whatever the gate chooses."""
        if self._planner is None or not self._planner.fuses(self._routing, layer):
            return None
        return self._bank.stacked(layer, self._n_used)


def _taken(take: Callable[[F32], T], logits: F32) -> T | TakeFailure | None:
    """What is made of a part's logits, which may be none. One that fails must not take the others along."""
    if not len(logits):
        return None
    try:
        return take(logits)
    except Exception as error:  # it is raised where this part's result is awaited
        return TakeFailure(error)


F16_QUANTUM = 2.0**-24
"""Spacing of the smallest f16 numbers: an honest f16 row may differ by this however large its relative error is."""


def rows_agree(expected: F32, got: F32, max_error: float) -> bool:
    """Whether a worker's row f32 [n_embd] is the one computed here: |got - expected| <= max_error * |expected|.

    Or the largest difference is less than f16 can show. Unlike a cosine this sees a wrong scale. NaN never agrees.
    """
    difference = got.astype(np.float64) - expected
    if float(np.abs(difference).max()) <= 4 * F16_QUANTUM:
        return True
    return bool(np.linalg.norm(difference) <= max_error * np.linalg.norm(expected.astype(np.float64)))
