"""Experts requests through the real wire to a server with a real bank: good ones, hostile ones, rude endings."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing

from swarmnode.compute import oracle
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.config import ServeConfig
from swarmnode.errors import ConnectionLostError, RequestRefusedError
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Peer
from swarmnode.services.expert_server import ExpertServer
from swarmnode.services.runners import Inline, Runner
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.constants import FrameType, TrafficClass
from swarmnode.wire.messages import Experts, Rows, encode_header
from swarmnode.wire.tensors import encode_experts_body, parse_rows_body_untrusted
from tests.compute.layers import RandomLayer, random_layer
from tests.net.nodes import CLIENT, SERVER, dial_from, endpoint, serve_on
from tests.net.rude import Rude
from tests.wire.pairs import raw_frame, raw_start

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
T = TypeVar("T")

MODEL = bytes(range(32))
N_EMBD, N_EXPERT, HELD = 256, 8, (0, 1, 2, 5)
MAX_PAIRS = 512
RUDE = 3


@pytest.fixture(scope="module")
def layer() -> RandomLayer:
    return random_layer(layer=1)


@pytest.fixture
def bank(device: Device, layer: RandomLayer) -> Iterator[ExpertBank]:
    """Experts 0, 1, 2, 5 of layer 1; at most 512 pairs at once."""
    opened = ExpertBank(device)
    for expert in HELD:
        opened.add(layer.layout, expert, layer.slabs(expert))
    yield opened
    opened.close()


class Paused:
    """A compute runner that waits while `paused`."""

    def __init__(self) -> None:
        self.paused = False
        self._resumed = trio.Event()

    async def run(self, function: Callable[[], T]) -> T:
        if self.paused:
            await self._resumed.wait()
        return await Inline().run(function)

    def resume(self) -> None:
        self.paused = False
        self._resumed.set()
        self._resumed = trio.Event()


@dataclass
class Node:
    """A worker's expert server behind a socket of the memory network."""

    server: ExpertServer
    network: MemoryNetwork
    address: PeerAddress
    nursery: trio.Nursery
    peer: Peer
    compute: Paused

    async def other_peer(self, seed: int = 4) -> Peer:
        return await dial_from(self.nursery, self.network.host(f"host {seed}"), self.address, endpoint(seed))

    async def rude(self) -> Rude:
        return await Rude.dial(self.network.host("rude"), self.address, endpoint(RUDE))


@asynccontextmanager
async def serving(
    bank: ExpertBank, config: ServeConfig | None = None, max_pairs: int = MAX_PAIRS
) -> AsyncIterator[Node]:
    network, compute = MemoryNetwork(), Paused()
    runner: Runner = compute
    server = ExpertServer(MODEL, N_EMBD, N_EXPERT, bank, runner, config or ServeConfig(), max_pairs)
    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, network.host("worker"), endpoint(SERVER), server.handlers)
        peer = await dial_from(nursery, network.host("backbone"), address, endpoint(CLIENT))
        yield Node(server, network, address, nursery, peer, compute)
        nursery.cancel_scope.cancel()


def some_rows(n_rows: int) -> F32:
    return np.random.default_rng(5).standard_normal((n_rows, N_EMBD), np.float32)


def request(
    rows: F32, pair_row: list[int], pair_expert: list[int], form: str = "experts", **header: object
) -> tuple[Experts, tuple[memoryview, ...]]:
    """A request as an honest peer encodes it, some header fields replaced; partial sums have weights 1."""
    weights = np.ones(len(pair_row), np.float32) if form == "partial" else None
    pairs = np.array(pair_row, np.int32), np.array(pair_expert, np.int32)
    body = encode_experts_body(rows, *pairs, weights, "f32")
    message = Experts(MODEL, 1, form, "f32", len(rows), len(pair_row))
    return replace(message, **header), body  # type: ignore[arg-type]


async def asked(peer: Peer, message: Experts, body: tuple[memoryview, ...]) -> F32:
    reply, reply_body = await peer.request(message, body)
    assert isinstance(reply, Rows)
    n_rows = message.n_pairs if message.form == "experts" else message.n_rows
    return parse_rows_body_untrusted(reply, reply_body, n_rows, N_EMBD)


async def is_answered(peer: Peer) -> bool:
    values = await asked(peer, *request(some_rows(1), [0], [5]))
    return values.shape == (1, N_EMBD)


# ---- good requests


