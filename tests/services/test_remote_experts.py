"""How long a worker's rows are waited for: as long as they may take in the encoding spoken with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import DispatchConfig
from swarmnode.identity import NodeKey
from swarmnode.models.base import ExpertCall
from swarmnode.net.peer import Peer
from swarmnode.schedule.dispatch import plan_layer
from swarmnode.services.account import StepAccount
from swarmnode.services.forward import RemoteLayer
from swarmnode.services.members import Members
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.runners import Inline
from swarmnode.weights.slices import ExpertRange

N_ROWS, N_EMBD = 512, 3072


class Mute:
    """A connection over which no reply comes."""

    def __init__(self, encodings: tuple[str, ...]) -> None:
        self.node_id = NodeKey.from_seed(bytes(32)).node_id
        self.settings = SimpleNamespace(encodings=encodings)
        self.encoding = ""
        self.sent_bytes = 0

    def begin(self, message: Any, body: tuple[memoryview, ...], traffic_class: object) -> Mute:
        self.encoding = message.encoding
        self.sent_bytes = len(body[0])
        return self

    is_settled = False

    async def wait_settled(self) -> None:
        await trio.sleep_forever()

    async def reply(self) -> None:
        await trio.sleep_forever()

    def abandon(self) -> None:
        pass


@pytest.mark.parametrize(
    ("spoken", "encoding", "replied_bytes"),
    [
        (("f32", "f16", "q8"), "q8", 2),
        (("f32", "f16"), "f16", 2),
        (("f32",), "f32", 4),
    ],
)
async def test_the_deadline_counts_the_bytes_that_travel(
    spoken: tuple[str, ...], encoding: str, replied_bytes: int
) -> None:
    config = DispatchConfig()
    peer, members = Mute(spoken), Members(1, config, trio.current_time)
    worker = members.announce(cast(Peer, peer), (ExpertRange(0, 0, 1),), N_ROWS, "CPU")
    members.probe_begins(worker)
    members.probe_passed(worker)
    bank = cast(ExpertBank, None)
    remote = RemoteExperts(bytes(32), bank, Inline(), members, config, WireForm("partial", "q8"))
    ones = np.ones((N_ROWS, 1), np.float32)
    call = ExpertCall(0, np.ones((N_ROWS, N_EMBD), np.float32), np.zeros((N_ROWS, 1), np.int32), ones)
    routing, workers = members.routing()
    plan = plan_layer(routing, 0, call.ids)
    assert plan is not None
    started_s = trio.current_time()
    pending = await remote.layer(RemoteLayer(call, plan), workers, StepAccount([]))
    assert len(pending.failed) == 1
    assert peer.encoding == encoding
    travelled = peer.sent_bytes + replied_bytes * N_ROWS * N_EMBD
    assert trio.current_time() - started_s == pytest.approx(config.share_deadline_s(N_ROWS, travelled))
