"""Two nodes over the memory network: requests, refusals, crashes, cancelling, endings."""

from __future__ import annotations

import logging
import tracemalloc

import numpy as np
import pytest
import trio
import trio.testing

from swarmnode.errors import ConnectionLostError, HandshakeError, RequestRefusedError, UsageError
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Body, Peer
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.constants import MAX_NONCE, TrafficClass
from swarmnode.wire.messages import Experts, ManifestGet, Message, Models, ModelsGet, Rows
from swarmnode.wire.tensors import (
    encode_experts_body,
    encode_rows_body,
    parse_experts_body_untrusted,
    parse_rows_body_untrusted,
)
from tests.wire.pairs import raw_frame, raw_start

from .nodes import (
    CLIENT,
    HANDLERS,
    MODEL,
    PORT,
    SERVER,
    connected,
    dial_from,
    echo,
    endpoint,
    experts,
    no_models,
    serve_on,
)
from .rude import Rude


class Slow:
    """A handler that answers when told, and remembers what became of it."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.go = trio.Event()
        self.n_cancelled = 0

    async def __call__(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        self.started.set()
        try:
            await self.go.wait()
        except trio.Cancelled:
            self.n_cancelled += 1
            raise
        return await echo(peer, message, body)


@pytest.mark.parametrize("n_rows", [1, 2, 500, 8192])
async def test_a_request_is_answered(n_rows: int) -> None:
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery)
        message, body = experts(n_rows, 300)
        reply, reply_body = await peer.request(message, body)
        assert reply == Rows("f16", n_rows, 1)
        assert reply_body == body[0]
        nursery.cancel_scope.cancel()


async def test_both_sides_may_ask() -> None:
    found = []

    async def ask_back(peer: Peer) -> None:
        found.append(await peer.request(ModelsGet()))

    async with trio.open_nursery() as nursery:
        network = MemoryNetwork()
        address = await serve_on(nursery, network.host("b"), endpoint(SERVER), on_peer=ask_back)
        peer = await dial_from(nursery, network.host("a"), address)
        await trio.testing.wait_all_tasks_blocked()
        assert found == [(Models(()), memoryview(b""))]
        assert peer.is_dialer
        assert peer.node_id == address.node_id
        assert peer.remote == "b port 7000"
        nursery.cancel_scope.cancel()


async def test_a_refusal_ends_that_request_only() -> None:
    async def refuse(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        raise RequestRefusedError("busy", "later\x07", 50)

    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, {Experts: refuse, ModelsGet: no_models})
        with pytest.raises(RequestRefusedError) as refusal:
            await peer.request(*experts())
        assert (refusal.value.code, refusal.value.reason, refusal.value.retry_after_ms) == (
            "busy",
            "later?",
            50,
        )
        assert (await peer.request(ModelsGet()))[0] == Models(())
        nursery.cancel_scope.cancel()


async def test_a_crash_ends_that_request_only_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        raise KeyError("secret detail")

    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, {Experts: crash, ModelsGet: no_models})
        with caplog.at_level(logging.ERROR), pytest.raises(RequestRefusedError) as refusal:
            await peer.request(*experts())
        assert (refusal.value.code, refusal.value.reason) == ("internal", "")
        assert "the handler of Experts failed" in caplog.text
        await peer.request(ModelsGet())
        nursery.cancel_scope.cancel()


async def test_an_answer_that_cannot_be_sent_is_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    async def wrong(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        return Rows("f16", 1, -1), (b"xx",)

    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, {Experts: wrong})
        with caplog.at_level(logging.ERROR), pytest.raises(RequestRefusedError) as refusal:
            await peer.request(*experts())
        assert refusal.value.code == "internal"
        assert "cannot be sent" in caplog.text
        nursery.cancel_scope.cancel()


async def test_what_nobody_handles_is_unsupported() -> None:
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery)
        with pytest.raises(RequestRefusedError, match="unsupported"):
            await peer.request(ManifestGet(MODEL))
        nursery.cancel_scope.cancel()


async def test_a_deadline_cancels_the_handler_and_the_late_reply_is_dropped() -> None:
    slow = Slow()
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, {Experts: slow, ModelsGet: no_models}, MemoryNetwork(latency_s=0.02))
        with pytest.raises(trio.TooSlowError):
            with trio.fail_after(0.5):
                await peer.request(*experts())
        assert slow.started.is_set()
        await peer.request(ModelsGet())
        assert slow.n_cancelled == 1
        # The reply and the cancel cross each other.
        slow.go.set()
        with pytest.raises(trio.TooSlowError):
            with trio.fail_after(0.03):
                await peer.request(*experts())
        for _ in range(3):
            await peer.request(*experts())
        assert peer.ended is None
        nursery.cancel_scope.cancel()


async def test_a_wrong_message_of_ours_hurts_nobody() -> None:
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery)
        with pytest.raises(UsageError):
            await peer.request(Experts(MODEL, -1, "experts", "f16", 1, 1), experts()[1])
        with pytest.raises(UsageError):
            await peer.request(experts()[0], (b"short",))
        await peer.request(*experts())
        nursery.cancel_scope.cancel()


async def test_another_network_or_key_is_not_answered() -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, network.host("b"), endpoint(SERVER))
        with pytest.raises(HandshakeError, match="another name or secret"):
            await dial_from(nursery, network.host("a"), address, endpoint(CLIENT, network="other"))
        wrong = PeerAddress(endpoint(9).credentials.node_id, address.host, address.port)
        with pytest.raises(HandshakeError, match="dialled"):
            await dial_from(nursery, network.host("a"), wrong)
        await (await dial_from(nursery, network.host("a"), address)).request(*experts())
        nursery.cancel_scope.cancel()


async def test_nobody_there() -> None:
    network = MemoryNetwork()
    nobody = PeerAddress(endpoint(SERVER).credentials.node_id, "b", PORT)
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConnectionLostError, match="b port 7000: nobody listens"):
            await dial_from(nursery, network.host("a"), nobody)
        network.partition(["a"], ["b"])
        with pytest.raises(ConnectionLostError, match="did not answer in 10 s"):
            await dial_from(nursery, network.host("a"), nobody)


async def in_flight(nursery: trio.Nursery, network: MemoryNetwork, slow: Slow) -> tuple[Peer, trio.Event]:
    """A request that is being worked on; the event is set once it has raised ConnectionLostError."""
    peer = await connected(nursery, {Experts: slow}, network)
    lost = trio.Event()

    async def ask() -> None:
        with pytest.raises(ConnectionLostError):
            await peer.request(*experts())
        lost.set()

    nursery.start_soon(ask)
    await slow.started.wait()
    return peer, lost


async def test_a_broken_stream_ends_requests_and_handlers() -> None:
    network, slow = MemoryNetwork(), Slow()
    async with trio.open_nursery() as nursery:
        peer, lost = await in_flight(nursery, network, slow)
        network.break_all("b")
        await lost.wait()
        ended = await peer.wait_closed()
        assert ended is not None
        assert ended.code == "ended"
        await trio.testing.wait_all_tasks_blocked()
        assert slow.n_cancelled == 1
        with pytest.raises(ConnectionLostError):
            await peer.request(*experts())
        nursery.cancel_scope.cancel()


async def test_closing_says_bye_and_ends_requests() -> None:
    network, slow = MemoryNetwork(latency_s=0.01), Slow()
    seen: list[Peer] = []

    async def remember(peer: Peer) -> None:
        seen.append(peer)

    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, network.host("b"), endpoint(SERVER), {Experts: slow}, remember)
        peer = await dial_from(nursery, network.host("a"), address)

        async def ask() -> None:
            with pytest.raises(ConnectionLostError, match="leaving: see you"):
                await peer.request(*experts())

        nursery.start_soon(ask)
        await slow.started.wait()
        peer.close("leaving", "see you")
        await peer.wait_closed()
        ended = await seen[0].wait_closed()
        assert ended is not None
        assert (ended.code, ended.reason, ended.error) == ("leaving", "see you", None)
        assert slow.n_cancelled == 1
        nursery.cancel_scope.cancel()


async def test_a_partition_is_noticed_by_both_sides() -> None:
    """Half open: nothing breaks, nothing comes. Three pings of 15 s, then it is over."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, HANDLERS, network)
        await trio.sleep(100)
        assert peer.ended is None
        assert peer.rtt_s is not None
        started_s = trio.current_time()
        network.partition(["a"], ["b"])
        ended = await peer.wait_closed()
        assert ended is not None
        assert ended.code == "dead"
        assert 30 < trio.current_time() - started_s <= 76
        nursery.cancel_scope.cancel()


