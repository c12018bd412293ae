"""`swarmnode status`: the swarm as a running backbone knows it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import click

from swarmnode.cli.common import DEFAULT_API, clear_errors, say, visible
from swarmnode.cli.http_api import api_type, get_object
from swarmnode.cli.sizes import format_bytes
from swarmnode.cli.verb import Verb
from swarmnode.counts import counted
from swarmnode.errors import UsageError

WIDTH = 80
HEAT_WIDTH = 64
"""Characters of a layer's line; each stands for a group of experts, 4 of 256."""
MAX_LISTED = 12
COLOURS = {".": "red", "1": "yellow", "2": "green", "3": "bright_green"}


@click.command("status", cls=Verb)
@click.option(
    "--api",
    type=api_type(),
    default=DEFAULT_API,
    show_default=True,
    help="Where the backbone's API listens.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a time.")
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="List all nodes that the backbone tells of, not only the first dozen.",
)
@click.option("--watch", type=click.FloatRange(0.2, 86_400), metavar="SECONDS", help="Show again and again.")
@clear_errors
def command(api: str, as_json: bool, show_all: bool, watch: float | None) -> None:
    """Show nodes, coverage of each layer and what is scarce.

    Asks a running backbone, which knows it from gossip.

    \b
    Example: swarmnode status --watch 2
    """
    while True:
        state = swarm_state(api)
        if as_json:
            click.echo(json.dumps(state))
        else:
            if watch is not None:
                click.clear()  # does nothing unless this is a terminal
            for line in lines_of(state, sys.maxsize if show_all else MAX_LISTED):
                click.echo(line)
        sys.stdout.flush()
        if watch is None:
            return
        if not as_json:
            say()
        time.sleep(watch)


def swarm_state(api: str) -> dict[str, Any]:
    """GET /api/swarm. UsageError if it comes from something else, or from an older backbone."""
    state = get_object(api, "/api/swarm")
    if not isinstance(state.get("own"), dict) or not isinstance(state.get("coverage"), list):
        raise UsageError(f"what listens at {api} is no backbone that gossips; give another --api HOST:PORT")
    return state


def lines_of(state: dict[str, Any], max_nodes: int) -> Iterator[str]:
    """What is printed, at most WIDTH columns wide (colours not counted)."""
    yield from _head(state)
    yield ""
    yield from _coverage(state)
    yield ""
    yield from _scarcest(state)
    yield ""
    yield from _nodes(state, max_nodes)


def _fit(text: str) -> str:
    """One line of what may come from peers: no control characters, cut to the width."""
    line = visible(text)
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _head(state: dict[str, Any]) -> Iterator[str]:
    own = state["own"]
    yield _fit(f"model      {state['model']} ({state['model_id'][:16]})")
    yield _fit(f"this node  {own['node']}")
    holds = "all experts, for others to fetch" if own["seeds"] else counted(own["serving"], "expert")
    yield _fit(f"           {', '.join(own['roles'])} on {own['device']}; holds {holds}")
    for number, address in enumerate(own["addresses"] or [_no_address(own)]):
        yield _fit(f"{'           ' if number else 'addresses  '}{address}")
    yield _fit(f"reachable  {_reachability(own)}")
    yield _fit(
        f"connected  {counted(own['connected'], 'node')}; {counted(own['neighbours'], 'gossip neighbour')}"
    )
    if own["key_conflict"]:
        yield _fit("WARNING    another node runs with this node's key: stop one of the two")


def _no_address(own: dict[str, Any]) -> str:
    """Of a node that tells none: it listens on every address and has met nobody on one, or it does not listen."""
    port = own.get("listens_everywhere")  # not told by older backbones
    if port is None:
        return "none: only nodes that it dials are met"
    return f"all of this machine, port {port}; which one others use is not known yet"


