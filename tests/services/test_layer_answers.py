"""Whom a late share is asked of, when, and what is held against whom. Virtual time; experts' rows are ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.identity import NodeKey
from swarmnode.models.base import ExpertCall
from swarmnode.net.peer import Peer
from swarmnode.schedule.cost import WorkerCost
from swarmnode.schedule.sending import send_always
from swarmnode.services.account import Account, AccountedRows, StepAccount
from swarmnode.services.errands import Errand
from swarmnode.services.forward import RemoteLayer
from swarmnode.services.hedges import Hedges
from swarmnode.services.members import Members, Standing
from swarmnode.services.pending_layer import PendingLayer
from swarmnode.services.remote_experts import EXACT, RemoteExperts
from swarmnode.services.runners import Inline
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.messages import Rows
from tests.plans import plan_layer

WIDTH, N_EXPERT, K = 32, 4, 2
CONFIG = DispatchConfig(audit_share=0.0, hedges=True)


@dataclass
class Asked:
    """A request that is settled at a given time."""

    peer: Timed
    at_s: float
    n_pairs: int
    is_refused: bool
    is_abandoned: bool = False
    woken: trio.Event | None = None

    @property
    def is_settled(self) -> bool:
        return trio.current_time() >= self.at_s

    @property
    def came_at_s(self) -> float:
        return self.at_s

    async def wait_settled(self) -> None:
        await trio.sleep_until(self.at_s)

    def wake(self, event: trio.Event) -> None:
        if self.woken is None:
            trio.lowlevel.spawn_system_task(self._wake)
        self.woken = event

    async def _wake(self) -> None:
        await trio.sleep_until(self.at_s)
        assert self.woken is not None
        self.woken.set()

    async def reply(self) -> Any:
        assert self.is_settled
        self.peer.n_read += 1
        if self.is_refused:
            raise RequestRefusedError("busy", "later")
        body = memoryview(np.ones((self.n_pairs, WIDTH), np.float32).tobytes())
        return Rows("f32", self.n_pairs, 0), body

    def abandon(self) -> None:
        self.is_abandoned = True


class Timed:
    """A connection whose replies come after a while."""

    def __init__(self, number: int, took_s: float, refuses: bool = False) -> None:
        self.node_id = NodeKey.from_seed(bytes([number] * 32)).node_id
        self.settings = SimpleNamespace(encodings=("f32",), max_requests=256)
        self.rtt_s: float | None = None
        self.took_s = took_s
        self.apart_s = 0.0
        """From one reply to the next."""
        self.refuses = refuses
        self.asked: list[Asked] = []
        self.n_read = 0

    def room(self) -> int:
        return 256

    def begin(self, message: Any, body: object, traffic_class: object) -> Asked:
        at_s = trio.current_time() + self.took_s + self.apart_s * len(self.asked)
        asked = Asked(self, at_s, message.n_pairs, self.refuses)
        self.asked.append(asked)
        return asked


class Ones:
    """A bank of experts whose rows are ones."""

    def experts(self, layer: int, rows: object, pair_row: object, pair_expert: Any) -> Any:
        return np.ones((len(pair_expert), WIDTH), np.float32)


class Stand:
    """Workers, of which the first owns all experts (0 and 1 are used), and whoever else holds them too."""

    def __init__(
        self, *peers: Timed, n_rows: int = 1, max_rows: int = 512, config: DispatchConfig = CONFIG
    ) -> None:
        self.peers, self.config = peers, config
        self.members = Members(N_EXPERT, config, trio.current_time)
        self.workers = []
        for peer in peers:
            worker = self.members.announce(cast(Peer, peer), (ExpertRange(0, 0, 2),), max_rows, "CPU")
            self.members.probe_begins(worker)
            self.members.probe_passed(worker)
            self.workers.append(worker)
        self.remote = RemoteExperts(
            bytes(32), cast(ExpertBank, Ones()), Inline(), self.members, config, EXACT
        )
        self.remote.policy = send_always(config, trio.current_time)
        self.account = Account()
        rows = np.ones((n_rows, WIDTH), np.float32)
        ids = np.tile(np.arange(K, dtype=np.int32), (n_rows, 1))
        self.call = ExpertCall(0, rows, ids, np.full((n_rows, K), 0.5, np.float32))

    def cost(self, number: int) -> WorkerCost:
        return self.remote.policy.cost.worker(self.peers[number].node_id)

    def usually(self, *seconds: float) -> Stand:
        """Each worker's shares of this size have taken so long."""
        for number, took_s in enumerate(seconds):
            for _ in range(20):
                self.cost(number).add(self.call.ids.size, took_s, trio.current_time())
        return self

    async def run(
        self, *, owner: int | None = 0, by_policy: bool = False, is_second: bool = False
    ) -> PendingLayer:
        """A layer, settled. `owner`: whose all of it is (`is_second`: who is asked as the second holder); None: as the
        routing has it, or the policy.
        """
        routing, workers = self.members.routing()
        if owner is not None:
            second = 1 - owner if len(workers) > 1 else -1
            routing = replace(
                routing,
                owners={0: np.full(N_EXPERT, owner, np.int32)},
                seconds={0: np.full(N_EXPERT, second, np.int32)} if second >= 0 else {},
            )
        asked = routing
        if is_second:
            routing = replace(routing, owners=routing.seconds, seconds=routing.owners)
        policy = self.remote.policy.begin(1)
        plan = (policy.plan if by_policy else plan_layer)(asked, 0, self.call.ids)
        assert plan is not None
        step = StepAccount([AccountedRows(self.account, len(self.call.rows), len(self.call.rows))])
        pending = await self.remote.layer(RemoteLayer(self.call, plan, routing), workers, step)
        assert np.array_equal(pending.finish(), np.ones((len(self.call.rows), WIDTH), np.float32))
        pending.settle()
        step.divide(1, K)
        for number in range(len(self.peers)):
            assert (self.cost(number).in_flight, self.cost(number).n_requests) == (0, 0)
        return pending

    @property
    def n_asked(self) -> list[int]:
        return [len(peer.asked) for peer in self.peers]


