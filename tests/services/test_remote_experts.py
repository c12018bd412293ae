"""How long a worker's rows are waited for, what they are compared with, and how many requests a layer becomes."""

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
from swarmnode.errors import ConnectionLostError, RequestRefusedError
from swarmnode.identity import NodeKey
from swarmnode.models.base import ExpertCall
from swarmnode.net.peer import Peer
from swarmnode.schedule.dispatch import DispatchPlan, Share
from swarmnode.schedule.sending import send_always
from swarmnode.services.account import Account, AccountedRows, StepAccount
from swarmnode.services.forward import RemoteLayer, compute_share
from swarmnode.services.magnitudes import Magnitudes
from swarmnode.services.members import Members, Standing
from swarmnode.services.pending_layer import Answer, PendingLayer
from swarmnode.services.remote_experts import EXACT, RemoteExperts, WireForm
from swarmnode.services.runners import Inline
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.messages import Rows
from swarmnode.wire.tensors import as_travelled, encode_pairs, encode_rows, view_rows_untrusted, widened
from tests.plans import plan_layer

N_ROWS, N_EMBD = 512, 3072


class Mute:
    """A connection over which no reply comes."""

    def __init__(self, encodings: tuple[str, ...], number: int = 0, max_requests: int = 256) -> None:
        self.node_id = NodeKey.from_seed(bytes([number] * 32)).node_id
        self.settings = SimpleNamespace(encodings=encodings)
        self.encoding = ""
        self.sent_bytes = 0
        self.n_asked = 0
        self.max_requests = max_requests

    def room(self) -> int:
        return self.max_requests - self.n_asked

    def begin(self, message: Any, body: tuple[memoryview, ...], traffic_class: object) -> Mute:
        self.encoding = message.encoding
        self.sent_bytes = len(body[0])
        self.n_asked += 1
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


# -- how many requests a layer is cut into

FEW_ROWS, K, N_EXPERT, WIDTH = 80, 4, 8, 32
"""320 pairs."""


class Answering(Mute):
    """A connection that answers with ones, at once."""

    is_settled = True
    came_at_s = 0.0

    def __init__(self, number: int = 0, max_requests: int = 256) -> None:
        super().__init__(("f32",), number, max_requests)
        self.n_replied = 0
        self.refuses: frozenset[int] = frozenset()
        """Which replies are refusals, counted from 1 ..."""
        self.lies: frozenset[int] = frozenset()
        """... and which are wrong ..."""
        self.lie = 7.0

    async def reply(self) -> Any:
        self.n_replied += 1
        if self.n_replied in self.refuses:
            raise RequestRefusedError("busy", "later")
        value = self.lie if self.n_replied in self.lies else 1.0
        return Rows("f32", 1, 0), memoryview(np.full((1, WIDTH), value, np.float32).tobytes())


class Gone(Answering):
    """A connection that has ended."""

    def room(self) -> int:
        raise ConnectionLostError("ended: the stream broke")


class Ones:
    """A bank of experts whose rows are ones."""

    def __init__(self) -> None:
        self.n_pairs = 0

    def experts(self, layer: int, rows: object, pair_row: object, pair_expert: Any) -> Any:
        self.n_pairs += len(pair_expert)
        return np.ones((len(pair_expert), WIDTH), np.float32)


class Layer:
    """A layer of 320 pairs for peers that hold two experts each and take one pair in a request."""

    def __init__(self, *peers: Answering, config: DispatchConfig | None = None) -> None:
        self.config = config or DispatchConfig(audit_share=0.0)
        self.peers = peers
        self.members = Members(N_EXPERT, self.config, trio.current_time)
        for number, peer in enumerate(peers):
            worker = self.members.announce(cast(Peer, peer), (ExpertRange(0, 2 * number, 2),), 1, "CPU")
            self.members.probe_begins(worker)
            self.members.probe_passed(worker)
        self.bank = Ones()
        self.account = Account()

    async def run(self) -> PendingLayer:
        """Computed and settled."""
        rows = np.ones((FEW_ROWS, WIDTH), np.float32)
        ids = np.array(
            [[row % 2, 2 + row % 2, 4 + row % 2, 6 + row % 2] for row in range(FEW_ROWS)], np.int32
        )
        call = ExpertCall(0, rows, ids, np.full((FEW_ROWS, K), 0.25, np.float32))
        bank = cast(ExpertBank, self.bank)
        remote = RemoteExperts(bytes(32), bank, Inline(), self.members, self.config, EXACT)
        routing, workers = self.members.routing()
        plan = plan_layer(routing, 0, ids)
        assert plan is not None
        step = StepAccount([AccountedRows(self.account, FEW_ROWS, FEW_ROWS)])
        pending = await remote.layer(RemoteLayer(call, plan), workers, step)
        assert np.array_equal(pending.finish(), np.ones((FEW_ROWS, WIDTH), np.float32))
        pending.settle()
        step.divide(1, K)
        return pending

    @property
    def n_asked(self) -> list[int]:
        return [peer.n_asked for peer in self.peers]


