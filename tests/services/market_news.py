"""Gossip for tests of what looks at it: a table and listeners, without a network."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from swarmnode.compute.layout import ExpertTensor, LayerLayout
from swarmnode.config import GossipConfig
from swarmnode.gossip.records import (
    ModelDemand,
    ModelHoldings,
    OwnState,
    network_id,
    sign_demand,
    sign_record,
)
from swarmnode.gossip.table import Change, RecordTable
from swarmnode.identity import NodeId, NodeKey
from swarmnode.weights.manifest import LayerManifest, Manifest
from swarmnode.weights.slices import ExpertRange

NETWORK = network_id("test")
OWN = NodeKey.from_seed(bytes(32))


@lru_cache
def key_of(number: int) -> NodeKey:
    return NodeKey.from_seed(bytes([number] * 32))


def manifest_of(n_layer: int, n_expert: int, first_layer: int = 0) -> Manifest:
    """Layers from `first_layer` on have experts, each of more bytes than the one before."""
    layers = {}
    for layer in range(first_layer, n_layer):
        n_ff = 64 * (layer + 1)
        shapes = (("ffn_gate_exps", 64, n_ff), ("ffn_up_exps", 64, n_ff), ("ffn_down_exps", n_ff, 64))
        tensors = tuple(ExpertTensor(kind, 0, ne0, ne1, 4 * ne0 * ne1) for kind, ne0, ne1 in shapes)
        hashes = {kind: bytes(32 * n_expert) for kind, _, _ in shapes}
        layers[layer] = LayerManifest(LayerLayout(layer, 64, n_ff, n_expert, tensors), hashes)
    return Manifest("qwen35moe", "Tiny", 64, n_layer, n_expert, 2, {}, layers, bytes(32))


class News:
    """A stand-in for GossipService."""

    def __init__(self, model: bytes, n_layer: int, n_expert: int) -> None:
        self.table = RecordTable(GossipConfig(), NETWORK, OWN.node_id, np.random.default_rng(0))  # type: ignore[arg-type]
        self._listeners: list[Callable[[Change], None]] = []
        self._model = model
        self._shape = n_layer, n_expert
        self._counter = 0

    def subscribe(self, on_change: Callable[[Change], None]) -> None:
        self._listeners.append(on_change)
        for record in list(self.table.records()):
            on_change(Change(record.node_id, record.kind, None if record.leaving else record))

    def says(
        self,
        key: NodeKey,
        address: str,
        serving: tuple[ExpertRange, ...] = (),
        fetching: tuple[ExpertRange, ...] = (),
        *,
        leaving: bool = False,
        now_s: float = 0.0,
        age: int = 0,
    ) -> None:
        """A node's record comes in, `age` 255ths of 600 s after it was issued."""
        holdings = ModelHoldings(self._model, *self._shape, serving, fetching, 1, False)
        state = OwnState((address,), (), ("worker",), 10**6, "cpu", (holdings,), leaving)
        self._counter += 1
        record = sign_record(key, NETWORK, (1, self._counter), 600, 0, state)
        self.table.offer(record, now_s, None if key is OWN else key.node_id, age)
        self._tell()

    def wants(self, key: NodeKey, sketch: bytes) -> None:
        """A backbone's demand comes in."""
        self._counter += 1
        models = (ModelDemand(self._model, sketch),)
        self.table.offer(sign_demand(key, NETWORK, (1, self._counter), 600, 0, models), 0.0, key.node_id)
        self._tell()

    def expires(self, now_s: float) -> None:
        self.table.expire(now_s)
        self._tell()

    def _tell(self) -> None:
        for change in self.table.take_changes():
            for listener in self._listeners:
                listener(change)


def node(number: int) -> NodeId:
    return key_of(number).node_id