async def test_a_hedge_that_wins_is_the_only_one_and_the_loser_is_told() -> None:
    """cases.md 33."""
    stand = Stand(Timed(1, 0.15), Timed(2, 0.0)).usually(0.001, 0.001)
    started_s = trio.current_time()
    pending = await stand.run()
    assert trio.current_time() - started_s == pytest.approx(CONFIG.hedge_min_s)
    assert stand.n_asked == [1, 1]
    assert len(pending.hedged) == 1
    assert not pending.failed
    assert [answer.worker for answer in pending.answers] == [stand.workers[1]]
    assert stand.peers[0].asked[0].is_abandoned
    assert stand.peers[0].n_read == 0
    assert [worker.standing for worker in stand.workers] == [Standing.SERVING] * 2
    assert (stand.account.hedged, stand.account.remote, stand.account.fallback) == (K, K, 0)


async def test_a_loser_that_was_asked_second_has_nothing_held_against_it() -> None:
    stand = Stand(Timed(1, 0.02), Timed(2, 0.3)).usually(0.001, 0.001)
    expected_s = stand.cost(1).expect(K, 0.0)
    pending = await stand.run()
    assert [answer.worker for answer in pending.answers] == [stand.workers[0]]
    assert stand.peers[1].asked[0].is_abandoned
    assert stand.cost(1).unanswered == 0
    assert stand.cost(1).expect(K, 0.0) == expected_s


async def test_a_hedge_that_is_refused_goes_to_somebody_else() -> None:
    stand = Stand(Timed(1, 0.4), Timed(2, 0.005, refuses=True), Timed(3, 0.007)).usually(0.001, 0.001, 0.002)
    started_s = trio.current_time()
    pending = await stand.run()
    assert stand.n_asked == [1, 1, 1]
    assert trio.current_time() - started_s == pytest.approx(CONFIG.hedge_min_s + 0.005 + 0.007)
    assert len(pending.hedged) == 1
    assert [answer.worker for answer in pending.answers] == [stand.workers[2]]


async def test_a_hedge_that_is_refused_by_everybody_is_computed_here() -> None:
    stand = Stand(Timed(1, 0.4), Timed(2, 0.005, refuses=True)).usually(0.001, 0.001)
    started_s = trio.current_time()
    pending = await stand.run()
    assert trio.current_time() - started_s == pytest.approx(CONFIG.hedge_min_s + 0.005)
    assert len(pending.failed) == len(pending.hedged) == 1
    assert stand.n_asked == [1, 1]
    assert stand.account.fallback == K


async def test_somebody_without_room_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(Timed(1, 0.4), Timed(2, 0.0), Timed(3, 0.0)).usually(0.001, 0.001, 0.002)
    monkeypatch.setattr(stand.peers[1], "room", lambda: 0)
    await stand.run()
    assert stand.n_asked == [1, 0, 1]


async def test_a_late_prompt_is_no_reason_to_leave_a_worker() -> None:
    """It has 30 s, and is hedged after 2: that is not four times a token's deadline."""
    stand = Stand(Timed(1, 5.0), Timed(2, 0.7), n_rows=4096, max_rows=8192).usually(0.6, 0.6)
    assert CONFIG.share_deadline_s(2 * 4096, 0) > 16
    pending = await stand.run()
    assert len(pending.hedged) == 1
    assert stand.workers[0].standing is Standing.SERVING
    assert 0 < stand.cost(0).unanswered < 0.2