@pytest.mark.parametrize("width", [1, 8, 9, 16, 64, 256, 512])
async def test_answers_of_every_width_against_float64(
    width: int, bank: ExpertBank, layer: RandomLayer
) -> None:
    """cases.md 24, through the wire: minimum cosine over the rows, expert by expert."""
    rows = some_rows(width)
    expected = {
        expert: oracle.expert_ffn(rows, *oracle.expert_matrices(layer.layout, layer.slabs(expert)))
        for expert in HELD[:2]
    }
    pair_expert = [HELD[row % 2] for row in range(width)]
    async with serving(bank) as node:
        values = await asked(node.peer, *request(rows, list(range(width)), pair_expert))
    due = np.stack([expected[expert][row] for row, expert in enumerate(pair_expert)])
    assert oracle.row_cosines(values, due).min() > 0.999999


async def test_both_forms_agree_and_everything_is_counted(bank: ExpertBank) -> None:
    rows = some_rows(3)
    pair_row, pair_expert = [0, 0, 1, 2, 2], [0, 5, 1, 2, 0]
    async with serving(bank) as node:
        values = await asked(node.peer, *request(rows, pair_row, pair_expert))
        sums = await asked(node.peer, *request(rows, pair_row, pair_expert, "partial"))
        served = node.server.served
    due = np.zeros_like(rows)
    np.add.at(due, pair_row, values)
    np.testing.assert_allclose(sums, due, rtol=1e-5, atol=1e-6)
    assert (served.requests, served.rows, served.pairs, served.refused) == (2, 6, 10, 0)


async def test_the_time_told_is_without_the_queue(bank: ExpertBank) -> None:
    replies: list[Rows] = []

    async with serving(bank) as node:

        async def ask() -> None:
            reply, _ = await node.peer.request(*request(some_rows(1), [0], [0]))
            assert isinstance(reply, Rows)
            replies.append(reply)

        node.compute.paused = True
        async with trio.open_nursery() as askers:
            for _ in range(3):
                askers.start_soon(ask)
            await trio.sleep(5)
            node.compute.resume()
        assert node.server.served.compute_s < 1
    assert max(reply.compute_us for reply in replies) < 1e6


async def test_what_the_asker_calls_an_answers_goes_before_prompts_whatever_its_size(
    bank: ExpertBank,
) -> None:
    done: list[str] = []

    async with serving(bank) as node:

        async def ask(name: str, n_pairs: int, traffic_class: TrafficClass) -> None:
            message, body = request(some_rows(n_pairs), list(range(n_pairs)), [0] * n_pairs)
            await node.peer.request(message, body, traffic_class=traffic_class)
            done.append(name)

        node.compute.paused = True
        async with trio.open_nursery() as askers:
            for name, n_pairs, traffic_class in [
                ("first", 1, TrafficClass.DECODE),
                ("prompt", 8, TrafficClass.PREFILL),
                ("nine answers", 72, TrafficClass.DECODE),
            ]:
                askers.start_soon(ask, name, n_pairs, traffic_class)
                await trio.testing.wait_all_tasks_blocked()
            node.compute.resume()
    assert done == ["first", "nine answers", "prompt"]


# ---- refusals: the connection stays, and a good request is answered after each


async def refusal(peer: Peer, message: Experts, body: tuple[memoryview, ...] | list[bytes]) -> str:
    with pytest.raises(RequestRefusedError) as caught:
        await peer.request(message, body)
    return caught.value.code


@pytest.mark.parametrize("form", ["experts", "partial"])
async def test_bad_requests_are_refused_with_a_reason(form: str, bank: ExpertBank) -> None:
    """cases.md 25 and 26: an expert twice for a row, row index 10^6, ids outside, in both forms."""
    one = some_rows(1)
    wide, narrow = some_rows(17), np.ones((1, N_EMBD - 1), np.float32)
    not_finite = np.full((1, N_EMBD), np.nan, np.float32)

    def raw(pair_row: int, pair_expert: int) -> tuple[Experts, list[bytes]]:
        tail = np.array([pair_row], "<u4").tobytes() + np.array([pair_expert], "<u2").tobytes()
        weight = np.ones(1, "<f4").tobytes() if form == "partial" else b""
        return Experts(MODEL, 1, form, "f32", 1, 1), [one.tobytes(), tail + weight]

    bad: list[tuple[str, Experts, tuple[memoryview, ...] | list[bytes]]] = [
        ("wrong_model", *request(one, [0], [0], form, model=bytes(32))),
        ("too_many_pairs", *request(one, [0] * 17, list(range(17)), form)),
        ("too_many_pairs", *request(wide, [0], [0], form)),
        ("not_owner", *request(one, [0], [3], form)),
        ("not_owner", *request(one, [0], [0], form, layer=0)),
        ("not_owner", *request(one, [0], [0], form, layer=1023)),
        ("bad_tensor", *request(one, [0], [8], form)),
        ("bad_tensor", *request(one, [0], [65_535], form)),
        ("bad_tensor", *request(one, [0, 0], [5, 5], form)),
        ("bad_tensor", *request(narrow, [0], [0], form)),
        ("bad_tensor", *request(not_finite, [0], [0], form)),
        ("bad_tensor", *raw(10**6, 0)),
        ("bad_tensor", *raw(2**32 - 1, 0)),
    ]
    async with serving(bank, max_pairs=16) as node:
        for code, message, body in bad:
            assert await refusal(node.peer, message, body) == code
            assert node.server.queued_pairs == 0
            assert await is_answered(node.peer)
        assert node.server.served.refused == len(bad)


