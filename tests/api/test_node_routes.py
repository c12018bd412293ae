"""The node-local routes on a swarm in one process: the token, the market, holders, volunteering, every refusal."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from swarmnode.api.app import Served, build_app
from swarmnode.api.node_routes import NodeApi
from swarmnode.config import Config, NodeApiConfig
from swarmnode.identity import NodeKey
from swarmnode.services.runners import Inline
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex

MODEL = TinyModel(n_layer=2, n_expert=4, n_expert_used=2)
TOKEN = "t" * 43
COVERAGE, DEMAND, VOLUNTEER = "/api/expert-coverage", "/api/expert-demand", "/api/expert-volunteer"
ANNOUNCE = {"model": "Tiny Random", "addresses": ["192.0.2.1:80"], "ranges": [[0, 0, 4]], "lease_s": 60}
TAKE = {"model": "Tiny Random", "budget_bytes": 10**6}


@asynccontextmanager
async def open_client(
    folder: Path, limits: NodeApiConfig | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, Swarm]]:
    path = write_tiny_gguf(folder / "tiny.gguf", MODEL)
    async with open_swarm(path, folder, n_ctx=64) as swarm:
        backbone = swarm.backbone
        assert backbone.state.gossip is not None
        with ModelIndex.open(path) as index:
            node = NodeApi(
                own=NodeKey.from_seed(bytes(32)).node_id,
                token=TOKEN,
                market=backbone.state.gossip.market,
                demand=backbone.demand,
                source=index,
                names=(backbone.manifest.name,),
                threads=Inline(),
                config=replace(Config(), node_api=limits or NodeApiConfig()),
                rows_at_s=backbone.state.gossip.connections.rows_at_s,
            )
            # the market's own bounds are those of the swarm it was made for
            node.market._limits = node.config.node_api
            app = build_app(Served(backbone.engine, "tiny", None, backbone.state.as_dict, 0, node=node))
            headers = {"Authorization": f"Bearer {TOKEN}"}
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=headers
            ) as client:
                yield client, swarm


async def test_coverage_and_demand(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, swarm):
        await swarm.join(10**7)
        await swarm.generate([1, 2, 3], 8)
        market = swarm.backbone.state.gossip
        assert market is not None
        await swarm.until(lambda: market.market.snapshot().holders.sum() == 8)
        coverage = (await client.get(COVERAGE)).json()
        demand = (await client.get(DEMAND)).json()
    assert coverage["model_id"] == demand["model_id"] == swarm.backbone.manifest.model_id.hex()
    assert coverage["nodes"] == 1
    assert [layer["layer"] for layer in coverage["layers"]] == [0, 1]
    for layer in coverage["layers"]:
        assert layer["serving"] == [1] * 4
        assert layer["fetching"] == layer["announced"] == [0] * 4
        assert layer["expert_bytes"] == 3 * 4 * 256 * 256
        assert all(value > 0 for value in layer["scarcity"])
    assert sum(sum(layer["own_pairs"]) for layer in demand["layers"]) > 0
    assert demand["layers"][0]["weight"] == [1.0] * 4


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", COVERAGE),
        ("POST", COVERAGE),
        ("DELETE", COVERAGE),
        ("GET", DEMAND),
        ("POST", VOLUNTEER),
        ("GET", "/api/models/tiny/expert-shard"),
        ("HEAD", "/api/models/tiny/expert-shard"),
    ],
)
@pytest.mark.parametrize(
    "value", [None, "", "Bearer", f"Bearer {'x' * 43}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN]
)
async def test_without_the_token(tmp_path: Path, method: str, path: str, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    async with open_client(tmp_path) as (client, _):
        del client.headers["authorization"]
        answer = await client.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":
        assert "swarmnode identity --token" in answer.json()["error"]["message"]


async def test_the_other_routes_need_no_token(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        del client.headers["authorization"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/api/swarm")).status_code == 200


async def test_a_holder_comes_says_anew_and_goes(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        said = (await client.post(COVERAGE, json=ANNOUNCE)).json()
        assert (said["experts"], said["lease_s"]) == (4, 60.0)
        again = await client.post(COVERAGE, json=ANNOUNCE | {"ranges": [[1, 0, 1]]})
        assert again.json()["holder"] == said["holder"]
        coverage = (await client.get(COVERAGE)).json()
        assert [layer["announced"] for layer in coverage["layers"]] == [[0] * 4, [1, 0, 0, 0]]
        assert coverage["layers"][1]["replicas"][0] == 0.1
        assert coverage["announced_by"][0]["addresses"] == ["192.0.2.1:80"]
        gone = await client.delete(COVERAGE, params={"holder": said["holder"]})
        assert (gone.status_code, gone.json()["lease_s"]) == (200, 0)
        assert (await client.delete(COVERAGE, params={"holder": said["holder"]})).status_code == 404
        await client.post(COVERAGE, json=ANNOUNCE)
        assert (await client.post(COVERAGE, json=ANNOUNCE | {"lease_s": 0})).status_code == 200
        await client.post(COVERAGE, json=ANNOUNCE)
        await trio.sleep(61)  # of the mock clock
        assert (await client.get(COVERAGE)).json()["announced_by"] == []


async def test_holders_are_bounded(tmp_path: Path) -> None:
    async with open_client(tmp_path, NodeApiConfig(max_holders=1)) as (client, _):
        assert (await client.post(COVERAGE, json=ANNOUNCE)).status_code == 200
        answer = await client.post(COVERAGE, json=ANNOUNCE | {"addresses": ["192.0.2.2:80"]})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "too_many_holders"


async def test_volunteering_by_id_prefix_and_name(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, swarm):
        model_id = swarm.backbone.manifest.model_id.hex()
        expert_bytes = 3 * 4 * 256 * 256
        for model in (model_id, model_id[:8], model_id[:12].upper(), "Tiny Random"):
            body = {"model": model, "budget_bytes": 3 * expert_bytes + 5}
            answer = (await client.post(VOLUNTEER, json=body)).json()
            assert (answer["experts"], answer["bytes"]) == (3, 3 * expert_bytes)
        held = {"model": model_id, "budget_bytes": 5 * expert_bytes, "held": [[0, 0, 4]], "seed": "other"}
        answer = (await client.post(VOLUNTEER, json=held)).json()
        assert answer["held_bytes"] == 4 * expert_bytes
        assert [(layer, count) for layer, _, count in answer["ranges"]] == [(1, 1)]
        assert (await client.post(VOLUNTEER, json=TAKE | {"budget_bytes": 1})).json()["ranges"] == []


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COVERAGE, b"{", 422, "not valid JSON"),
        (COVERAGE, b"[" * 30_000, 422, "not valid JSON"),
        (COVERAGE, b"\xff", 422, "not valid JSON"),
        (COVERAGE, "{}".encode("utf-16-le"), 422, "not valid JSON"),
        (COVERAGE, b"[]", 422, "JSON object"),
        (COVERAGE, ANNOUNCE | {"colour": 1}, 422, "colour"),
        (COVERAGE, ANNOUNCE | {"model": 5}, 422, "model"),
        (COVERAGE, ANNOUNCE | {"model": "x" * 300}, 422, "model"),
        (COVERAGE, ANNOUNCE | {"model": "other"}, 404, "other"),
        (COVERAGE, ANNOUNCE | {"model": "\ud800"}, 404, "ud800"),
        (COVERAGE, ANNOUNCE | {"addresses": []}, 422, "addresses"),
        (COVERAGE, ANNOUNCE | {"addresses": ["a:1"] * 9}, 422, "addresses"),
        (COVERAGE, ANNOUNCE | {"addresses": ["nowhere"]}, 422, "port"),
        (COVERAGE, ANNOUNCE | {"addresses": ["a b:1"]}, 422, "DNS"),
        (COVERAGE, ANNOUNCE | {"addresses": ["x" * 999 + ":1"]}, 422, "264"),
        (COVERAGE, ANNOUNCE | {"addresses": [7]}, 422, "addresses"),
        (COVERAGE, ANNOUNCE | {"ranges": []}, 422, "ranges"),
        (COVERAGE, ANNOUNCE | {"ranges": [[0, 0, 1]] * 4097}, 422, "4096"),
        (COVERAGE, ANNOUNCE | {"ranges": [[0, 0]]}, 422, "three integers"),
        (COVERAGE, ANNOUNCE | {"ranges": [[0, True, 1]]}, 422, "three integers"),
        (COVERAGE, ANNOUNCE | {"ranges": [[0, -1, 1]]}, 422, "no range"),
        (COVERAGE, ANNOUNCE | {"ranges": [[0, 0, 2**70]]}, 422, "no range"),
        (COVERAGE, ANNOUNCE | {"ranges": [[0, 3, 2]]}, 422, "not in this model"),
        (COVERAGE, ANNOUNCE | {"ranges": [[2, 0, 1]]}, 422, "not in this model"),
        (COVERAGE, ANNOUNCE | {"lease_s": -1}, 422, "lease_s"),
        (COVERAGE, ANNOUNCE | {"lease_s": 3601}, 422, "lease_s"),
        (COVERAGE, ANNOUNCE | {"lease_s": 1.5}, 422, "lease_s"),
        (COVERAGE, ANNOUNCE | {"lease_s": True}, 422, "lease_s"),
        (COVERAGE, ANNOUNCE | {"lease_s": 0}, 404, "announced itself"),
        (VOLUNTEER, {}, 422, "model"),
        (VOLUNTEER, TAKE | {"model": "0" * 8}, 404, "00000000"),
        (VOLUNTEER, TAKE | {"budget_bytes": 0}, 422, "budget_bytes"),
        (VOLUNTEER, TAKE | {"budget_bytes": 2**60}, 422, "budget_bytes"),
        (VOLUNTEER, TAKE | {"budget_bytes": "1"}, 422, "budget_bytes"),
        (VOLUNTEER, TAKE | {"held": [[0, 0, 5]]}, 422, "not in this model"),
        (VOLUNTEER, TAKE | {"held": {}}, 422, "held"),
        (VOLUNTEER, TAKE | {"seed": "x" * 65}, 422, "seed"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_bodies(tmp_path: Path, path: str, body: Any, status: int, says: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with open_client(tmp_path) as (client, _):
        answer = await client.post(path, content=content)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"]


async def test_a_withdrawal_names_its_holder(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        assert (await client.delete(COVERAGE)).status_code == 422
        assert (await client.delete(COVERAGE, params={"holder": "x" * 9999})).status_code == 404
        assert (await client.put(COVERAGE)).status_code == 405


async def test_the_swarm_with_gossip(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, swarm):
        worker = await swarm.join(3 * 10**6)
        await trio.sleep(20)
        state = (await client.get("/api/swarm")).json()
        assert state["own"]["node"] == str(swarm.address.node_id)
        assert state["own"]["seeds"]
        assert state["own"]["roles"] == ["backbone"]
        assert state["own"]["addresses"] == ["backbone:1"]
        assert state["own"]["dialled_by_others"] == 1
        assert state["own"]["neighbours"] == 1
        (entry,) = state["nodes"]
        assert (entry["node"], entry["state"], entry["serving"]) == (str(worker.key.node_id), "serving", 3)
        assert entry["connected"]
        assert entry["known_s"] >= 19
        assert sum(layer["covered"] for layer in state["coverage"]) == 3
        assert sum(layer["replicas"].count("1") for layer in state["coverage"]) == 3
        assert state["scarcest"][0]["replicas"] < 1
        assert state["workers"][0]["standing"] == "serving"
        worker.kill()
        await trio.sleep(30)
        state = (await client.get("/api/swarm")).json()
        assert state["nodes"][0]["state"] == "lost"
        assert sum(layer["covered"] for layer in state["coverage"]) == 0
