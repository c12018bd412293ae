"""Which backbones' sketches are counted, out of all that gossip brought, and what comes of them. Pure."""

from __future__ import annotations

import hashlib

from swarmnode.config import MarketConfig
from swarmnode.errors import ProtocolError
from swarmnode.gossip.demand import Demand, aggregate, even_demand
from swarmnode.gossip.records import DemandRecord
from swarmnode.gossip.shape import MarketShape
from swarmnode.gossip.sites import site_of
from swarmnode.gossip.sketch import DemandSketch
from swarmnode.gossip.table import RecordTable


def choose_sketches(
    table: RecordTable, model: bytes, config: MarketConfig, salt: bytes
) -> list[tuple[str, bytes]]:
    """(site, sketch as it came) of at most `max_demand_sites` sites, in an order by hash with `salt` (the own node's
    id: so nobody can take all votes of all nodes), and of each the first `max_site_sketches`, those known for the
    longest. Nothing is decoded for it: identities are free, and a flood of backbones costs a look at their records.

    Who asks for nothing, and nodes without a record, have no vote.
    """
    sites: dict[str, list[bytes]] = {}
    for record in table.demands():
        data, node = _sketch_of(record, model), table.get(record.node_id)
        if data is None or node is None or DemandSketch.is_silent(data):
            continue
        group = sites.setdefault(site_of(node.state.addresses, node.state.relays), [])
        if len(group) < config.max_site_sketches:
            group.append(data)
    order = sorted(sites, key=lambda site: hashlib.blake2b(salt + site.encode()).digest())
    return [(site, data) for site in order[: config.max_demand_sites] for data in sites[site]]


class DemandVotes:
    """What the backbones of a table want of one model: put together again when others, or other sketches, are chosen.

    `salt`: the own node's id.
    """

    def __init__(
        self, table: RecordTable, model: bytes, shape: MarketShape, config: MarketConfig, salt: bytes
    ) -> None:
        self._table = table
        self._model = model
        self._shape = shape
        self._config = config
        self._salt = salt
        self._chosen: list[tuple[str, bytes]] = []
        self._decoded: dict[bytes, DemandSketch | None] = {}
        """Of what is chosen, so bounded; None: it is no sketch of this model."""
        self.demand: Demand = even_demand(shape)
        """As of the last `renew`."""

    @property
    def n_sketches(self) -> int:
        """Sketches that it was made of."""
        return sum(self._decoded[data] is not None for _, data in self._chosen)

    def renew(self) -> bool:
        """Look at the table again; whether anything else is said than before."""
        chosen = choose_sketches(self._table, self._model, self._config, self._salt)
        if chosen == self._chosen:
            return False
        before, self._decoded = self._decoded, {}
        for _, data in chosen:
            self._decoded[data] = before[data] if data in before else self._decode(data)
        self._chosen = chosen
        votes = ((site, self._decoded[data]) for site, data in chosen)
        self.demand = aggregate([(site, sketch) for site, sketch in votes if sketch is not None], self._shape)
        return True

    def _decode(self, data: bytes) -> DemandSketch | None:
        try:
            return DemandSketch.decode_untrusted(data, self._shape.size)
        except ProtocolError:
            return None


def _sketch_of(record: DemandRecord, model: bytes) -> bytes | None:
    return next((item.sketch for item in record.models if item.model == model), None)