ABSURD: dict[str, tuple[dict[str, int], int]] = {
    f"{name} {number}": ({name: number}, 1030)
    for name in ("n_rows", "n_pairs", "layer")
    for number in (-5, -1, 2**28, 2**30, 2**64 - 1)
}
ABSURD["a product of legal counts just over the cap"] = ({"n_pairs": 65_536}, 257 * 4 + 6 * 65_536)


async def test_absurd_counts_end_their_connection_before_memory_moves(bank: ExpertBank) -> None:
    """cases.md 26: growth below 16 MiB, and another connection is answered after each."""
    header = {"model": MODEL, "layer": 1, "form": "experts", "encoding": "f32", "n_rows": 1, "n_pairs": 1}
    async with serving(bank) as node:
        tracemalloc.start()
        try:
            for fields, body_bytes in ABSURD.values():
                rude = await node.rude()
                start = raw_start(Experts.number, {**header, **fields}, body_bytes, bytes(100))
                await rude.send_raw(raw_frame(FrameType.REQUEST, start))
                assert await rude.last_words() in {"bad_field", "bad_body", "too_large"}
                assert await is_answered(node.peer)
            assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
        finally:
            tracemalloc.stop()
        assert node.server.queued_pairs == 0
        assert await is_answered(await node.other_peer())


# ---- the queue


