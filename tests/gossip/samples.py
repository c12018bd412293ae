"""Keys, states and records of tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

from swarmnode.config import GossipConfig
from swarmnode.errors import ProtocolError
from swarmnode.gossip.records import (
    ModelDemand,
    ModelHoldings,
    NodeRecord,
    OwnState,
    Version,
    network_id,
    sign_record,
)
from swarmnode.gossip.table import RecordTable
from swarmnode.identity import NodeKey
from swarmnode.weights.slices import ExpertRange

MODEL = bytes(range(32))
OTHER_MODEL = bytes(range(1, 33))
NETWORK = "tests"
NETWORK_ID = network_id(NETWORK)
CONFIG = GossipConfig()
DEMAND = (ModelDemand(MODEL, b"a sketch"),)


@lru_cache(maxsize=4096)
def key_of(number: int) -> NodeKey:
    return NodeKey.from_seed(number.to_bytes(32, "big"))


def holdings_of_layer(layer: int, first: int = 0, count: int = 8) -> ModelHoldings:
    return ModelHoldings(MODEL, 48, 256, (ExpertRange(layer, first, count),), (), 512, False)


def state_of(
    address: str = "203.0.113.9:7000", layer: int = 0, roles: tuple[str, ...] = ("worker",)
) -> OwnState:
    return OwnState((address,), (), roles, 300_000_000, "cpu", (holdings_of_layer(layer),))


def record_of(
    number: int,
    version: Version = (1, 1),
    state: OwnState | None = None,
    *,
    ttl_s: int = 600,
    network: bytes = NETWORK_ID,
    issued_s: int = 0,
) -> NodeRecord:
    """A record of node `number`, whose address has a /24 of its own."""
    if state is None:
        state = state_of(f"10.{number >> 8 & 255}.{number & 255}.1:7000")
    return sign_record(key_of(number), network, version, ttl_s, issued_s, state)


def table_of(config: GossipConfig = CONFIG, seed: int = 0) -> RecordTable:
    """Of node 0."""
    return RecordTable(config, NETWORK_ID, key_of(0).node_id, random.Random(seed))


def error_code(parse: Callable[[], object]) -> str:
    """The code of the ProtocolError that `parse` raises, or "". Any other error is the test's failure."""
    try:
        parse()
    except ProtocolError as error:
        return error.code
    return ""


def every_second(n_layer: int, number: int = 0) -> ModelHoldings:
    """Every second expert of so many layers: the most ranges for its bytes."""
    ranges = tuple(ExpertRange(layer, first, 1) for layer in range(n_layer) for first in range(0, 256, 2))
    return ModelHoldings(bytes([number]) * 32, n_layer, 256, ranges, (), 1, False)


def contents(table: RecordTable) -> set[bytes]:
    return {record.data for record in table.records()}
