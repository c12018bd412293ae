"""The gossip of 1,000 and 10,000 nodes in virtual time: hops of an update, bytes of a node and second.

    python -m benchmarks.gossip [--nodes 1000 10000] [--updates 5] [--records 600] [--seed 1]

The peer is flooding: every node sends every new record whole to each of its neighbours, over the same links. Traffic is
that of a swarm in which nothing happens: every node issues its record anew each third of its ttl (600 s). To keep the
simulation small only 200 nodes issue, as much more often as makes the same number of records a second, until
`--records` of them were issued: the same travels, but tables, and the comparisons of tables, hold 200 records and not
all. The line "comparing" says what those of full tables cost.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import replace

from swarmnode.config import GossipConfig
from swarmnode.gossip import anti_entropy
from swarmnode.gossip.records import ModelHoldings, OwnState
from swarmnode.testing.gossip_sim import MESSAGE_BYTES, GossipSim, SimNode
from swarmnode.weights.slices import ExpertRange

ISSUING = 200
"""Nodes that issue records, in place of all."""
MODEL = bytes(32)


def state_of(number: int, capacity_bytes: int = 300_000_000) -> OwnState:
    """A worker with one address and six runs of eight experts of a model of 48 x 256."""
    runs = tuple(ExpertRange((7 * number + 5 * i) % 48, 8 * ((3 * number + i) % 32), 8) for i in range(6))
    held = ModelHoldings(MODEL, 48, 256, tuple(sorted(set(runs))), (), 512, False)
    address = f"10.{number >> 8 & 255}.{number & 255}.1:7000"
    return OwnState((address,), (), ("worker",), capacity_bytes, "cpu", (held,))


def hops(n_nodes: int, updates: int, seed: int) -> None:
    """How far an update has to go in an overlay where nothing else happens."""
    sim = GossipSim(seed)
    nodes = sim.add(n_nodes)
    sim.run(12.0)
    degrees = [len(node.core.neighbours) for node in nodes]
    print(f"{n_nodes} nodes, {sum(degrees) / n_nodes:.1f} neighbours ({min(degrees)} to {max(degrees)})")
    for number in range(updates):
        started_s = sim.now_s
        found = sorted(sim.spread(nodes[number], state_of(number)).values())
        at = found[min(len(found), int(0.999 * n_nodes)) - 1]
        counts = " ".join(f"{n}:{count}" for n, count in sorted(Counter(found).items()))
        print(
            f"  update {number}: {len(found)} nodes; 99.9% within {at} hops, all within {found[-1]}, "
            f"in {sim.now_s - started_s:.0f} s; nodes by hops {counts}"
        )


def traffic(n_nodes: int, n_wanted: int, seed: int) -> None:
    """Bytes of a node in a second while nothing changes."""
    config = GossipConfig()
    issuing = min(ISSUING, n_nodes)
    ttl_s = config.ttl_s * issuing // n_nodes
    seconds = n_wanted * config.ttl_s / 3 / n_nodes
    sim = GossipSim(seed, config=replace(config, ttl_s=ttl_s, issue_interval_s=min(5.0, ttl_s / 4)))
    nodes = sim.add(n_nodes)
    sim.run(12.0)
    for number, node in enumerate(nodes[:issuing]):
        sim.later(ttl_s / 3 * number / issuing, node.publish, state_of(number))
    sim.run(ttl_s / 3 + 8.0)
    sim.reset_traffic()
    before = issued(nodes[:issuing])
    sim.run(seconds)
    n_records = issued(nodes[:issuing]) - before
    record = nodes[0].table.of(nodes[0].node_id)[0]
    n_neighbours = sum(len(node.core.neighbours) for node in nodes) / n_nodes
    flood = n_records / seconds * (n_neighbours - 1) * (len(record.data) + MESSAGE_BYTES)
    print(
        f"  {issuing} of {n_nodes} nodes issue, ttl {ttl_s} s: {n_records / seconds:.1f} records/s of "
        f"{len(record.data)} B: {sim.bytes_per_node_and_s():.0f} B/s sent by a node (flooding: {flood:.0f})"
    )
    for name, n_bytes in sim.traffic.bytes_by.most_common():
        share = n_bytes / n_nodes / seconds
        print(
            f"    {name:18s} {share:8.1f} B/s  {sim.traffic.messages[name] / n_nodes / seconds:6.2f} messages/s"
        )


def comparing(n_nodes: int) -> None:
    """What a comparison of two full tables costs when nothing, and when one record, differs."""
    config = GossipConfig()
    n_buckets = anti_entropy.buckets_for(n_nodes, config.bucket_records)
    ids = [number.to_bytes(4, "big") * 2 for number in range(0, 2**32, 2**32 // n_nodes)][:n_nodes]
    started_s = time.perf_counter()
    anti_entropy.digest(anti_entropy.in_buckets(ids, n_buckets), bytes(8))
    took_ms = 1000 * (time.perf_counter() - started_s)
    print(
        f"  comparing {n_nodes} records: {n_buckets * 8} B asked, {4 + 9 * n_nodes // n_buckets} B answered for each "
        f"bucket that differs; {took_ms:.1f} ms; once in {config.sync_interval_s:.0f} s"
    )


def issued(nodes: list[SimNode]) -> int:
    """Records that these nodes have issued so far."""
    return sum(node.table.of(node.node_id)[0].counter for node in nodes)


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--records", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for n_nodes in options.nodes:
        started_s = time.perf_counter()
        hops(n_nodes, options.updates, options.seed)
        traffic(n_nodes, options.records, options.seed)
        comparing(n_nodes)
        print(f"  simulated in {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
