"""What a page is told of a swarm: coverage, nodes with what is known of them, this node; bounded, and made of text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from swarmnode.config import Config, DashboardConfig
from swarmnode.services.dashboard_delta import delta_of
from swarmnode.services.members import Standing
from swarmnode.testing.many_nodes import ManyNodes
from swarmnode.weights.slices import ExpertRange

RUNS = (ExpertRange(0, 0, 2), ExpertRange(1, 2, 2))


def line(nodes: ManyNodes, number: int) -> dict[str, Any]:
    found: dict[str, Any] = nodes.view.look()["nodes"][str(nodes.key(number).node_id)]
    return found


def test_coverage_is_a_digit_an_expert() -> None:
    nodes = ManyNodes(2, 4, 0)
    nodes.join(1, RUNS)
    nodes.join(2, (ExpertRange(1, 0, 4),))
    nodes.market.announce(("192.0.2.1:80",), (ExpertRange(0, 0, 1),), 60)
    state = nodes.view.look()
    assert state["layers"] == {"0": "2100", "1": "1122"}
    assert state["model"]["experts"] == 8
    assert state["nodes"][f"http:{nodes.market.snapshot().announced_by[0].holder_id}"]["state"] == "announced"
    for number in range(3, 15):
        nodes.join(number, (ExpertRange(0, 3, 1),))
    assert nodes.view.look()["layers"]["0"] == "2109"


def test_a_connected_worker_has_a_latency_and_a_rate() -> None:
    nodes = ManyNodes(2, 4, 0)
    nodes.join(1, RUNS, device="cuda", connected=True)
    nodes.peers[nodes.key(1).node_id].rtt_s = 0.0123
    nodes.members.workers[0].tally.pairs = 40
    nodes.now_s = 1.0
    nodes.throughput.sample()
    assert line(nodes, 1) == {
        "name": nodes.key(1).node_id.short,
        "roles": ["worker"],
        "device": "cuda",
        "address": line(nodes, 1)["address"],
        "state": "serving",
        "budget_bytes": 300_000_000,
        "serving": 4,
        "fetching": 0,
        "ranges": [[0, 0, 2], [1, 2, 2]],
        "connected": True,
        "latency_ms": 12,
        "rows_per_s": 40.0,
    }
    nodes.members.workers[0].standing = Standing.QUARANTINED
    assert line(nodes, 1)["state"] == "quarantined"
    nodes.join(2, RUNS, connected=False)
    assert line(nodes, 2)["latency_ms"] is None


def test_this_node() -> None:
    node = ManyNodes(2, 4, 3).view.look()["node"]
    assert node["seeds"]
    assert node["roles"] == ["backbone"]
    assert node["nodes_known"] == 3
    assert node["serving"] == 0
    assert node["dialled"] == 3


def test_devices_lose_what_is_no_text() -> None:
    nodes = ManyNodes(2, 4, 0)
    nodes.join(1, RUNS, device="cpu", connected=False)
    nodes.connect(1, RUNS, "<b>\u202eevil\x1b[2J</b>")
    assert line(nodes, 1)["device"] == "<b>?evil?[2J</b>"  # markup is text: the page's business


def test_nodes_are_bounded_and_the_choice_stands_for_a_while() -> None:
    config = replace(Config(), dashboard=replace(DashboardConfig(), max_nodes=10, relist_s=5.0))
    nodes = ManyNodes(2, 16, 30, config=config)
    first = set(nodes.view.look()["nodes"])
    assert len(first) == 10
    assert {str(node_id) for node_id in nodes.peers} <= first  # connected ones
    assert nodes.view.look()["node"]["nodes_known"] == 30
    nodes.join(31, RUNS, connected=True)
    assert set(nodes.view.look()["nodes"]) == first
    nodes.now_s += 5.0
    assert str(nodes.key(31).node_id) in nodes.view.look()["nodes"]
    gone = next(iter(nodes.peers))
    number = next(number for number in range(32) if nodes.key(number).node_id == gone)
    nodes.leave(number)
    assert str(gone) not in nodes.view.look()["nodes"]


@pytest.mark.parametrize("n_nodes", [0, 500])
def test_a_snapshot_is_plain_json_of_a_bounded_size(n_nodes: int) -> None:
    nodes = ManyNodes(48, 256, n_nodes)
    data = json.dumps(nodes.view.look(), separators=(",", ":"), allow_nan=False)
    assert len(data) < 300_000


def test_what_follows_is_small() -> None:
    nodes = ManyNodes(8, 64, 100)
    before = nodes.view.look()
    nodes.step()
    delta = delta_of(before, nodes.view.look())
    assert len(json.dumps(delta)) < 5000  # 20 connected workers with other rates and round trips
    assert len(delta["layers"]) <= 20
