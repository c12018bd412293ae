"""GET /api/models/{m}/expert-shard: experts as a mini-GGUF, read out of the model's file while it is sent.

No file is written, and no more than a piece of it is in memory, however slowly the client takes it.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import trio
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmnode.api.answers import refusal
from swarmnode.api.byte_range import is_fresh, parse_range
from swarmnode.api.node_forms import is_model
from swarmnode.api.serve import HANG_UP
from swarmnode.config import Config
from swarmnode.errors import UsageError
from swarmnode.services.runners import Runner
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.shard_layout import ShardLayout, SlabSource
from swarmnode.weights.slices import ExpertRange, parse_span

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
LATE_S = 0.005
"""A piece that comes so late is followed by the next ones at once: timers have milliseconds, pieces last one."""


@dataclass(frozen=True)
class _Shard:
    """A shard that was asked for, and the version of its bytes."""

    layout: ShardLayout
    etag: str


class Taking:
    """How much a client has taken, and how long it was waited for meanwhile."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._waited_s = 0.0
        self._since_s: float | None = None

    @property
    def waited_s(self) -> float:
        """Only while something waited for the client: what a shard rests beside rows is none of its doing."""
        return self._waited_s + (0.0 if self._since_s is None else trio.current_time() - self._since_s)

    @contextmanager
    def piece(self, n_bytes: int) -> Iterator[None]:
        """Around the sending of a piece."""
        self._since_s = trio.current_time()
        try:
            yield
        finally:
            self._waited_s, self._since_s = self.waited_s, None
        self.n_bytes += n_bytes