async def test_the_round_trip_time_is_measured() -> None:
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, HANDLERS, MemoryNetwork(latency_s=0.05))
        await trio.sleep(1)
        assert peer.rtt_s == pytest.approx(0.1)
        nursery.cancel_scope.cancel()


async def test_many_at_once_and_none_is_lost() -> None:
    """16 sessions with 20 requests each, over a slow link, more than the peer takes at once."""
    done = []

    async def session(peer: Peer, number: int) -> None:
        for turn in range(20):
            urgency = TrafficClass.PREFILL if number % 2 else TrafficClass.DECODE
            reply, body = await peer.request(*experts(1 + turn * 10, 100), traffic_class=urgency)
            assert isinstance(reply, Rows)
            assert len(body) == 200 * reply.n_rows
            done.append(number)

    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(latency_s=0.01)
        peer = await connected(nursery, HANDLERS, network, max_requests_in_flight=4)
        async with trio.open_nursery() as sessions:
            for number in range(16):
                sessions.start_soon(session, peer, number)
        assert len(done) == 320
        nursery.cancel_scope.cancel()


async def test_the_room_for_requests_is_known_before_one_is_made() -> None:
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, HANDLERS, MemoryNetwork(latency_s=0.01), max_requests_in_flight=3)
        asked = []
        for left in (3, 2, 1):
            assert peer.room() == left
            asked.append(peer.begin(*experts()))
        assert peer.room() == 0
        assert peer.begin(*experts()) is None
        assert asked[0] is not None
        await asked[0].reply()
        assert peer.room() > 0
        peer.close()
        with pytest.raises(ConnectionLostError):
            peer.room()
        nursery.cancel_scope.cancel()


