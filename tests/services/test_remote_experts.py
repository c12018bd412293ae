"""How long a worker's rows are waited for, and what they are compared with: what was sent, in the encoding spoken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.self_test import random_expert
from swarmnode.config import DispatchConfig
from swarmnode.identity import NodeKey
from swarmnode.models.base import ExpertCall
from swarmnode.net.peer import Peer
from swarmnode.schedule.dispatch import DispatchPlan, Share, plan_layer
from swarmnode.schedule.sending import send_always
from swarmnode.services.account import Account, AccountedRows, StepAccount
from swarmnode.services.forward import RemoteLayer, compute_share
from swarmnode.services.magnitudes import Magnitudes
from swarmnode.services.members import Members
from swarmnode.services.pending_layer import Answer, PendingLayer
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.runners import Inline
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.tensors import as_travelled, encode_rows, view_rows_untrusted, widened

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


@pytest.mark.parametrize("kind", [ggml.F16, ggml.Q8_0, ggml.Q4_K])
@pytest.mark.parametrize("exact", [True, False])
def test_the_audit_compares_with_what_was_sent(device: Device, kind: int, exact: bool) -> None:
    """Rows with one number 256 times the others: in q8 nothing else is left of them."""
    bank = ExpertBank(device)
    layout, slabs = random_expert(256, 256, kind, kind)
    bank.add(layout, 0, slabs)
    rng = np.random.default_rng(3)
    rows = np.where(rng.random((4, 256)) < 0.5, -0.0039, 0.0039).astype(np.float32)
    rows[:, 0] = 1
    ones = np.ones((4, 1), np.float32)
    call = ExpertCall(layout.layer, rows, np.zeros((4, 1), np.int32), ones)
    share = Share(np.arange(4), np.arange(4), np.arange(4, dtype=np.int32), np.zeros(4, np.int32))
    sent = call._replace(rows=as_travelled(rows, "q8"))
    assert np.array_equal(widened(view_rows_untrusted(encode_rows(rows, "q8"), 4, 256, "q8")), sent.rows)
    members = Members(1, DispatchConfig(), lambda: 0.0)
    account = StepAccount([AccountedRows(Account(), 4, 4)])
    policy = send_always(DispatchConfig(), lambda: 0.0)
    worker = members.announce(cast(Peer, Mute(("f32",))), (ExpertRange(0, 0, 1),), N_ROWS, "CPU")
    for answered, is_right in ((sent, True), (call._replace(rows=-rows), False)):
        values = compute_share(bank, answered, share, exact)
        layer = RemoteLayer(call, DispatchPlan(None, ()))
        pending = PendingLayer(
            layer, bank, members, account, policy, Magnitudes(), exact=exact, max_row_error=0.01
        )
        pending.answers.append(Answer(worker, share, "q8", values, 0.5))
        pending.finish()
        pending.settle()
        assert members.is_quarantined(worker) is not is_right
    bank.close()