class ShardRoute:
    """Serves the shards of one model. `names`: what the model is called beside its id."""

    def __init__(
        self,
        manifest: Manifest,
        source: SlabSource,
        names: tuple[str, ...],
        threads: Runner,
        config: Config,
        rows_at_s: Callable[[], float],
    ) -> None:
        """`rows_at_s`: when rows travelled last (trio's clock); shards make room for them."""
        self._manifest = manifest
        self._source = source
        self._names = names
        self._threads = threads
        self._config = config.node_api
        self._rows_recent_s = config.store.rows_recent_s
        self._stalled_s = config.api.stalled_s
        self._interval_s = config.wire.ping_interval_s
        self._min_bytes_per_s = config.wire.min_progress_bytes_per_s
        self._rows_at_s = rows_at_s
        self._due_s = -math.inf
        """When the next piece of all shards may leave, while rows travel."""
        self.n_sending = 0
        """Shards that are being sent."""

    async def answer(self, request: Request) -> Response:
        """200, 206 or 304; 404 for another model or experts it does not have, 416, 422, 429."""
        if not is_model(request.path_params["model"], self._manifest.model_id, self._names):
            message = f"there is no model {request.path_params['model'][:80]!r} here; there is {self._manifest.name!r}"
            return refusal(404, message, code="model_not_found")
        try:
            layers, experts = _span(request.query_params, "layers"), _span(request.query_params, "experts")
        except UsageError as error:
            return refusal(422, str(error), code="invalid_query")
        problem = self._missing(layers, experts)
        if problem:
            return refusal(404, problem, code="no_such_experts")
        ranges = [ExpertRange(layer, experts.start, len(experts)) for layer in layers]
        shard = await self._threads.run(partial(_shard_of, self._manifest, ranges))
        is_asking = request.method == "HEAD"
        return self._respond(request.headers, shard, _file_name(layers, experts), is_asking)

    def _missing(self, layers: range, experts: range) -> str:
        """What of these the model does not have; "" if it has all. Never looks at a layer above its last."""
        known = self._manifest.layers
        if experts.stop > self._manifest.n_expert:
            return f"this model has experts 0 to {self._manifest.n_expert - 1} in a layer"
        if layers.stop > max(known) + 1 or not all(layer in known for layer in layers):
            return f"not all of these layers have routed experts; layers {min(known)} to {max(known)} do"
        return ""

    def _respond(self, headers: Mapping[str, str], shard: _Shard, name: str, is_asking: bool) -> Response:
        """`is_asking`: for the headers only, which takes no place."""
        n_bytes = shard.layout.n_bytes
        common = {"etag": shard.etag, "accept-ranges": "bytes"}
        if is_fresh(headers.get("if-none-match", ""), shard.etag):
            return Response(status_code=304, headers=common)
        wanted: range | None = None
        if "range" in headers and headers.get("if-range", shard.etag) == shard.etag:
            try:
                wanted = parse_range(headers["range"], n_bytes)
            except UsageError as error:
                missing = common | {"content-range": f"bytes */{n_bytes}"}
                return refusal(416, str(error), code="range_not_satisfiable", headers=missing)
        if self.n_sending >= self._config.max_shards and not is_asking:
            message = (
                f"{self._config.max_shards} shards are being sent already; try again in {RETRY_AFTER_S} s"
            )
            return refusal(429, message, "rate_limit_error", "busy", {"Retry-After": str(RETRY_AFTER_S)})
        if wanted is not None:
            common["content-range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{n_bytes}"
        common["content-disposition"] = f'attachment; filename="{name}"'
        return _ShardResponse(self, shard.layout, range(n_bytes) if wanted is None else wanted, common)

    async def send_pieces(self, layout: ShardLayout, wanted: range, send: Send, taking: Taking) -> None:
        """The bytes of a body, each piece read when the one before has left; ends early if nobody takes them."""
        step = self._config.shard_piece_bytes
        for start in range(wanted.start, wanted.stop, step):
            stop = min(start + step, wanted.stop)
            await self._make_room(stop - start)
            piece = await self._threads.run(partial(layout.read, self._source, start, stop))
            with trio.move_on_after(self._stalled_s) as scope, taking.piece(stop - start):
                await send({"type": "http.response.body", "body": piece, "more_body": stop < wanted.stop})
            if scope.cancelled_caught:
                log.info("a client that takes nothing of its shard is disconnected")
                return

    async def wait_for_crawling(self, taking: Taking) -> None:
        """Until a client takes less than WireConfig.min_progress_bytes_per_s over two ping intervals.

        It must have been waited for in half of that time: the last piece of a fast one says nothing about its speed.
        """
        while True:
            n_bytes, waited_s = taking.n_bytes, taking.waited_s
            await trio.sleep(2 * self._interval_s)
            late_s = taking.waited_s - waited_s
            if late_s >= self._interval_s and taking.n_bytes - n_bytes < late_s * self._min_bytes_per_s:
                log.info("a client that takes next to nothing of its shard is disconnected")
                return

    async def _make_room(self, n_bytes: int) -> None:
        """While rows travel, wait until the next `n_bytes` of all shards are due (NodeApiConfig.beside_rows_per_s)."""
        now_s = trio.current_time()
        if now_s - self._rows_at_s() < self._rows_recent_s:
            due_s = max(self._due_s, now_s - LATE_S)
            self._due_s = due_s + n_bytes / self._config.beside_rows_per_s
            await trio.sleep_until(due_s)


class _ShardResponse(Response):
    """Headers, then pieces, until all is sent or the client is gone."""

    def __init__(
        self, route: ShardRoute, layout: ShardLayout, wanted: range, headers: dict[str, str]
    ) -> None:
        self._route = route
        self._layout = layout
        self._wanted = wanted
        is_part = "content-range" in headers
        super().__init__(
            status_code=206 if is_part else 200,
            headers=headers | {"content-length": str(len(wanted))},
            media_type="application/octet-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        self._route.n_sending += 1
        try:
            await send(start)
            taking = Taking()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                nursery.start_soon(self._hang_up_on_a_crawler, taking, scope, nursery.cancel_scope)
                await self._route.send_pieces(self._layout, self._wanted, send, taking)
                nursery.cancel_scope.cancel()
        finally:
            self._route.n_sending -= 1

    async def _hang_up_on_a_crawler(self, taking: Taking, request: Scope, sending: trio.CancelScope) -> None:
        await self._route.wait_for_crawling(taking)
        if hang_up := request.get("extensions", {}).get(HANG_UP):
            await hang_up()
        sending.cancel()


def _shard_of(manifest: Manifest, ranges: list[ExpertRange]) -> _Shard:
    """The header names model and experts, and the model's id stands for all bytes: its hash is the version."""
    layout = ShardLayout.of(manifest, ranges)
    return _Shard(layout, f'"{hashlib.sha256(layout.header).hexdigest()[:32]}"')


def _span(query: QueryParams, name: str) -> range:
    values = query.getlist(name)
    if len(values) != 1:
        raise UsageError(f"{name}: give it once, as {name}=0:16 for 0 to 15")
    try:
        return parse_span(values[0][:40])
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _file_name(layers: range, experts: range) -> str:
    """Never looks like a part of a split model."""
    return f"layers-{layers.start}-to-{layers.stop - 1}-experts-{experts.start}-to-{experts.stop - 1}.gguf"


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
