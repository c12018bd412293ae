"""The backbone's table of workers: what a worker did is not forgotten because it said something new."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from swarmnode.config import DispatchConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.peer import Peer
from swarmnode.schedule.dispatch import Routing, build_routing
from swarmnode.services.members import Members, Standing, Worker
from swarmnode.weights.slices import ExpertRange

CONFIG = DispatchConfig()
FEW, MORE = (ExpertRange(0, 0, 2),), (ExpertRange(0, 0, 3),)


class Clock:
    """Seconds, as a test moves them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """At zero."""
    return Clock()


@pytest.fixture
def members(clock: Clock) -> Members:
    """Of a model with four experts a layer."""
    return Members(4, CONFIG, clock)


def connection(number: int = 0) -> Peer:
    """Another connection of a node; the table asks it for nothing but the node's id."""
    return cast(Peer, SimpleNamespace(node_id=NodeKey.from_seed(bytes([number] * 32)).node_id))


def serving(members: Members, peer: Peer) -> Worker:
    """A worker that has announced and answered a probe."""
    worker = members.announce(peer, FEW, 64, "CPU")
    pass_a_probe(members, worker)
    return worker


def pass_a_probe(members: Members, worker: Worker) -> None:
    members.probe_begins(worker)
    members.probe_passed(worker)


def routed_experts(members: Members) -> list[int]:
    """Of layer 0."""
    owners = members.routing()[0].owners.get(0, np.array([]))
    return [int(expert) for expert in np.flatnonzero(owners >= 0)]


def test_a_new_announcement_leaves_a_serving_worker_in_routing(members: Members, clock: Clock) -> None:
    worker = serving(members, peer := connection())
    members.announce(peer, MORE, 64, "CPU")
    assert members.routing()[1] == (worker,)
    assert routed_experts(members) == [0, 1], "what it claims anew is still to be probed"
    assert members.probe_begins(worker) == {0: {2}}
    members.probe_passed(worker)
    clock.now_s += CONFIG.rebuild_s
    assert routed_experts(members) == [0, 1, 2]
    members.announce(peer, FEW, 64, "CPU")
    assert not worker.unproven
    assert routed_experts(members) == [0, 1]


def test_what_was_given_up_is_proven_again(members: Members) -> None:
    worker = serving(members, peer := connection())
    for ranges in ((ExpertRange(0, 0, 1),), FEW):
        members.announce(peer, ranges, 64, "CPU")
    assert worker.unproven == {0: {1}}
    assert routed_experts(members) == [0]


def test_a_probe_says_nothing_of_what_was_claimed_after_it_began(members: Members) -> None:
    worker = members.announce(peer := connection(), (ExpertRange(0, 0, 3),), 64, "CPU")
    members.probe_begins(worker)
    for ranges in ((ExpertRange(0, 0, 2),), (ExpertRange(0, 0, 4),)):
        members.announce(peer, ranges, 64, "CPU")
    members.probe_passed(worker)
    assert worker.unproven == {0: {2, 3}}, "2 was given up meanwhile"
    assert routed_experts(members) == [0, 1]


