"""Who takes which experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MarketConfig:
    """Who takes which experts (gossip/demand, coverage, volunteering); the figures behind it: docs/market.md."""

    run_experts: int = 4
    """Experts are taken in aligned runs of so many (24 MB at the real sizes): short records, long reads."""
    max_runs: int = 256
    """A larger budget takes longer runs (doubled), so that it is filled in at most about so many steps."""
    sample_runs: int = 16
    """A decision looks at so many runs drawn by hash(node, epoch): more, and nodes that see the same want the same."""
    sample_share: float = 8.0
    """... or at this many times runs / nodes that fetch, if that is more: a run is then looked at by about eight nodes
    a round, few nodes look at all runs, and the last holes are found."""
    round_s: float = 5.0
    """Mean time between two rounds of a node, times 0.5 to 1.5 by hash. In between only what has settled is decided on;
    a download that ended, and room that was made, begin the next round at once. How soon a record follows the one
    before is GossipConfig.issue_interval_s."""
    max_claims: int = 4
    """Runs published as `fetching` at once: two being downloaded and two that settle meanwhile."""
    max_downloads: int = 2
    settle_hop_s: float = 1.5
    """A claim is downloaded when it was published for settle_hop_s * (1 + log8(nodes)) and nobody is before it: 6.5 s
    with 1,000 nodes, 8.1 s with 10,000. Gossip reaches them all in 3 s where little is said (docs/gossip.md); where
    news comes all the time, 5 to 7 hops wait have_interval_s each at most."""
    better: float = 1.25
    """Another run must be so much scarcer before a claim is given up for it."""
    exchange_better: float = 1.6
    """The same before a replica that is served is given up: 24 MB are downloaded again for it. With equal demand the
    sixth replica is not worth a fourth one elsewhere, but a third one."""
    second_wait_s: float = 60.0
    """A third replica is given up for a second one elsewhere only if that is still missing after so long: while tables
    are compared after a partition, everything seems to be missing."""
    claim_lapse_s: float = 300.0
    """How long a claim counts half a replica: 24 MB at 0.64 Mbit/s. A slower download goes on, but counts nothing."""
    first_news_s: float = 2.5
    """A node that starts waits so long before it claims anything: until it has heard from its first peer."""
    lost_after_s: float = 15.0
    """A worker whose connection to us ended that long ago, and of which nothing new was heard, counts as a suspect."""
    withdraw_s: float = 3.0
    """Between the word that experts are given up and the end of serving them: longer than ServeConfig.max_queue_s, so
    that what was queued before is computed."""
    late_share: float = 0.45
    """A record that is not renewed within this share of its ttl counts nothing until it is: it is due after a third,
    and travels for seconds. With ttl_s of 600, who goes without a word counts for 70 to 270 s, not for 400 to 600."""
    retry_s: float = 60.0
    """A run whose download failed is left alone for so long."""
    spare_replicas: float = 1.75
    """A replica may be given up only if there are so many: two, less a quarter for what backbones say they missed
    of those that stay."""
    surplus: float = 1.3
    """A replica may be given up only if there are more than this times the target."""
    surplus_share: float = 0.02
    """Share of the nodes that may give up a run in a round; more only while experts lack replicas (volunteering.py)."""
    max_surplus_share: float = 0.5
    min_weight: float = 0.25
    max_weight: float = 8.0
    """Demand counts within these bounds (1: the average expert's): nothing is worthless, and no expert draws more than
    8 times the replicas of an average one, whatever is said about it."""
    suspect_weight: float = 0.1
    """What a replica of a node counts that failed an audit, a slice or a connection."""
    sibling_weight: float = 1 / 16
    """What each further replica in one /24, /48 or behind one relay counts: they fail together."""
    max_siblings: int = 64
    """Nodes of one such site that count at all."""
    count_every_pass: int = 4
    """A backbone counts the choices of one pass in so many."""
    demand_interval_s: float = 20.0
    """A backbone tells its demand at most this often."""
    demand_half_life_s: float = 600.0
    unmet_half_life_s: float = 60.0
    """A hole that was filled is forgotten after a few minutes."""
    max_demand_sites: int = 64
    """Backbones' sites with a vote: 64 * 12,288 shares are 3 MB, and sorted in 12 ms (as much again for unmet ones)."""
    max_site_sketches: int = 4
    """Backbones of a site whose sketches are put together, those known for the longest. With all 64 sites, a new sketch
    costs 65 ms of trio's thread (20 ms with one of each; 1.7 s when all 4,096 of a flood were read)."""
