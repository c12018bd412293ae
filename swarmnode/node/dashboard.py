"""What the dashboard of a started backbone works with."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.api.dashboard_routes import Dashboard, Invitation
from swarmnode.api.event_feed import EventFeed
from swarmnode.errors import UsageError
from swarmnode.net.address import PeerAddress, is_loopback, is_private
from swarmnode.net.invite import MAX_PLACES, Invite, checked_network, join_command, suggested_budget
from swarmnode.net.own_hosts import answering, own_hosts
from swarmnode.node.common import NodeOptions
from swarmnode.services.dashboard_view import DashboardView
from swarmnode.services.own_record import WILDCARDS
from swarmnode.services.runners import Runner


def prepare_dashboard(
    view: DashboardView,
    options: NodeOptions,
    places: Sequence[PeerAddress],
    routed_bytes: int,
    token: str,
    threads: Runner,
) -> Dashboard:
    """`places`: where nodes are accepted. `routed_bytes`: of all routed experts of the model."""
    config = options.config.dashboard
    feed = EventFeed(view.look, view.history, threads, config.interval_s)
    return Dashboard(feed, lambda: invitation_of(options, places, routed_bytes), token, config)


def invitation_of(
    options: NodeOptions, places: Sequence[PeerAddress], routed_bytes: int
) -> Invitation | None:
    """A link to this node as `swarmnode invite` makes it, without the secret; None if nodes are not accepted."""
    addresses = _dialled_at(options, places)
    if not addresses:
        return None
    try:
        link = str(Invite(addresses, checked_network(options.network)))
        Invite.parse(link)
    except UsageError:  # no link is shown that others could not read
        return None
    secret = " --secret FILE" if options.secret is not None else ""
    reach = _reach(addresses)
    return Invitation(
        link=link,
        command=join_command(suggested_budget(routed_bytes), f'"{link}"', secret, beside=reach == "machine"),
        needs_secret=options.secret is not None,
        is_limited=options.allowed is not None,
        reach=reach,
        port=places[0].port,
    )


def _dialled_at(options: NodeOptions, places: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    """What the operator said first, then where the node listens: this machine's addresses where that is everywhere."""
    if not places:
        return ()
    node_id = places[0].node_id
    found = [PeerAddress(node_id, host, port) for host, port in options.advertise]
    for place in places:
        hosts = answering(place.host, own_hosts()) if place.host in WILDCARDS else [place.host]
        found += [PeerAddress(node_id, host, place.port) for host in hosts]
    return tuple(dict.fromkeys(found))[:MAX_PLACES]


def _reach(addresses: Sequence[PeerAddress]) -> str:
    """Of the address that reaches furthest. A name is taken to be known everywhere."""
    reaches = {_reach_of(address.host) for address in addresses}
    return next(reach for reach in ("internet", "network", "machine") if reach in reaches)


def _reach_of(host: str) -> str:
    return "machine" if is_loopback(host) else "network" if is_private(host) else "internet"