async def test_a_share_in_many_pieces_is_known_by_the_layer() -> None:
    stand = Stand(Timed(1, 0.005), n_rows=32, max_rows=1)
    stand.peers[0].rtt_s = 0.004
    stand.remote.meet(tuple(stand.workers))
    await stand.run()
    assert stand.n_asked == [64]
    cost, now_s = stand.cost(0), trio.current_time()
    assert cost.late_after_s(64, now_s, 7.0) == pytest.approx(7.0 + 3 * 0.005), "one answer is known, not 64"
    for _ in range(CONFIG.hedge_samples):
        await stand.run()
    late_s = cost.late_after_s(64, trio.current_time(), 7.0)
    assert late_s is not None
    assert late_s < 0.02


async def test_a_share_in_many_pieces_lets_us_wait_once() -> None:
    stand = Stand(Timed(1, 9.0), Timed(2, 0.001), n_rows=32, max_rows=1).usually(0.02, 0.02)
    started_s = trio.current_time()
    pending = await stand.run()
    assert stand.n_asked == [64, 64]
    assert len(pending.hedged) == 64
    assert trio.current_time() - started_s < 0.06, "all were asked for again at once"
    assert 0 < stand.cost(0).unanswered < 0.2
    assert stand.workers[0].standing is Standing.SERVING


async def test_a_worker_that_never_answers_is_left_after_one_deadline_in_all() -> None:
    stand = Stand(Timed(1, 1e6), Timed(2, 0.001)).usually(0.02, 0.001)
    started_s, n_layers = trio.current_time(), 0
    while stand.workers[0].standing is Standing.SERVING:
        await stand.run()
        n_layers += 1
    assert n_layers > 2
    assert trio.current_time() - started_s < 1.5 * CONFIG.deadline_s


async def test_a_deadline_that_began_before_the_request_did_is_over_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sending to others takes time as well."""
    stand = Stand(Timed(1, 1e6))
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)

    def room() -> int:
        clock.jump(0.001)
        return 256

    monkeypatch.setattr(stand.peers[0], "room", room)
    await stand.run()
    assert stand.workers[0].standing is Standing.SUSPECT


async def test_a_worker_of_which_only_a_ping_is_known_can_be_late() -> None:
    stand = Stand(Timed(1, 1e6), Timed(2, 0.001))
    for peer in stand.peers:
        peer.rtt_s = 0.004
    stand.remote.meet(tuple(stand.workers))
    assert stand.cost(0).max_requests == 256
    started_s = trio.current_time()
    pending = await stand.run()
    assert len(pending.hedged) == 1
    assert trio.current_time() - started_s < 0.05


async def test_growing_slower_by_a_little_each_time_is_late_all_the_same() -> None:
    stand = Stand(Timed(1, 0.0), Timed(2, 0.005)).usually(0.005, 0.005)
    for number in range(100):
        stand.cost(0).add(K, 0.005 * 1.04**number, trio.current_time())
    stand.peers[0].took_s = 0.25
    started_s = trio.current_time()
    await stand.run()
    late_s = stand.cost(0).late_after_s(K, started_s, 0.0)
    assert late_s is not None
    assert late_s > 0.25, "by its own times it is in time"
    assert trio.current_time() - started_s < 0.03


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("slow", [0, 1])
async def test_late_is_what_the_other_holder_would_have_done_long_ago_whoever_was_asked(
    slow: int, is_second: bool
) -> None:
    """The slow one is used to it; it is the owner, or, where replicas are chosen or spread, the second."""
    stand = Stand(*(Timed(number + 1, 0.3 if number == slow else 0.001) for number in range(2)))
    stand.usually(*(0.3 if number == slow else 0.004 for number in range(2)))
    started_s = trio.current_time()
    pending = await stand.run(owner=slow, is_second=is_second)
    assert trio.current_time() - started_s < 0.03
    assert [answer.worker for answer in pending.answers] == [stand.workers[1 - slow]]


async def test_what_has_come_meanwhile_is_not_late() -> None:
    """The first worker is not known and slow, the second answers soon: nobody else is asked for its share."""
    stand = Stand(Timed(1, 0.3), Timed(2, 0.001))
    for _ in range(20):
        stand.cost(1).add(1, 0.001, trio.current_time())
    pending = await stand.run(owner=None)
    assert [answer.worker for answer in pending.answers] == stand.workers, "summed in the order of asking"
    assert stand.n_asked == [1, 1]
    assert stand.account.hedged == 0


async def _late_with_three_holders(act: Callable[[Stand], None]) -> Stand:
    """The first is late, the second would be sooner than the third; `act` happens while the first is waited for."""
    stand = Stand(Timed(1, 0.4), Timed(2, 0.001), Timed(3, 0.002)).usually(0.001, 0.001, 0.002)

    async def meanwhile() -> None:
        await trio.sleep(0.005)
        act(stand)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(meanwhile)
        await stand.run()
    return stand


def _gives_up_an_expert(stand: Stand) -> None:
    stand.members.announce(cast(Peer, stand.peers[1]), (ExpertRange(0, 1, 2),), 512, "CPU")


def _says_goodbye(stand: Stand) -> None:
    stand.members.leaving(cast(Peer, stand.peers[1]))


def _wants_a_pause(stand: Stand) -> None:
    stand.members.refused(stand.workers[1], RequestRefusedError("busy", "not now", 200))


@pytest.mark.parametrize("act", [_gives_up_an_expert, _says_goodbye, _wants_a_pause])
async def test_who_has_said_that_it_will_not_is_not_asked_for_what_is_late(
    act: Callable[[Stand], None],
) -> None:
    """It would refuse, rightly, and that would be held against it."""
    stand = await _late_with_three_holders(act)
    assert stand.n_asked == [1, 0, 1]


async def test_what_is_here_already_is_not_asked_when_it_would_be_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer of which the own share took longer, or one answer: nothing but the answers is looked at."""
    stand = Stand(Timed(1, 0.0), Timed(2, 0.0)).usually(0.001, 0.001)
    n_asked = 0

    def at_s(self: Hedges, errand: Errand) -> float:
        nonlocal n_asked
        n_asked += 1
        return math.inf

    monkeypatch.setattr(Hedges, "at_s", at_s)
    await stand.run()
    assert n_asked == 0
    stand.peers[0].took_s = 0.005
    await stand.run()
    assert n_asked == 1