async def test_a_worker_that_takes_a_pair_at_a_time_gets_few_of_a_layer() -> None:
    layer = Layer(Answering(), config=DispatchConfig(audit_share=0.0, max_pieces=5))
    pending = await layer.run()
    assert layer.n_asked == [5]
    assert layer.bank.n_pairs == 315
    account = layer.account
    assert (account.pairs, account.remote, account.fallback) == (320, 5, 0)
    assert [len(experts) for _, experts in pending.unmet] == [75], "another holder would be of use"


async def test_many_workers_that_take_a_pair_at_a_time_share_the_bound() -> None:
    peers = [Answering(number) for number in range(4)]
    layer = Layer(*peers, config=DispatchConfig(audit_share=0.0, max_layer_pieces=12))
    await layer.run()
    assert layer.n_asked == [3, 3, 3, 3]
    assert (layer.account.remote, layer.account.fallback) == (12, 0)


async def test_nothing_is_made_for_a_worker_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    n_made = 0

    def counting(*arguments: Any) -> Any:
        nonlocal n_made
        n_made += 1
        return encode_pairs(*arguments)

    monkeypatch.setattr("swarmnode.services.remote_experts.encode_pairs", counting)
    layer = Layer(Answering(0, max_requests=2), Answering(1, max_requests=0))
    await layer.run()
    assert layer.n_asked == [2, 0]
    assert n_made == 2
    assert (layer.account.remote, layer.account.fallback) == (2, 0)
    assert list(layer.account.workers) == [layer.peers[0].node_id.short]


async def test_a_layer_for_which_nobody_has_room_is_a_local_one() -> None:
    layer = Layer(Answering(0, max_requests=0))
    await layer.run()
    assert (layer.account.remote_layers, layer.account.workers) == (0, {})
    (worker,) = layer.members.workers
    assert worker.standing is Standing.SERVING, "our own requests may have taken its room"


async def test_whoever_is_gone_when_it_is_to_be_asked_is_out() -> None:
    layer = Layer(Gone(0), Answering(1))
    await layer.run()
    assert layer.n_asked == [0, 64]
    assert [worker.standing for worker in layer.members.workers] == [Standing.SUSPECT, Standing.SERVING]
    assert (layer.account.remote, layer.account.fallback) == (64, 0)


# -- what is counted of a worker that chose how many requests it gets


async def test_answering_one_request_of_a_layer_does_not_make_up_for_the_others() -> None:
    peer = Answering()
    layer = Layer(peer, config=DispatchConfig(audit_share=0.0, max_pieces=5))
    (worker,) = layer.members.workers
    for number in (1, 2, 3):
        assert worker.standing is Standing.SERVING
        peer.n_replied, peer.refuses = 0, frozenset({1, 2, 4, 5} if number == 2 else {2, 3, 4})
        await layer.run()
        assert worker.past.in_vain == number, "once a layer, whatever was answered before or behind"
    assert worker.standing is Standing.SUSPECT


async def test_a_layer_in_many_requests_is_no_more_work_than_one() -> None:
    layer = Layer(Answering())
    (worker,) = layer.members.workers
    worker.past.strikes, worker.past.seen_s = 1, trio.current_time()
    await layer.run()
    assert layer.n_asked == [64]
    assert (worker.past.strikes, worker.past.good_s) == (1, 0.0)
    assert worker.tally.pairs == 64


@pytest.mark.parametrize("lie", [7.0, float("nan")])
async def test_one_wrong_piece_is_the_end_of_them_all(lie: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not used, and who keeps what was made of its rows is told once."""
    liar, honest = Answering(0), Answering(1)
    liar.lie, liar.lies = lie, frozenset(range(2, 40))
    layer = Layer(liar, honest, config=DispatchConfig(audit_share=1.0))
    told: list[object] = []
    layer.members.on_betrayal = told.append
    await layer.run()
    assert told == [liar.node_id]
    assert (layer.account.remote, layer.account.fallback) == (64, 64)
    assert layer.members.workers[0].tally.bad_replies == 1
