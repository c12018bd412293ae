"""The route of shards: the file that `swarmnode shard` writes, parts of it, and clients that do not take it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from gguf import GGUFReader
from starlette.applications import Starlette
from starlette.routing import Route

from swarmnode.api import serve
from swarmnode.api.serve import HANG_UP
from swarmnode.api.shard_route import LATE_S, ShardRoute, Taking, _ShardResponse
from swarmnode.config import ApiConfig, Config, NodeApiConfig, WireConfig
from swarmnode.services.runners import Inline, Runner, Threads
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.shard import ShardFile, write_shard
from swarmnode.weights.shard_layout import ShardLayout
from swarmnode.weights.slices import ExpertRange
from tests.api.kit import until

MODEL = TinyModel(
    n_layer=4, n_expert=6, n_expert_used=2, up_type="Q4_K", down_types=("Q6_K",), dense_layers=(0,)
)
LARGE = TinyModel(n_layer=2, n_expert=16, n_expert_used=2, n_ff=512)
URL = "/api/models/Tiny Random/expert-shard"
SOME = {"layers": "1:3", "experts": "2:6"}
CONFIG = NodeApiConfig(shard_piece_bytes=10_000)


@contextmanager
def opened(
    folder: Path,
    model: TinyModel,
    threads: Runner,
    config: NodeApiConfig = CONFIG,
    stalled_s: float = 60.0,
    wire: WireConfig = WireConfig(),  # noqa: B008 - frozen
) -> Iterator[tuple[Starlette, ShardRoute, ModelIndex]]:
    with ModelIndex.open(write_tiny_gguf(folder / "tiny.gguf", model)) as index:
        whole = replace(Config(), node_api=config, api=ApiConfig(stalled_s=stalled_s), wire=wire)
        route = ShardRoute(build_manifest(index), index, ("Tiny Random",), threads, whole, lambda: -math.inf)
        app = Starlette(routes=[Route("/api/models/{model:path}/expert-shard", route.answer)])
        yield app, route, index


@asynccontextmanager
async def open_client(folder: Path, config: NodeApiConfig = CONFIG) -> AsyncIterator[httpx.AsyncClient]:
    with opened(folder, MODEL, Inline(), config) as (app, _, _):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost"
        ) as client:
            yield client


def written(folder: Path) -> bytes:
    """What `swarmnode shard` writes for SOME."""
    path = folder / "written.gguf"
    with ModelIndex.open(folder / "tiny.gguf") as index:
        write_shard(path, index, build_manifest(index), [ExpertRange(1, 2, 4), ExpertRange(2, 2, 4)])
    return path.read_bytes()


async def test_the_file_that_the_command_writes(tmp_path: Path) -> None:
    async with open_client(tmp_path) as client:
        answer = await client.get(URL, params=SOME)
        head = await client.head(URL, params=SOME)
    assert answer.status_code == 200
    assert answer.content == written(tmp_path)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert head.content == b""
    assert head.headers == answer.headers
    path = tmp_path / "got.gguf"
    path.write_bytes(answer.content)
    names = {tensor.name for tensor in GGUFReader(path).tensors}
    assert names == {
        f"blk.{layer}.ffn_{kind}_exps.weight" for layer in (1, 2) for kind in ("gate", "up", "down")
    }
    assert dict(ShardFile(path).experts) == {1: (2, 3, 4, 5), 2: (2, 3, 4, 5)}


async def test_parts_of_it(tmp_path: Path) -> None:
    async with open_client(tmp_path) as client:
        whole = (await client.get(URL, params=SOME)).content
        n = len(whole)
        for value, part in [
            ("bytes=0-0", range(1)),
            ("bytes=100-25099", range(100, 25_100)),
            (f"bytes={n - 5}-", range(n - 5, n)),
            ("bytes=-7", range(n - 7, n)),
            (f"bytes=5-{n * 2}", range(5, n)),
        ]:
            answer = await client.get(URL, params=SOME, headers={"Range": value})
            assert answer.status_code == 206
            assert answer.content == whole[part.start : part.stop]
            assert answer.headers["content-range"] == f"bytes {part.start}-{part.stop - 1}/{n}"
            assert int(answer.headers["content-length"]) == len(part)
        several = await client.get(URL, params=SOME, headers={"Range": "bytes=0-1,3-4"})
        assert (several.status_code, several.content) == (200, whole)


async def test_versions(tmp_path: Path) -> None:
    async with open_client(tmp_path) as client:
        first = await client.get(URL, params=SOME)
        etag = first.headers["etag"]
        assert (await client.get(URL, params=SOME, headers={"If-None-Match": etag})).status_code == 304
        part = {"Range": "bytes=0-9"}
        same = await client.get(URL, params=SOME, headers=part | {"If-Range": etag})
        assert same.status_code == 206
        other = await client.get(URL, params=SOME, headers=part | {"If-Range": '"other"'})
        assert other.status_code == 200
        others = await client.get(URL, params=SOME | {"experts": "1:5"})
        assert others.headers["etag"] != etag


@pytest.mark.parametrize("value", ["bytes=999999999-", "bytes=5-4", "bytes=-0", "bytes=x"])
async def test_ranges_that_do_not_exist(tmp_path: Path, value: str) -> None:
    async with open_client(tmp_path) as client:
        n_bytes = (await client.head(URL, params=SOME)).headers["content-length"]
        answer = await client.get(URL, params=SOME, headers={"Range": value})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{n_bytes}"
    assert answer.json()["error"]["code"] == "range_not_satisfiable"


@pytest.mark.parametrize(
    ("url", "query", "status", "says"),
    [
        ("/api/models/other/expert-shard", SOME, 404, "no model"),
        ("/api/models/0123456/expert-shard", SOME, 404, "no model"),
        (URL, {}, 422, "layers"),
        (URL, {"layers": "0:2"}, 422, "experts"),
        (URL, {"layers": "2:0", "experts": "0:1"}, 422, "layers: '2:0' is no range"),
        (URL, {"layers": ["1:2", "1:2"], "experts": "0:1"}, 422, "once"),
        (URL, {"layers": "1", "experts": "0:1"}, 422, "no range"),
        (URL, {"layers": "1:2", "experts": "-1:1"}, 422, "no range"),
        (URL, {"layers": "0:2", "experts": "0:1"}, 404, "layers 1 to 3 do"),
        (URL, {"layers": "1:5", "experts": "0:1"}, 404, "layers 1 to 3 do"),
        (URL, {"layers": "1:999999999", "experts": "0:1"}, 404, "layers 1 to 3 do"),
        (URL, {"layers": "1:2", "experts": "0:7"}, 404, "experts 0 to 5"),
        (URL, {"layers": "1:2", "experts": "0:999999999"}, 404, "experts 0 to 5"),
    ],
    ids=str,
)
async def test_wrong_requests(
    tmp_path: Path, url: str, query: dict[str, Any], status: int, says: str
) -> None:
    async with open_client(tmp_path) as client:
        answer = await client.get(url, params=query)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


async def test_no_more_at_a_time_than_allowed(tmp_path: Path) -> None:
    async with open_client(tmp_path, replace(CONFIG, max_shards=0)) as client:
        answer = await client.get(URL, params=SOME)
        head = await client.head(URL, params=SOME)
        same = await client.get(URL, params=SOME, headers={"If-None-Match": head.headers["etag"]})
        part = await client.head(URL, params=SOME, headers={"Range": "bytes=0-9"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    assert (head.status_code, same.status_code, part.status_code) == (200, 304, 206), "no bytes, no place"
    assert part.headers["content-length"] == "10"


@pytest.mark.parametrize("n_shards", [1, 3])
async def test_shards_leave_room_for_rows(tmp_path: Path, n_shards: int) -> None:
    """Together they leave at the rate set, however many there are; without rows nothing holds them."""
    with opened(tmp_path, MODEL, Inline()) as (_, route, _):
        sent: list[int] = []

        async def receive(message: Any) -> None:
            sent.append(len(message["body"]))

        layout = ShardLayout.of(route._manifest, [ExpertRange(1, 0, 1)])
        wanted = range(layout.n_bytes)
        for rows_at_s, rate in ((-math.inf, math.inf), (math.inf, CONFIG.beside_rows_per_s)):
            route._rows_at_s = partial(float, rows_at_s)
            sent.clear()
            began_s = trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(n_shards):
                    nursery.start_soon(route.send_pieces, layout, wanted, receive, Taking())
            took_s = trio.current_time() - began_s
            assert sum(sent) == n_shards * layout.n_bytes
            assert took_s == pytest.approx(
                sum(sent[:-1]) / rate, rel=0.02, abs=1e-9 + LATE_S * (rate < math.inf)
            )


async def test_a_shard_that_was_held_up_catches_up_no_more_than_a_little(tmp_path: Path) -> None:
    with opened(tmp_path, MODEL, Inline()) as (_, route, _):
        route._rows_at_s = partial(float, math.inf)
        n_bytes = int(CONFIG.beside_rows_per_s / 1000)
        times_s: list[float] = []
        for pause_s in [0.0, 10.0] + 20 * [0.0]:
            await trio.sleep(pause_s)
            await route._make_room(n_bytes)
            times_s.append(trio.current_time())
        at_once = [time_s for time_s in times_s[1:] if time_s == times_s[1]]
        assert len(at_once) == 1 + round(LATE_S * 1000)
        assert times_s[-1] - times_s[1] == pytest.approx(0.001 * (20 - LATE_S * 1000))


RATE = WireConfig.min_progress_bytes_per_s
INTERVAL_S = WireConfig.ping_interval_s


@dataclass
class Client:
    """One that takes pieces as `takes` says."""

    takes: Callable[[int], Awaitable[None]]
    was_hung_up: bool = False
    n_bytes: int = 0

    async def ask(self, route: ShardRoute, layout: ShardLayout) -> None:
        response = _ShardResponse(route, layout, range(layout.n_bytes), {})
        scope = {"type": "http", "method": "GET", "extensions": {HANG_UP: self._hang_up}}
        await response(scope, trio.sleep_forever, self._send)

    async def _send(self, message: Any) -> None:
        body = message.get("body", b"")
        await self.takes(len(body))
        self.n_bytes += len(body)

    async def _hang_up(self) -> None:
        self.was_hung_up = True


def at(bytes_per_s: float) -> Callable[[int], Awaitable[None]]:
    async def takes(n_bytes: int) -> None:
        await trio.sleep(n_bytes / bytes_per_s)

    return takes


@pytest.mark.parametrize(
    ("takes", "was_hung_up", "within_s"),
    [
        (at(1.1 * RATE), False, math.inf),
        (at(0.9 * RATE), True, 2 * INTERVAL_S),
        (at(1), True, 2 * INTERVAL_S),
        (at(16_384 / 59), True, 2 * INTERVAL_S),
    ],
    ids=["slow enough", "too slow", "trickles", "a piece a minute"],
)
async def test_who_takes_next_to_nothing_gives_its_place_back(
    tmp_path: Path, takes: Callable[[int], Awaitable[None]], was_hung_up: bool, within_s: float
) -> None:
    with opened(tmp_path, LARGE, Inline(), NodeApiConfig(shard_piece_bytes=16_384)) as (_, route, _):
        layout = ShardLayout.of(route._manifest, [ExpertRange(0, 0, 4)])
        client = Client(takes)
        began_s = trio.current_time()
        await client.ask(route, layout)
        assert client.was_hung_up == was_hung_up
        assert trio.current_time() - began_s <= within_s
        assert (client.n_bytes == layout.n_bytes) != was_hung_up
        assert route.n_sending == 0


async def test_what_shards_rest_beside_rows_is_not_their_clients_doing(tmp_path: Path) -> None:
    slow = NodeApiConfig(shard_piece_bytes=65_536, beside_rows_per_s=RATE / 4)
    with opened(tmp_path, LARGE, Inline(), slow) as (_, route, _):
        route._rows_at_s = partial(float, math.inf)
        layout = ShardLayout.of(route._manifest, [ExpertRange(0, 0, 1)])
        client = Client(at(4 * RATE))
        began_s = trio.current_time()
        await client.ask(route, layout)
        assert not client.was_hung_up
        assert trio.current_time() - began_s > 4 * INTERVAL_S


async def test_who_took_fast_and_then_trickles_is_found(tmp_path: Path) -> None:
    with opened(tmp_path, LARGE, Inline(), NodeApiConfig(shard_piece_bytes=16_384)) as (_, route, _):
        layout = ShardLayout.of(route._manifest, [ExpertRange(0, 0, 4)])

        async def takes(n_bytes: int) -> None:
            await trio.sleep(n_bytes / (100 * RATE) if client.n_bytes < layout.n_bytes / 2 else 59.0)

        client = Client(takes)
        began_s = trio.current_time()
        await client.ask(route, layout)
        assert client.was_hung_up
        assert trio.current_time() - began_s <= 4 * INTERVAL_S


# -- over real sockets


@asynccontextmanager
async def served(
    folder: Path,
    stalled_s: float,
    wire: WireConfig = WireConfig(),  # noqa: B008 - frozen
) -> AsyncIterator[tuple[int, ShardRoute, list[int]]]:
    """The port, the route, and the sizes of all pieces that were read."""
    read: list[int] = []
    with opened(folder, LARGE, Threads(), NodeApiConfig(), stalled_s, wire) as (app, route, index):

        class Counting:
            def slab(self, layer: int, expert: int, kind: str) -> memoryview:
                slab = index.slab(layer, expert, kind)
                read.append(len(slab))
                return slab

        route._source = Counting()
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener, trio.open_nursery() as nursery:
            await nursery.start(_serve, app, listener, stalled_s)
            yield listener.socket.getsockname()[1], route, read
            nursery.cancel_scope.cancel()


async def _serve(
    app: Starlette, listener: trio.SocketListener, stalled_s: float, task_status: trio.TaskStatus[None]
) -> None:
    await serve.run(app, listener, config=ApiConfig(stalled_s=stalled_s), task_status=task_status)


def request(port: int) -> bytes:
    query = f"layers=0:2&experts=0:16 HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"
    return f"GET /api/models/Tiny%20Random/expert-shard?{query}".encode()


@pytest.mark.real_time
async def test_over_a_socket(tmp_path: Path) -> None:
    async with served(tmp_path, 60.0) as (port, route, _), httpx.AsyncClient(trust_env=False) as client:
        url = f"http://localhost:{port}{URL}"
        whole = await client.get(url, params={"layers": "0:2", "experts": "0:16"})
        assert len(whole.content) == int(whole.headers["content-length"]) > 48_000_000
        part = await client.get(
            url, params={"layers": "0:2", "experts": "0:16"}, headers={"Range": "bytes=20000000-30000000"}
        )
        assert part.content == whole.content[20_000_000:30_000_001]
        await until(lambda: route.n_sending == 0)


@pytest.mark.real_time
@pytest.mark.parametrize("leaves", [True, False], ids=["hangs up", "stalls"])
async def test_clients_that_do_not_take_it(tmp_path: Path, leaves: bool) -> None:
    """What is read for them stays far below what they asked for, and then their connection ends."""
    async with served(tmp_path, 60.0 if leaves else 0.5) as (port, route, read):
        connection = await trio.open_tcp_stream("127.0.0.1", port)
        async with connection:
            await connection.send_all(request(port))
            assert (await connection.receive_some(100)).startswith(b"HTTP/1.1 200")
            if leaves:
                await connection.aclose()
            await until(lambda: route.n_sending == 0)
        assert sum(read) < 40_000_000


@pytest.mark.real_time
async def test_a_client_that_trickles_is_hung_up_on(tmp_path: Path) -> None:
    """It keeps the kernel's deadline from passing, and Hypercorn waits for it in a shield."""
    wire = WireConfig(ping_interval_s=0.3, min_progress_bytes_per_s=1024 * 1024)
    async with served(tmp_path, 60.0, wire) as (port, route, _):
        connection = await trio.open_tcp_stream("127.0.0.1", port)
        async with connection:
            await connection.send_all(request(port))
            with trio.fail_after(20), suppress(trio.BrokenResourceError):
                while await connection.receive_some(100):
                    await trio.sleep(0.01)
                    if route.n_sending == 0:
                        break
            assert route.n_sending == 0
        again = await trio.open_tcp_stream("127.0.0.1", port)
        async with again:
            await again.send_all(request(port))
            assert (await again.receive_some(100)).startswith(b"HTTP/1.1 200")


@pytest.mark.real_time
async def test_a_client_that_is_fast_enough_is_not(tmp_path: Path) -> None:
    wire = WireConfig(ping_interval_s=0.2, min_progress_bytes_per_s=512 * 1024)
    async with served(tmp_path, 60.0, wire) as (port, _, _):
        connection = await trio.open_tcp_stream("127.0.0.1", port)
        async with connection:
            await connection.send_all(request(port))
            n_bytes = 0
            while n_bytes < 12_000_000:
                piece = await connection.receive_some(65_536)
                assert piece
                n_bytes += len(piece)
                await trio.sleep(len(piece) / 6e6)