async def test_where_nobody_else_can_be_asked_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(Timed(1, 0.1)).usually(0.001)
    monkeypatch.setattr(WorkerCost, "late_after_s", None)
    await stand.run()


async def test_a_late_share_in_many_pieces_is_weighed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` each piece would have had all of them looked at: 4,096 looks for a layer, 40 ms."""
    stand = Stand(Timed(1, 9.0), n_rows=32, max_rows=1).usually(0.02)
    n_looks = 0

    def here_s(layer: int, experts: Any) -> float:
        nonlocal n_looks
        n_looks += 1
        return 0.001

    monkeypatch.setattr(stand.remote.policy, "here_s", here_s)
    pending = await stand.run()
    assert len(pending.failed) == 64
    assert n_looks < 300


class Spawned(trio.abc.Instrument):
    """Counts tasks."""

    n = 0

    def task_spawned(self, task: object) -> None:
        self.n += 1


async def test_waiting_for_many_pieces_twice_takes_no_tasks() -> None:
    """One for each request and answer would be 64 x 128 of them for a layer, and a peer decides how many pieces."""
    stand = Stand(Timed(1, 9.0), Timed(2, 0.001), n_rows=32, max_rows=1).usually(0.02, 0.02)
    stand.peers[1].apart_s = 0.0001
    spawned = Spawned()
    trio.lowlevel.add_instrument(spawned)
    try:
        await stand.run()
    finally:
        trio.lowlevel.remove_instrument(spawned)
    assert stand.n_asked == [64, 64]
    assert spawned.n < 300, "of which 128 are the replies of this test"


async def test_whose_large_shares_are_slow_is_not_asked_for_them_again_and_again() -> None:
    """Both answer probes alike. Asked by those it would be late each time, and leave for it though it answers."""
    stand = Stand(Timed(1, 0.03), Timed(2, 0.003), n_rows=8)
    for number in range(2):
        stand.cost(number).probed(0.003, trio.current_time())
    started_s = trio.current_time()
    for _ in range(100):
        await stand.run(owner=None, by_policy=True)
    assert stand.workers[0].standing is Standing.SERVING
    assert stand.n_asked[0] < 10
    assert (trio.current_time() - started_s) / 100 < 0.006


async def test_a_fault_of_ours_in_the_middle_of_asking_leaves_nothing_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Stand(Timed(1, 9.0), Timed(2, 0.001), n_rows=2, max_rows=2).usually(0.02, 0.02)
    begin, second = stand.peers[1].begin, stand.peers[1]

    def faulty(message: Any, body: object, traffic_class: object) -> Asked:
        if second.asked:
            raise ValueError("ours")
        return begin(message, body, traffic_class)

    monkeypatch.setattr(second, "begin", faulty)
    with pytest.raises(ValueError, match="ours"):
        await stand.run()
    assert stand.n_asked == [2, 1]
    assert all(asked.is_abandoned for peer in stand.peers for asked in peer.asked)
    assert [(stand.cost(n).in_flight, stand.cost(n).n_requests) for n in range(2)] == [(0, 0)] * 2