def test_wrong_numbers_unprove_everything(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    members.quarantine(worker, "wrong numbers")
    clock.now_s = CONFIG.quarantine_s
    assert members.probe_begins(worker) == worker.unproven == {0: {0, 1}}


def test_a_deadline_missed_across_an_announcement_counts(members: Members) -> None:
    asked = serving(members, peer := connection())
    members.announce(peer, MORE, 64, "CPU")
    members.missed(asked, "no answer")
    (known,) = members.workers
    assert known.standing is Standing.SUSPECT
    assert members.routing()[1] == ()


def test_wrong_numbers_found_after_a_reconnection_still_quarantine(members: Members) -> None:
    asked = serving(members, old := connection())
    serving(members, connection())
    members.disconnected(old)
    members.quarantine(asked, "wrong numbers")
    (known,) = members.workers
    assert known.standing is Standing.QUARANTINED
    assert members.routing()[1] == ()


def test_wrong_numbers_are_told_to_whoever_keeps_what_was_made_of_them(members: Members) -> None:
    told: list[NodeId] = []
    members.on_betrayal = told.append
    worker = serving(members, connection())
    members.quarantine(worker, "wrong numbers")
    assert told == [worker.node_id]


def test_quarantine_ends_with_its_time_and_a_right_answer(members: Members, clock: Clock) -> None:
    worker = serving(members, peer := connection())
    members.quarantine(worker, "wrong numbers")
    members.announce(peer, MORE, 64, "CPU")
    pass_a_probe(members, worker)
    assert members.routing()[1] == ()
    clock.now_s = CONFIG.quarantine_s
    pass_a_probe(members, worker)
    assert members.routing()[1] == (worker,)


# -- what brings nothing

BUSY = RequestRefusedError("busy", "later", 200)
AT_ONCE = RequestRefusedError("overflow", "too large")


def test_who_is_busy_gets_no_rows_before_it_wants_to_be_asked_again(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    clock.now_s = 10
    assert routed_experts(members) == [0, 1]
    members.refused(worker, BUSY)
    assert routed_experts(members) == []
    assert worker.answered_at_s == 0, "a refusal is no answer"
    clock.now_s += 0.19
    assert routed_experts(members) == []
    clock.now_s += CONFIG.rebuild_s
    assert routed_experts(members) == [0, 1]
    assert worker.standing is Standing.SERVING


def test_refusals_in_a_row_take_a_worker_out_and_each_pause_is_twice_as_long(
    members: Members, clock: Clock
) -> None:
    worker = serving(members, connection())
    for _ in range(CONFIG.refusals_in_a_row - 1):
        members.refused(worker, AT_ONCE)
    assert routed_experts(members) == [0, 1]
    for pause_s in (1, 2, 4):
        members.refused(worker, AT_ONCE)
        assert worker.standing is Standing.SUSPECT
        clock.now_s += pause_s - 0.01
        assert not members.may_probe(worker)
        pass_a_probe(members, worker)  # one that was under way
        assert worker.standing is Standing.SUSPECT
        clock.now_s += 0.02
        assert members.may_probe(worker)
        pass_a_probe(members, worker)
        assert routed_experts(members) == [0, 1]
    members.computed(worker, 1, is_whole=True)
    members.refused(worker, AT_ONCE)
    assert worker.standing is Standing.SERVING, "not in a row any more"


def miss(members: Members, clock: Clock, worker: Worker) -> float:
    """Let the worker miss a deadline and come back after its pause; seconds of that."""
    members.missed(worker, "no answer")
    pause_s = worker.past.until_s - clock.now_s
    clock.now_s = worker.past.until_s
    pass_a_probe(members, worker)
    return pause_s


def work(members: Members, clock: Clock, worker: Worker, seconds: float, every_s: float = 0.25) -> None:
    """Let the worker answer a layer every so often for so long."""
    for _ in range(round(seconds / every_s)):
        clock.now_s += every_s
        members.computed(worker, 1, is_whole=True)


def test_a_minute_of_work_makes_the_next_pause_one_step_shorter(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    assert [miss(members, clock, worker) for _ in range(4)] == [1, 2, 4, 8]
    work(members, clock, worker, CONFIG.forgiven_after_s - 1)
    assert miss(members, clock, worker) == 16, "a second is missing"
    work(members, clock, worker, CONFIG.forgiven_after_s)
    assert miss(members, clock, worker) == 16
    work(members, clock, worker, 3 * CONFIG.forgiven_after_s)
    assert miss(members, clock, worker) == 4
    work(members, clock, worker, 10 * CONFIG.forgiven_after_s)
    assert miss(members, clock, worker) == 1


def test_the_longest_pause_is_no_further_away_after_a_hundred_more(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    for _ in range(100):
        miss(members, clock, worker)
    work(members, clock, worker, 8 * CONFIG.forgiven_after_s)
    assert miss(members, clock, worker) == 1


def test_many_answers_in_no_time_forgive_nothing(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    assert miss(members, clock, worker) == 1
    for _ in range(10_000):
        members.computed(worker, 1, is_whole=True)
    assert miss(members, clock, worker) == 2


def test_time_in_which_nothing_was_asked_forgives_nothing(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    assert miss(members, clock, worker) == 1
    work(members, clock, worker, 1000, every_s=100)
    assert miss(members, clock, worker) == 2


def test_part_of_a_layer_is_no_work(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    assert miss(members, clock, worker) == 1
    for _ in range(1000):
        clock.now_s += 0.5
        members.computed(worker, 1, is_whole=False)
    assert miss(members, clock, worker) == 2
    assert worker.tally.pairs == 1000


def test_pauses_are_bounded(members: Members, clock: Clock) -> None:
    worker = serving(members, connection())
    for _ in range(200):
        members.missed(worker, "no answer")
        pause_s = worker.past.until_s - clock.now_s
        clock.now_s = worker.past.until_s
        pass_a_probe(members, worker)
    assert pause_s == CONFIG.suspect_max_s


def test_requests_under_way_together_count_once(members: Members) -> None:
    worker = serving(members, connection())
    for _ in range(5):
        members.refused(worker, BUSY)
    assert worker.past.in_vain == 1
    for _ in range(5):
        members.missed(worker, "no answer")
    assert worker.past.strikes == 0
    assert worker.standing is Standing.SUSPECT


@pytest.mark.parametrize("same_connection", [True, False])
def test_a_pause_outlives_leaving(members: Members, clock: Clock, same_connection: bool) -> None:
    worker = serving(members, peer := connection())
    members.missed(worker, "no answer")
    members.leaving(peer)
    again = members.announce(peer if same_connection else connection(), FEW, 64, "CPU")
    assert (again.standing, again.reason) == (Standing.SUSPECT, "no answer")
    pass_a_probe(members, again)
    assert members.routing()[1] == ()
    clock.now_s += 1
    pass_a_probe(members, again)
    assert members.routing()[1] == (again,)
    members.missed(again, "no answer")
    assert again.past.until_s == clock.now_s + 2


def test_what_was_asked_before_a_node_left_counts_after_it_came_back(members: Members) -> None:
    asked = serving(members, peer := connection())
    members.leaving(peer)
    again = serving(members, peer)
    members.missed(asked, "no answer")
    assert again.standing is Standing.SUSPECT
    assert not members.may_probe(again)


def test_pasts_are_forgotten_in_time_and_few(
    members: Members, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.services.members.MAX_PASTS", 3)
    peers = [connection(number) for number in range(5)]
    for peer in peers:
        members.missed(serving(members, peer), "no answer")
        members.leaving(peer)
    standings = [members.announce(peer, FEW, 64, "CPU").standing for peer in peers]
    assert standings == [Standing.ATTACHED] * 2 + [Standing.SUSPECT] * 3
    members.leaving(peers[4])
    clock.now_s = CONFIG.quarantine_s
    assert members.announce(peers[4], FEW, 64, "CPU").standing is Standing.ATTACHED


def test_quarantines_end_in_time_and_are_bounded(
    members: Members, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.services.members.MAX_QUARANTINED", 3)
    workers = [serving(members, connection(number)) for number in range(5)]
    for worker in (*workers, workers[2]):
        clock.now_s += 1
        members.quarantine(worker, "wrong numbers")
    assert [members.is_quarantined(worker) for worker in workers] == [False, False, True, True, True]
    clock.now_s = CONFIG.quarantine_s + 5
    assert [members.is_quarantined(worker) for worker in workers] == [False, False, True, False, False]


# -- when the routing is made anew


def test_the_same_announcement_changes_nothing(members: Members, clock: Clock) -> None:
    serving(members, peer := connection())
    before = members.routing()[0]
    clock.now_s += 1
    members.announce(peer, FEW, 64, "CPU")
    assert members.routing()[0] is before


def test_losses_are_local_at_once_and_gains_wait(members: Members, clock: Clock) -> None:
    first, second = serving(members, connection(1)), serving(members, connection(2))
    made = members.routing()[0]
    assert made.owners[0].tolist() == [0, 1, -1, -1]
    clock.now_s += 0.1
    members.announce(first.peer, (ExpertRange(0, 1, 1),), 64, "CPU")
    third = serving(members, connection(3))
    routing, workers = members.routing()
    assert routing.owners[0].tolist() == [-1, 1, -1, -1]
    assert workers == (first, second)
    assert made.owners[0].tolist() == [0, 1, -1, -1], "whoever has it keeps it"
    members.missed(second, "no answer")
    assert members.routing()[0].owners == {}
    clock.now_s += CONFIG.rebuild_s
    routing, workers = members.routing()
    assert workers == (first, third)
    assert routing.owners[0].tolist() == [1, 0, -1, -1]


def test_a_routing_is_made_twice_a_second_at_most(
    members: Members, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_made = 0

    def counting(*arguments: Any) -> Routing:
        nonlocal n_made
        n_made += 1
        return build_routing(*arguments)

    monkeypatch.setattr("swarmnode.services.members.build_routing", counting)
    worker = serving(members, connection())
    for number in range(1000):
        clock.now_s += 0.01
        members.announce(worker.peer, MORE if number % 2 else FEW, 64, "CPU")
        pass_a_probe(members, worker)
        members.routing()
    assert n_made <= 1 + 10 / CONFIG.rebuild_s
