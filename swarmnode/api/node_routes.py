"""The node-local routes: the market as this node sees it, and experts as files. All behind the node's token.

An earlier machine had them on a central server; here a node answers for itself, out of what gossip told it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarmnode.api.answers import refusal
from swarmnode.api.body import Bodies
from swarmnode.api.json_bounds import check_marks_untrusted
from swarmnode.api.node_forms import (
    AnnounceForm,
    is_model,
    parse_announce_untrusted,
    parse_volunteer_untrusted,
)
from swarmnode.api.shard_route import ShardRoute
from swarmnode.api.token_guard import TokenGuard
from swarmnode.config import Config
from swarmnode.errors import UsageError
from swarmnode.identity import NodeId
from swarmnode.services.demand import DemandWatch
from swarmnode.services.market_watch import (
    Holder,
    MarketSnapshot,
    MarketWatch,
    choose_ranges,
    holder_id_of,
)
from swarmnode.services.runners import Runner
from swarmnode.weights.shard_layout import SlabSource
from swarmnode.weights.slices import ExpertRange


@dataclass(frozen=True)
class NodeApi:
    """What the routes work with. `source`: every expert's bytes; `names`: what people call the model."""

    own: NodeId
    token: str
    market: MarketWatch
    demand: DemandWatch
    source: SlabSource
    names: tuple[str, ...]
    threads: Runner
    config: Config
    rows_at_s: Callable[[], float]
    """When rows travelled last, by trio's clock."""


def node_routes(node: NodeApi) -> list[Route]:
    """For the application."""
    guard = TokenGuard(node.token)
    routes = _NodeRoutes(node)
    shards = ShardRoute(
        node.market.manifest,
        node.source,
        node.names,
        node.threads,
        node.config,
        node.rows_at_s,
    )
    coverage = "/api/expert-coverage"
    return [
        Route(coverage, guard(routes.coverage), methods=["GET"]),
        Route(coverage, guard(routes.announce), methods=["POST"]),
        Route(coverage, guard(routes.withdraw), methods=["DELETE"]),
        Route("/api/expert-demand", guard(routes.demand), methods=["GET"]),
        Route("/api/expert-volunteer", guard(routes.volunteer), methods=["POST"]),
        Route("/api/models/{model:path}/expert-shard", guard(shards.answer), methods=["GET"]),
    ]


