"""What anybody with a key may send to a backbone: it answers, refuses or hangs up, and goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from swarmnode.config import Config, DispatchConfig, WireConfig
from swarmnode.errors import ConnectionLostError, RequestRefusedError
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.links import dial
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.services.members import Standing
from swarmnode.services.seeder import Seeder
from swarmnode.testing.swarm import Swarm, open_swarm, silent
from swarmnode.wire import messages
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Experts, Message
from tests.swarm.conftest import ALL_BYTES

PROMPT = [5, 80, 33, 7]


@asynccontextmanager
async def stranger(
    swarm: Swarm,
    handlers: Mapping[type[Message], Handler] | None = None,
    *,
    number: int = 99,
    config: WireConfig | None = None,
) -> AsyncIterator[Peer]:
    """A connection of somebody else's node to the backbone."""
    key = NodeKey.from_seed(bytes([number]) * 32)
    endpoint = Endpoint.create(
        Credentials(key), network="test", agent="stranger", roles=("worker",), config=config
    )
    async with trio.open_nursery() as nursery:
        connect = partial(
            dial, swarm.network.host(f"host{number}"), swarm.address, endpoint, handlers=handlers or {}
        )
        peer = await nursery.start(connect)
        yield peer
        peer.close()
        nursery.cancel_scope.cancel()


def announcement(swarm: Swarm, *ranges: tuple[int, int, int], max_rows: int = 512) -> messages.Announce:
    return messages.Announce(
        model=swarm.backbone.manifest.model_id,
        state="serving",
        holdings=ranges,
        max_rows=max_rows,
        device="none",
        capacity_bytes=1,
        seq=1,
    )


EVERYTHING = tuple((layer, 0, 8) for layer in range(4))


async def test_serving_nothing_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """An empty list once reached the prober and ended the process."""
    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm) as peer:
        with pytest.raises(RequestRefusedError, match="at least one"):
            await peer.request(announcement(swarm))
        await trio.sleep(10)
        assert len((await swarm.generate(PROMPT, 2))[0]) == 2


@pytest.mark.parametrize("item", [(4, 0, 1), (0, 8, 1), (0, 7, 2), (1000, 0, 1)])
async def test_holdings_outside_the_model_are_refused(
    tiny_model: Path, tmp_path: Path, item: tuple[int, int, int]
) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm) as peer:
        with pytest.raises(RequestRefusedError, match="bad_range"):
            await peer.request(announcement(swarm, item))


async def test_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm) as peer:
        for message in (
            messages.ManifestGet(model=bytes(32)),
            messages.SliceGet(model=bytes(32), layer=0, expert=0, kind="ffn_up_exps", offset=0, length=1),
        ):
            with pytest.raises(RequestRefusedError, match="wrong_model"):
                await peer.request(message)


@pytest.mark.parametrize(
    ("layer", "expert", "kind", "offset", "length", "code"),
    [
        (9, 0, "ffn_up_exps", 0, 1, "no_such_slice"),
        (0, 8, "ffn_up_exps", 0, 1, "no_such_slice"),
        (0, 0, "ffn_gate_up_exps", 0, 1, "no_such_slice"),
        (0, 0, "ffn_up_exps", 262_144, 1, "bad_range"),
        (0, 0, "ffn_up_exps", 262_143, 2, "bad_range"),
    ],
)
async def test_slices_that_do_not_exist_are_refused(
    tiny_model: Path, tmp_path: Path, layer: int, expert: int, kind: str, offset: int, length: int, code: str
) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm) as peer:
        message = messages.SliceGet(
            model=swarm.backbone.manifest.model_id,
            layer=layer,
            expert=expert,
            kind=kind,
            offset=offset,
            length=length,
        )
        with pytest.raises(RequestRefusedError, match=code):
            await peer.request(message)