def _reachability(own: dict[str, Any]) -> str:
    times, outside = own["dialled_by_others"], own["dialled_from_outside"]
    if not times:
        return "unknown: nobody has dialled this node yet"
    last = f"{_times(times)}, last {_ago(own['last_dialled_s_ago'])}"
    if outside:
        return f"yes: dialled {last}; {_times(outside)} from the internet"
    return f"from here: dialled {last}; not from the internet"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _coverage(state: dict[str, Any]) -> Iterator[str]:
    layers, n_expert = state["coverage"], state["experts_per_layer"]
    total = n_expert * len(layers)
    covered, doubled = sum(layer["covered"] for layer in layers), sum(layer["twice"] for layer in layers)
    yield f"coverage   {covered} of {total} experts ({_percent(covered, total)}), twice {_percent(doubled, total)}"
    group = math.ceil(n_expert / HEAT_WIDTH)
    of_what = "replicas of each expert" if group == 1 else f"least replicas of each {group} experts"
    yield f"           {of_what}: . none, 1, 2, 3 or more"
    width = math.ceil(n_expert / group)
    yield f"{'layer':<{width + 6}} held   2x"
    for layer in layers:
        heat = heat_line(layer["replicas"], group)
        held, twice = _percent(layer["covered"], n_expert), _percent(layer["twice"], n_expert)
        yield f"{layer['layer']:>5} {_coloured(heat)}{' ' * (width - len(heat))} {held:>4} {twice:>4}"


def heat_line(replicas: str, group: int) -> str:
    """A digit an expert -> a character a group: its least, `.` for 0 and 3 for more."""
    parts = (replicas[first : first + group] for first in range(0, len(replicas), group))
    return "".join(".123"[min(3, *map(int, part), 3)] for part in parts)


def _coloured(heat: str) -> str:
    """With colours; click takes them out again where the output is no terminal."""
    return "".join(click.style("".join(run), fg=COLOURS[character]) for character, run in groupby(heat))


def _percent(part: int, whole: int) -> str:
    """Rounded down: 100% means all."""
    return f"{100 * part // whole if whole else 0}%"


def _scarcest(state: dict[str, Any]) -> Iterator[str]:
    yield "scarcest   layer  experts    replicas  demand"
    for run in state["scarcest"]:
        experts = f"{run['first']}:{run['first'] + run['count']}"
        yield f"           {run['layer']:>5}  {experts:<9}  {run['replicas']:>8}  {run['demand']:>6}"


def _nodes(state: dict[str, Any], max_nodes: int) -> Iterator[str]:
    nodes = state["nodes"]
    roles = ", ".join(f"{count} {role}" for role, count in sorted(state["roles"].items()))
    yield _fit(f"nodes      {counted(state['nodes_known'], 'other')} known{f': {roles}' if roles else ''}")
    if nodes:
        yield "   name     role      device state      experts   budget  known address"
    for node in nodes[:max_nodes]:
        mark = _mark(node)
        budget = format_bytes(node["capacity_bytes"]) if node["capacity_bytes"] else ""
        what = f"{'+'.join(node['roles'])[:9]:<9} {node['device'][:6]:<6} {node['state'][:11]:<11}"
        address = node["addresses"][0] if node["addresses"] else "-"
        yield _fit(
            f" {mark} {node['name']} {what} {node['serving']:>6} {budget:>8} {_age(node['known_s']):>6} {address}"
        )
    if more := state["nodes_known"] - min(len(nodes), max_nodes):
        yield f"   and {more} more{' (--all)' if len(nodes) > max_nodes else ''}"
    marks = {_mark(node) for node in nodes[:max_nodes]}
    if "*" in marks:
        yield "   * connected with this node"
    if "?" in marks:
        yield _fit("   ? by what it said last; not connected: it may be gone until its record lapses")


def _mark(node: dict[str, Any]) -> str:
    """What is known of the state: seen by this node, heard of, or no matter."""
    if node["connected"]:
        return "*"
    return "?" if node["state"] in ("serving", "fetching", "seeding") else " "


def _age(seconds: float) -> str:
    return _ago(seconds).removesuffix(" ago")