class _NodeRoutes:
    def __init__(self, node: NodeApi) -> None:
        self._node = node
        self._market = node.market
        self._bodies = Bodies(node.config.api)
        manifest = node.market.manifest
        self._head = {"model": manifest.name, "model_id": manifest.model_id.hex()}

    async def coverage(self, request: Request) -> Response:
        """Who holds what, by layer."""
        snapshot = self._market.snapshot()
        now_s = trio.current_time()
        head = self._head | {
            "nodes": snapshot.n_nodes,
            "announced_by": [_holder(holder, now_s) for holder in snapshot.announced_by],
        }
        return await self._json(lambda: head | {"layers": _coverage(snapshot)})

    async def demand(self, request: Request) -> Response:
        """What backbones want, by layer."""
        snapshot, own = self._market.snapshot(), self._node.demand.counts
        head = self._head | {"backbones": snapshot.n_sketches, "pairs_per_s": round(snapshot.demand.per_s, 2)}
        return await self._json(lambda: head | {"layers": _demand(snapshot, own)})

    async def announce(self, request: Request) -> Response:
        """A holder that does not gossip says what it has."""
        limits = self._node.config.node_api
        try:
            body = await self._body(request)
            form = parse_announce_untrusted(body, limits.max_lease_s)
            if not self._is_ours(form.model):
                return self._no_model(form.model)
            if form.lease_s == 0:
                return self._gone(holder_id_of(form.addresses))
            holder = self._announce(form)
        except UsageError as error:
            return refusal(422, str(error), code="invalid_body")
        if holder is None:
            message = f"{limits.max_holders} holders have announced themselves already"
            return refusal(429, message, "rate_limit_error", "too_many_holders")
        return JSONResponse(_holder(holder, trio.current_time()) | self._head)

    async def withdraw(self, request: Request) -> Response:
        """The same holder says that it has nothing any more."""
        values = request.query_params.getlist("holder")
        if len(values) != 1:
            return refusal(
                422, "holder: give once what the announcement was answered with", code="invalid_query"
            )
        return self._gone(values[0])

    async def volunteer(self, request: Request) -> Response:
        """What somebody with this budget should hold."""
        try:
            form = parse_volunteer_untrusted(await self._body(request))
            if not self._is_ours(form.model):
                return self._no_model(form.model)
            held = self._market.checked(form.held)
        except UsageError as error:
            return refusal(422, str(error), code="invalid_body")
        seed = self._node.own.raw + form.seed.encode("utf-8", "surrogatepass")
        snapshot = self._market.snapshot()
        choose = partial(choose_ranges, snapshot, held, form.budget_bytes, seed)
        ranges = await self._node.threads.run(choose)
        answer = {
            "ranges": _plain(ranges),
            "experts": sum(item.count for item in ranges),
            "bytes": snapshot.shape.range_bytes(ranges),
            "held_bytes": snapshot.shape.range_bytes(held),
        }
        return JSONResponse(self._head | answer)

    def _announce(self, form: AnnounceForm) -> Holder | None:
        return self._market.announce(form.addresses, form.ranges, form.lease_s)

    def _gone(self, holder_id: str) -> Response:
        if not self._market.withdraw(holder_id):
            return refusal(404, f"no holder {holder_id[:40]!r} has announced itself", code="no_such_holder")
        return JSONResponse(self._head | {"holder": holder_id, "lease_s": 0})

    async def _body(self, request: Request) -> object:
        """Raises UsageError for what is too long or not JSON."""
        limits = self._node.config.node_api
        async with self._bodies.read(request, limits.max_body_bytes) as data:
            check_marks_untrusted(data, limits.max_body_marks)
        try:
            return json.loads(data.decode("utf-8"))  # of other encodings nobody counted the marks
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the body is not valid JSON: {error}") from error

    def _is_ours(self, model: str) -> bool:
        return is_model(model, self._market.manifest.model_id, self._node.names)

    def _no_model(self, model: str) -> Response:
        message = f"there is no model {model[:80]!r} here; there is {self._head['model']!r}"
        return refusal(404, message, code="model_not_found")

    async def _json(self, make: Callable[[], dict[str, Any]]) -> Response:
        """Made on a thread: of 12,288 experts it takes 20 ms, which rows would have to wait for."""
        data = await self._node.threads.run(lambda: json.dumps(make(), separators=(",", ":")).encode())
        return Response(data, media_type="application/json")


def _holder(holder: Holder, now_s: float) -> dict[str, Any]:
    return {
        "holder": holder.holder_id,
        "addresses": list(holder.addresses),
        "experts": sum(item.count for item in holder.ranges),
        "lease_s": round(max(0.0, holder.until_s - now_s), 1),
    }


def _plain(ranges: tuple[ExpertRange, ...]) -> list[list[int]]:
    return [[item.layer, item.first, item.count] for item in ranges]


def _coverage(snapshot: MarketSnapshot) -> list[dict[str, Any]]:
    columns: dict[str, npt.NDArray[Any]] = {
        "replicas": _rounded(snapshot.replicas),
        "serving": snapshot.holders,
        "fetching": snapshot.fetching,
        "announced": snapshot.announced,
        "scarcity": _rounded(snapshot.scarcity),
    }
    return _by_layer(snapshot, columns, with_bytes=True)


def _demand(snapshot: MarketSnapshot, own: npt.NDArray[np.float64]) -> list[dict[str, Any]]:
    columns: dict[str, npt.NDArray[Any]] = {
        "weight": _rounded(snapshot.demand.weight),
        "unmet": _rounded(snapshot.demand.unmet),
        "own_pairs": _rounded(own.reshape(-1)),
    }
    return _by_layer(snapshot, columns, with_bytes=False)


def _by_layer(
    snapshot: MarketSnapshot, columns: dict[str, npt.NDArray[Any]], *, with_bytes: bool
) -> list[dict[str, Any]]:
    """One object a layer with routed experts, with a list of one value an expert for each column."""
    shape = snapshot.shape
    layers = []
    for layer, n_bytes in sorted(shape.expert_bytes.items()):
        where = shape.slice_of(ExpertRange(layer, 0, shape.n_expert))
        head = {"layer": layer} | ({"expert_bytes": n_bytes} if with_bytes else {})
        layers.append(head | {name: values[where].tolist() for name, values in columns.items()})
    return layers


def _rounded(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Two digits behind the point; f64, because f32 of them print as many more."""
    return values.astype(np.float64).round(2)