async def test_the_first_of_many_replies_wakes_and_so_does_the_end_of_the_connection() -> None:
    slow = Slow()
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, {Experts: slow, ModelsGet: no_models}, MemoryNetwork(latency_s=0.01))
        late, soon = peer.begin(*experts()), peer.begin(ModelsGet())
        assert late is not None
        assert soon is not None
        unused, woken, again = trio.Event(), trio.Event(), trio.Event()
        late.wake(unused)
        for asked in (late, soon):
            asked.wake(woken)
        await woken.wait()
        assert (late.is_settled, soon.is_settled) == (False, True)
        soon.wake(again)
        assert again.is_set(), "it is settled already"
        again = trio.Event()
        late.wake(again)
        peer.close()
        await again.wait()
        assert late.is_settled
        assert not unused.is_set()
        nursery.cancel_scope.cancel()


async def test_a_full_queue_is_no_room() -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(latency_s=0.01)
        peer = await connected(nursery, HANDLERS, network, max_queued_bytes=10_000)
        for _ in range(100):
            if not peer.room():
                break
            peer.begin(*experts(512))
        assert peer.room() == 0
        assert peer.begin(*experts()) is None
        nursery.cancel_scope.cancel()


async def test_a_crash_beside_the_connection_ends_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(peer: Peer) -> None:
        raise ValueError("mine")

    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, network.host("b"), endpoint(SERVER), on_peer=crash)
        with caplog.at_level(logging.ERROR):
            peer = await dial_from(nursery, network.host("a"), address)
            ended = await peer.wait_closed()
        assert ended is not None
        assert ended.code == "internal"
        address = await serve_on(nursery, network.host("b"), endpoint(SERVER), port=PORT + 1)
        await dial_from(nursery, network.host("a"), address)
        nursery.cancel_scope.cancel()


async def test_running_out_of_nonces_ends_the_connection() -> None:
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery)
        await peer.request(*experts())
        writer = peer._connection._writer
        assert writer is not None
        writer._cipher.nonce = MAX_NONCE + 1
        with pytest.raises(ConnectionLostError, match="no nonce is left"):
            await peer.request(*experts())
        ended = await peer.wait_closed()
        assert ended is not None
        assert ended.code == "bad_record"
        nursery.cancel_scope.cancel()


