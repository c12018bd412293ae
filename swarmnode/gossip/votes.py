"""Which backbones' sketches are counted, out of all that gossip brought. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from swarmnode.config import MarketConfig
from swarmnode.errors import ProtocolError
from swarmnode.gossip.coverage import site_of
from swarmnode.gossip.records import DemandRecord
from swarmnode.gossip.sketch import DemandSketch
from swarmnode.gossip.table import RecordTable


def demand_votes(
    table: RecordTable, model: bytes, size: int, config: MarketConfig
) -> Iterator[tuple[str, DemandSketch]]:
    """(site, sketch) for demand.aggregate, of a model of `size` flat numbers.

    Of a site the first `max_siblings` are looked at, those known for the longest: a flood of backbones costs a look at
    their records and no more. What is no sketch of this model, and nodes without a record, have no vote.
    """
    n_of_site: Counter[str] = Counter()
    for record in table.demands():
        data, node = _sketch_of(record, model), table.get(record.node_id)
        if data is None or node is None:
            continue
        site = site_of(node.state.addresses, node.state.relays)
        n_of_site[site] += 1
        if n_of_site[site] > config.max_siblings:
            continue
        try:
            yield site, DemandSketch.decode_untrusted(data, size)
        except ProtocolError:
            continue


def _sketch_of(record: DemandRecord, model: bytes) -> bytes | None:
    return next((item.sketch for item in record.models if item.model == model), None)