async def test_decode_does_not_wait_for_another_backbones_prompt(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are asked while one large request is computed: the small one is computed next, nothing is refused."""
    computed: list[int] = []
    experts = bank.experts

    def watched(layer: int, rows: F32, pair_row: I32, pair_expert: I32) -> F32:
        computed.append(len(pair_row))
        return experts(layer, rows, pair_row, pair_expert)

    monkeypatch.setattr(bank, "experts", watched)
    rows = some_rows(130)
    async with serving(bank) as node:
        other = await node.other_peer()
        node.compute.paused = True
        async with trio.open_nursery() as askers:
            for n_rows in (128, 129, 130):
                message = request(rows[:n_rows], list(range(n_rows)), [0] * n_rows)
                askers.start_soon(asked, node.peer, *message)
                await trio.testing.wait_all_tasks_blocked()
            askers.start_soon(is_answered, other)
            await trio.testing.wait_all_tasks_blocked()
            assert node.server.queued_pairs == 128 + 129 + 130 + 1
            node.compute.resume()
    assert computed == [128, 1, 129, 130]


async def test_five_waiting_requests_of_three_backbones_are_one_call_of_the_bank(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets what it gets alone, bit by bit, and is counted once; the seconds are shared out."""
    rows, answers = some_rows(6), dict[int, F32]()
    asks = [
        request(rows[:2], [0, 1, 1], [0, 5, 2]),
        request(rows[2:3], [0, 0], [5, 0], "partial"),
        request(rows[3:5], [0, 1], [0, 5]),
        request(rows[5:], [0, 0, 0, 0], [0, 1, 2, 5], "partial"),
        request(rows[:1], [0], [1]),
    ]
    calls: list[int] = []
    experts = bank.experts

    def watched(layer: int, rows: F32, pair_row: I32, pair_expert: I32) -> F32:
        calls.append(len(pair_row))
        return experts(layer, rows, pair_row, pair_expert)

    async with serving(bank) as node:
        alone = [await asked(node.peer, *ask) for ask in asks]
        peers = [node.peer, await node.other_peer(4), await node.other_peer(5)]
        monkeypatch.setattr(bank, "experts", watched)
        node.compute.paused = True

        async def ask(number: int) -> None:
            answers[number] = await asked(peers[number % 3], *asks[number])

        async with trio.open_nursery() as askers:
            askers.start_soon(is_answered, node.peer)  # is being computed while the five come
            await trio.testing.wait_all_tasks_blocked()
            for number in range(5):
                askers.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
            assert node.server.queued_pairs == 13
            node.compute.resume()
        served = node.server.served
        assert node.server.queued_pairs == 0
    assert calls == [1, 12]
    for number, values in enumerate(alone):
        np.testing.assert_array_equal(answers[number].view(np.uint32), values.view(np.uint32))
    assert (served.requests, served.rows, served.pairs, served.refused) == (11, 15, 25, 0)


async def test_a_full_queue_is_busy_and_empties(bank: ExpertBank) -> None:
    config = ServeConfig(max_queued_pairs=400)
    rows = some_rows(100)
    message = request(rows, list(range(100)), [0] * 100)
    async with serving(bank, config) as node:
        other = await node.other_peer()
        node.compute.paused = True
        async with trio.open_nursery() as askers:
            for peer in (node.peer, node.peer, other):
                askers.start_soon(asked, peer, *message)
            await trio.testing.wait_all_tasks_blocked()
            assert await refusal(node.peer, *message) == "busy", "half of the queue is one peer's share"
            askers.start_soon(asked, other, *message)
            await trio.testing.wait_all_tasks_blocked()
            assert await refusal(await node.other_peer(5), *message) == "busy"
            node.compute.resume()
        assert node.server.queued_pairs == 0
        assert await is_answered(node.peer)


async def test_a_cancelled_request_is_not_computed(bank: ExpertBank) -> None:
    async with serving(bank) as node:
        node.compute.paused = True
        async with trio.open_nursery() as askers:
            askers.start_soon(is_answered, node.peer)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(1):
                await is_answered(node.peer)
            await trio.testing.wait_all_tasks_blocked()
            assert node.server.queued_pairs == 1
            node.compute.resume()
        assert node.server.served.requests == 1


# ---- rude endings


async def test_connections_that_break_in_the_middle_leave_no_pairs_behind(bank: ExpertBank) -> None:
    """cases.md 31: after a header, mid-body, while queued, while computed; the permits come back each time."""
    rows = some_rows(64)
    good, body = request(rows, list(range(64)), [0] * 64)
    whole = b"".join(bytes(part) for part in body)

    async def end_rudely(node: Node, n_bytes: int, n_requests: int) -> None:
        rude = await node.rude()
        for number in range(n_requests):
            start = raw_start(Experts.number, encode_header(good), len(whole), whole[: min(n_bytes, 16_000)])
            await rude.send_raw(raw_frame(FrameType.REQUEST, start, request_id=2 * number + 1))
            for offset in range(16_000, n_bytes, 16_000):
                await rude.send_raw(
                    raw_frame(FrameType.DATA, whole[offset : offset + 16_000], request_id=2 * number + 1)
                )
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(rude.stream)
        await trio.testing.wait_all_tasks_blocked()

    async with serving(bank) as node:
        node.compute.paused = True
        blocker = trio.CancelScope()

        async def block() -> None:
            with blocker:
                await asked(node.peer, good, body)

        node.nursery.start_soon(block)
        await trio.testing.wait_all_tasks_blocked()
        n_tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(10):
            for n_bytes, n_requests in ((0, 1), (5000, 1), (40_000, 1), (len(whole), 1), (len(whole), 3)):
                await end_rudely(node, n_bytes, n_requests)
                assert node.server.queued_pairs == 64, "the honest one's"
        assert trio.lowlevel.current_statistics().tasks_living <= n_tasks
        node.compute.resume()
        assert await is_answered(node.peer)
        assert node.server.queued_pairs == 0
        assert node.server.served.requests == 2, "nothing was computed for who had gone"
        gc.collect()


async def test_a_backbone_that_vanishes_while_its_request_is_computed(bank: ExpertBank) -> None:
    async with serving(bank) as node:
        other = await node.other_peer()
        node.compute.paused = True
        lost: list[bool] = []

        async def ask() -> None:
            with pytest.raises(ConnectionLostError):
                await is_answered(other)
            lost.append(True)

        async with trio.open_nursery() as askers:
            askers.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert node.server.queued_pairs == 1
            node.network.break_all("host 4")
        await trio.testing.wait_all_tasks_blocked()
        assert lost == [True]
        assert node.server.queued_pairs == 0
        node.compute.resume()
        assert await is_answered(node.peer)