async def test_a_fault_of_ours_ends_that_connection_and_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork()
        peer = await connected(nursery, HANDLERS, network)

        def broken(event: object, nursery: trio.Nursery) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(peer, "_on_event", broken)
        with caplog.at_level(logging.ERROR), pytest.raises(ConnectionLostError):
            await peer.request(*experts())
        assert "serving <Peer" in caplog.text
        again = await dial_from(nursery, network.host("a"), PeerAddress(peer.node_id, "b", PORT))
        await again.request(*experts())
        nursery.cancel_scope.cancel()


async def compute(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
    """As a worker does: parse everything, then answer a row a pair."""
    assert isinstance(message, Experts)
    rows, pair_row, _, _ = parse_experts_body_untrusted(message, body, N_EMBD, 16)
    values = rows[pair_row].astype(np.float32)
    return Rows(message.encoding, len(pair_row), 0), encode_rows_body(values, message.encoding)


N_EMBD = 8
MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("pair_row", "pair_expert", "reason"),
    [
        ([10**6, 0], [0, 1], "row 1000000 of 2"),
        ([2**32 - 1, 0], [0, 1], "row 4294967295 of 2"),
        ([0, 1], [16, 0], "expert 16 of 16"),
        ([1, 1], [7, 7], "expert 7 twice for row 1"),
    ],
)
async def test_wrong_pairs_are_refused_and_the_next_request_is_answered(
    pair_row: list[int], pair_expert: list[int], reason: str
) -> None:
    rows = np.arange(16, dtype=np.float32).reshape(2, N_EMBD)
    message = Experts(MODEL, 0, "experts", "f32", 2, 2)
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, {Experts: compute})
        bad = (rows.tobytes(), np.array(pair_row, "<u4").tobytes(), np.array(pair_expert, "<u2").tobytes())
        with pytest.raises(RequestRefusedError) as refusal:
            await peer.request(message, bad)
        assert (refusal.value.code, refusal.value.reason) == ("bad_tensor", reason)
        good = encode_experts_body(rows, np.array([1, 0], np.int32), np.array([7, 7], np.int32), None, "f32")
        reply, body = await peer.request(message, good)
        assert isinstance(reply, Rows)
        assert np.array_equal(parse_rows_body_untrusted(reply, body, 2, N_EMBD), rows[::-1])
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("fields", "body_bytes", "code"),
    [
        ({"n_rows": -5}, 70, "bad_field"),
        ({"n_pairs": -1}, 70, "bad_field"),
        ({"n_rows": 2**28}, 2**30, "too_large"),
        ({"n_pairs": 2**30}, 70, "bad_field"),
        ({"n_rows": 8192, "n_pairs": 65_536}, 64 * MIB + 1, "too_large"),
        ({"n_rows": 1, "n_pairs": 65_536}, 4 * 257 + 1 + 6 * 65_536, "bad_body"),
        ({"n_rows": 1, "n_pairs": 65_536}, 4 * 257 + 6 * 65_536, "too_large"),
    ],
)
async def test_wrong_counts_end_the_connection_before_memory_moves(
    fields: dict[str, int], body_bytes: int, code: str
) -> None:
    """The last one: legal counts, a body of 394 KB, and a reply just over the cap."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork()
        address = await serve_on(nursery, network.host("b"), endpoint(SERVER), {Experts: compute})
        rude = await Rude.dial(network.host("c"), address, endpoint(3))
        header = {"model": MODEL, "layer": 0, "form": "experts", "encoding": "f32", "n_rows": 1, "n_pairs": 1}
        tracemalloc.start()
        try:
            await rude.send_raw(raw_frame(1, raw_start(Experts.number, {**header, **fields}, body_bytes)))
            assert await rude.last_words() == code
            assert tracemalloc.get_traced_memory()[1] < 1 * MIB
        finally:
            tracemalloc.stop()
        peer = await dial_from(nursery, network.host("a"), address)
        rows = np.ones((1, N_EMBD), np.float32)
        good = encode_experts_body(rows, np.zeros(1, np.int32), np.zeros(1, np.int32), None, "f32")
        await peer.request(Experts(MODEL, 0, "experts", "f32", 1, 1), good)
        nursery.cancel_scope.cancel()
