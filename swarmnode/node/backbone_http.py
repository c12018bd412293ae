"""The HTTP face of a backbone: where it listens, whom it lets in, and what its routes work with."""

from __future__ import annotations

import hmac
import time
from collections import Counter
from functools import partial

import trio
from starlette.applications import Starlette

from swarmnode.api.access import Access
from swarmnode.api.app import Served, build_app
from swarmnode.api.metrics import Family
from swarmnode.api.node_routes import NodeApi
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.models.chat import template_of
from swarmnode.net.address import PeerAddress, is_loopback, join_host_port
from swarmnode.node.backbone_parts import Backbone, BackboneOptions, routed_bytes
from swarmnode.node.dashboard import prepare_dashboard
from swarmnode.services.api_keys import KeyRing
from swarmnode.services.dashboard_view import DashboardView
from swarmnode.services.key_limits import KeyLimits
from swarmnode.services.members import Standing
from swarmnode.services.runners import Threads
from swarmnode.weights.index import ModelIndex


async def api_listener(place: tuple[str, int], keys: KeyRing) -> trio.SocketListener:
    """Listen there. UsageError where that is not possible, or would let everybody in for want of a key."""
    host, port = place
    if not is_loopback(host) and not len(keys):
        raise UsageError(
            f"the API would listen on {host} for everybody who reaches this machine, and there is no key that lets "
            "anybody in: make one with `swarmnode key new` (same --home), or keep to this machine with "
            f"--api 127.0.0.1:{port}"
        )
    try:
        return (await trio.open_tcp_listeners(port, host=host))[0]
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; give another --api"
        ) from error


def url_of(listener: trio.SocketListener) -> str:
    """Where the API is, as a browser takes it."""
    host, port = listener.socket.getsockname()[:2]
    return f"http://{join_host_port(host, port)}"


def node_api_of(
    backbone: Backbone, index: ModelIndex, options: BackboneOptions, key: NodeKey, token: str
) -> NodeApi:
    """What the node-local routes of a started backbone work with."""
    known = backbone.state.gossip
    assert known is not None
    return NodeApi(
        own=key.node_id,
        token=token,
        market=known.market,
        demand=backbone.demand,
        source=index,
        names=(backbone.manifest.name,),
        threads=Threads(options.config.node_api.threads),
        config=options.config,
        rows_at_s=known.connections.rows_at_s,
    )


def access_of(options: BackboneOptions, keys: KeyRing, token: str) -> Access:
    """Besides keys the node's token lets in: whoever has that owns the node."""

    def admits(key: str) -> bool:
        return hmac.compare_digest(key.encode("utf-8", "replace"), token.encode()) or keys.admits(key)

    limits = KeyLimits(trio.current_time, options.config.api.retry_after_s)
    is_public = not is_loopback(options.api[0])
    return Access(admits, options.config.api.cors, is_public, keys.entry, limits)


def app_of(
    backbone: Backbone,
    index: ModelIndex,
    options: BackboneOptions,
    node: NodeApi,
    places: tuple[PeerAddress, ...],
    access: Access,
) -> Starlette:
    """The HTTP face of a started backbone. `places`: where it accepts nodes; `access`: who may use it."""
    engine, config = backbone.engine, options.config
    template = template_of(index.metadata, engine.tokenizer)
    known = backbone.state.gossip
    assert known is not None
    view = DashboardView(
        known,
        backbone.members,
        backbone.throughput,
        lambda: engine.n_waiting,
        config.dashboard,
        has_chat=template is not None,
    )
    n_bytes = routed_bytes(backbone.manifest)
    served = Served(
        engine,
        backbone.manifest.name,
        template,
        backbone.state.as_dict,
        int(time.time()),
        Threads(config.api.prompt_threads),
        config.api,
        node,
        access,
        gauges=partial(_gauges, backbone),
        dashboard=prepare_dashboard(view, options, places, n_bytes, node.token, node.threads),
    )
    return build_app(served)


def _gauges(backbone: Backbone) -> list[Family]:
    standings = Counter(worker.standing.value for worker in backbone.members.workers)
    covered, total = backbone.state.coverage()
    workers = [({"standing": standing.value}, float(standings[standing.value])) for standing in Standing]
    experts = [({"state": "covered"}, float(covered)), ({"state": "all"}, float(total))]
    return [
        Family("swarmnode_workers", "gauge", "Connected workers by standing.", workers),
        Family("swarmnode_experts", "gauge", "Routed experts, and those that workers answer for.", experts),
    ]
