"""The backbone's table of workers: what a worker did is not forgotten because it said something new."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from swarmnode.config import DispatchConfig
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.peer import Peer
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


def test_a_new_announcement_leaves_a_serving_worker_in_routing(members: Members) -> None:
    worker = serving(members, peer := connection())
    members.announce(peer, MORE, 64, "CPU")
    assert members.routing()[1] == (worker,)
    assert routed_experts(members) == [0, 1], "what it claims anew is still to be probed"
    assert members.probe_begins(worker) == {0: {2}}
    members.probe_passed(worker)
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