async def test_small_caps_of_a_peer_do_not_break_prompts(tiny_model: Path, tmp_path: Path) -> None:
    """It announces batches that its own cap on bodies does not let through: requests are cut to the cap."""
    sizes: list[int] = []

    async def counting(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        sizes.append(len(body))
        raise RequestRefusedError("busy", "counting only")

    small = WireConfig(max_body_bytes=64 * 1024)
    async with open_swarm(tiny_model, tmp_path) as swarm:
        long_prompt = [1 + i % 200 for i in range(300)]
        alone, _ = await swarm.generate(long_prompt, 2)
        async with stranger(swarm, {Experts: counting}, config=small) as peer:
            await peer.request(announcement(swarm, *EVERYTHING, max_rows=65_536))
            (member,) = swarm.backbone.members.workers
            swarm.backbone.members.probe_passed(member)
            helped, _ = await swarm.generate(long_prompt, 2)
    assert helped == alone
    assert sizes
    assert max(sizes) <= small.max_body_bytes


async def test_a_holder_that_never_proves_itself_is_no_replica(tiny_model: Path, tmp_path: Path) -> None:
    """It claims everything and answers nothing, however long it is there."""
    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm, {Experts: silent}) as peer:
        await peer.request(announcement(swarm, *EVERYTHING))
        assert swarm.backbone.state.as_dict()["experts_covered"] == 0
        await trio.sleep(60)
        assert swarm.backbone.state.as_dict()["experts_covered"] == 0
        assert swarm.serving() == {}


async def test_many_announcements_make_one_watcher(tiny_model: Path, tmp_path: Path) -> None:
    n_probes = 0

    async def counting(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        nonlocal n_probes
        n_probes += 1
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm, {Experts: counting}) as peer:
        for _ in range(40):
            for _ in range(10):
                with suppress(RequestRefusedError):
                    await peer.request(announcement(swarm, *EVERYTHING))
            await trio.sleep(1.5)
    assert 1 <= n_probes <= 60 / swarm.config.dispatch.probe_timeout_s


async def test_announcements_are_limited_and_leaving_is_not(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm, {Experts: silent}) as peer:
        message = announcement(swarm, *EVERYTHING)
        for _ in range(swarm.config.dispatch.announce_burst):
            await peer.request(message)
        with pytest.raises(RequestRefusedError, match="busy") as caught:
            await peer.request(message)
        assert caught.value.retry_after_ms == 1000
        assert len(swarm.backbone.members.workers) == 1
        await peer.request(replace(message, state="leaving"))
        assert not swarm.backbone.members.workers
        await trio.sleep(1)
        await peer.request(message)


async def test_a_worker_whose_news_are_refused_as_too_many_tells_them_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Exception] = []
    limit = Seeder._limit

    def noting(seeder: Seeder, node_id: NodeId) -> None:
        try:
            limit(seeder, node_id)
        except RequestRefusedError as refusal:
            refused.append(refusal)
            raise

    monkeypatch.setattr(Seeder, "_limit", noting)
    config = replace(Config(), dispatch=replace(DispatchConfig(), announce_burst=1, announces_per_s=0.1))
    async with open_swarm(tiny_model, tmp_path, config=config, latency_s=0.02) as swarm:
        worker = await swarm.join(ALL_BYTES)  # in several runs; returns when all are known
        assert swarm.backbone.state.as_dict()["experts_covered"] == 32
    assert refused
    assert worker.waits == []


async def test_leaving_for_somebody_else_does_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(ALL_BYTES)
        async with stranger(swarm) as peer:
            message = announcement(swarm)
            await peer.request(
                messages.Announce(
                    model=message.model,
                    state="leaving",
                    holdings=(),
                    max_rows=1,
                    device="",
                    capacity_bytes=0,
                    seq=1,
                )
            )
        assert worker.key.node_id in swarm.serving()


async def test_a_probe_that_makes_us_fail_ends_one_connection(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm, {Experts: silent}) as peer:
        monkeypatch.setattr(swarm.backbone.prober, "n_embd", -1)  # a fault of ours: no such row can be made
        with suppress(ConnectionLostError):  # the connection may end before the answer is sent
            await peer.request(announcement(swarm, *EVERYTHING))
        ended = await peer.wait_closed()
        assert ended is not None
        assert len((await swarm.generate(PROMPT, 2))[0]) == 2


async def test_one_slow_worker_holds_up_one_conversation(tiny_model: Path, tmp_path: Path) -> None:
    """Conversations share the compute thread and nothing else."""
    slow = False

    async def late(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        await trio.sleep(0.4 if slow else 0)
        raise RequestRefusedError("busy", "later")

    async with open_swarm(tiny_model, tmp_path) as swarm, stranger(swarm, {Experts: late}) as peer:
        await peer.request(announcement(swarm, *EVERYTHING))
        (member,) = swarm.backbone.members.workers
        swarm.backbone.members.probe_passed(member)
        assert member.standing is Standing.SERVING
        slow = True
        started_s = trio.current_time()
        await swarm.generate(PROMPT, 4)
        one_s = trio.current_time() - started_s
        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(swarm.generate, PROMPT, 4)
        two_s = trio.current_time() - started_s
    assert one_s > 1
    assert two_s < 1.2 * one_s
