"""The prober asks for what is not proven yet, and takes no answer for more than it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.errors import ConnectionLostError
from swarmnode.identity import NodeKey
from swarmnode.net.peer import Peer
from swarmnode.services.members import Members, Standing
from swarmnode.services.prober import Prober
from swarmnode.services.runners import Inline
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.messages import Experts, Rows

N_EMBD = 8
OLD, NEW = ExpertRange(0, 0, 60), ExpertRange(1, 5, 2)


@dataclass
class Zeros:
    """A worker's connection and our bank in one: both compute zeros."""

    node_id: Any = NodeKey.from_seed(bytes(32)).node_id
    meanwhile: Callable[[], None] = lambda: None
    """Happens while a probe is on its way."""
    encoding: str = "f32"
    probed: list[tuple[int, int]] = field(default_factory=list)

    async def request(self, message: Experts, body: object) -> tuple[Rows, memoryview]:
        await trio.sleep(0.1)
        self.meanwhile()
        n_bytes = {"f32": 4, "f16": 2}[self.encoding] * N_EMBD
        return Rows(self.encoding, 1, 0), memoryview(bytes(n_bytes))

    def experts(
        self, layer: int, row: object, pair_row: object, pair_expert: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        self.probed.append((layer, int(pair_expert[0])))
        return np.zeros((1, N_EMBD), np.float32)


@dataclass
class Probed:
    """A prober with one worker."""

    peer: Zeros
    members: Members
    prober: Prober

    def announce(self, *ranges: ExpertRange) -> None:
        self.prober.watch(self.members.announce(cast(Peer, self.peer), ranges, 64, "CPU"))

    def is_routed(self, item: ExpertRange) -> bool:
        owners = self.members.routing()[0].owners.get(item.layer)
        return owners is not None and bool((owners[item.first : item.stop] >= 0).all())


@pytest.fixture
def probed() -> Probed:
    """Of a model with 64 experts a layer."""
    peer, config = Zeros(), DispatchConfig()
    members = Members(64, config, trio.current_time)
    prober = Prober(bytes(32), N_EMBD, cast(ExpertBank, peer), Inline(), members, config)
    return Probed(peer, members, prober)


async def test_what_is_claimed_anew_is_probed_soon_and_only_then_routed(probed: Probed) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(probed.prober.run)
        probed.announce(OLD)
        await trio.sleep(0.2)
        assert probed.is_routed(OLD)
        probed.announce(OLD, NEW)
        assert probed.is_routed(OLD)
        assert not probed.is_routed(NEW)
        await trio.sleep(1.1)
        assert probed.is_routed(NEW)
        nursery.cancel_scope.cancel()
    (_, (layer, expert)) = probed.peer.probed
    assert layer == NEW.layer
    assert expert in NEW.experts


async def test_what_is_claimed_during_a_probe_is_probed_next(probed: Probed) -> None:
    def claim() -> None:
        probed.peer.meanwhile = lambda: None
        probed.announce(OLD, NEW)

    probed.peer.meanwhile = claim
    async with trio.open_nursery() as nursery:
        await nursery.start(probed.prober.run)
        probed.announce(OLD)
        await trio.sleep(0.15)
        assert probed.is_routed(OLD)
        assert not probed.is_routed(NEW), "the probe was of what had been claimed before"
        await trio.sleep(1.1)
        assert probed.is_routed(NEW)
        nursery.cancel_scope.cancel()
    assert [layer for layer, _ in probed.peer.probed] == [OLD.layer, NEW.layer]


async def test_between_two_probes_there_is_a_tick(probed: Probed) -> None:
    """However often the node comes and goes, and claims something new."""
    times_s: list[float] = []
    probed.peer.meanwhile = lambda: times_s.append(trio.current_time())
    async with trio.open_nursery() as nursery:
        await nursery.start(probed.prober.run)
        for number in range(100):
            probed.announce(ExpertRange(number % 2, number % 60, 2))
            await trio.sleep(0.07)
            if number % 3 == 0:
                probed.members.leaving(cast(Peer, probed.peer))
        nursery.cancel_scope.cancel()
    assert len(times_s) > 3
    assert min(np.diff(times_s)) >= DispatchConfig().probe_tick_s


async def test_a_probe_answered_in_another_encoding_is_wrong(probed: Probed) -> None:
    probed.peer.encoding = "f16"
    async with trio.open_nursery() as nursery:
        await nursery.start(probed.prober.run)
        probed.announce(OLD)
        await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    (worker,) = probed.members.workers
    assert worker.standing is Standing.QUARANTINED
    assert "f16" in worker.reason


async def test_a_pause_is_not_shortened_by_coming_back(probed: Probed) -> None:
    """A node whose probes fail is not probed sooner because it left and announced again."""
    times_s: list[float] = []

    def fail() -> None:
        times_s.append(trio.current_time())
        raise ConnectionLostError("no answer")

    probed.peer.meanwhile = fail
    async with trio.open_nursery() as nursery:
        await nursery.start(probed.prober.run)
        for _ in range(600):
            probed.announce(OLD)
            await trio.sleep(0.05)
            probed.members.leaving(cast(Peer, probed.peer))
        nursery.cancel_scope.cancel()
    assert 3 <= len(times_s) <= 5, "after 2, 4, 8 seconds"
