"""How records spread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GossipConfig:
    """How records spread and how many are kept (gossip/)."""

    ttl_s: int = 600
    """How long our record stands without a newer one; it is issued again after a third, so that two may get lost."""
    max_ttl_s: float = 3600.0
    """Longest time that anybody's record stands, whatever it says."""
    issue_interval_s: float = 5.0
    """Mean least time between two records of ours; changes meanwhile become one. A leave waits for nothing."""
    issue_burst: int = 4
    """So many may follow each other after `have_interval_s`: a node that joins says what it claims, then holds, and
    claims again within seconds."""
    have_interval_s: float = 1.0
    """A neighbour is told of new ids so often at most: 1,000 nodes make 5 a second, 10,000 make 50."""
    have_wait_s: float = 0.25
    """The first new id waits so long for others. Every hop then takes about as long, and news goes by short ways."""
    neighbours: int = 8
    """Links a node makes: a random graph of this degree reaches 1,000 nodes in 5 hops, 10,000 in 6."""
    max_neighbours: int = 64
    """Links a node accepts: news of 50 records a second to each cost 29 KB/s then."""
    link_retry_s: float = 30.0
    """A peer that refused a link is asked again after this."""
    rotate_s: float = 300.0
    """One random link is replaced this often, so that a part of the overlay that closed in itself opens."""
    sync_interval_s: float = 60.0
    """A random peer's buckets are compared this often: repairs what neighbours lost. 2 KB if nothing differs."""
    first_sync_s: float = 1.0
    """A new connection is compared within this time, at random, so that seldom both sides do."""
    bucket_records: int = 8
    """Records in a bucket: one that differs costs 8 + 9 * this bytes."""
    max_records: int = 32_768
    """Records kept; when full, the youngest-known of a random sample goes (docs/gossip.md). About 1.5 KB each."""
    max_per_prefix: int = 256
    """Records of nodes of one IPv4 /24 or IPv6 /48: every address of a /24."""
    max_source_share: float = 0.5
    """Most of max_records that one peer may have brought."""
    eviction_sample: int = 16
    """Of so many records, at random, the one whose node is known for the shortest time goes. Where a share h stood
    before a flood, one of these is lost with probability h ** 16 a time: for a third once in 43 million, for a half
    once in 65,536."""
    max_gone: int = 32_768
    """Versions remembered of nodes that left or expired, so that stale copies do not come back; 200 B each."""
    gone_s: float = 3600.0
    """For how long: no record stands longer than max_ttl_s anywhere."""
    max_passed: int = 65_536
    """Ids remembered of records that were seen and are not kept, so that they are not fetched again; 100 B each."""
    max_offers: int = 16_384
    """Ids a peer offered that were not asked for yet; the next comparison brings what did not fit."""
    all_offers: int = 131_072
    """The same of all peers together, in even shares, but at least one message each; 150 B an id."""
    max_pending: int = 1024
    """Ids a slow neighbour was not told yet; more are dropped, and the next comparison brings them."""
    checks_per_s: float = 256.0
    """Signatures checked for one peer: 60 us each, so one peer costs 1.5 % of a core."""
    checks_burst: int = 2048
    """The same at once: a newcomer has 2,000 records within a second, 10,000 from one peer in half a minute."""
    work_per_s: float = 64.0
    """Messages answered for one peer (lists count for more, a comparison for 32 * (1 + records here / 4,096), see
    gossip.work.DIGEST_WORK); more is refused as busy."""
    work_burst: int = 512
    all_checks_per_s: float = 512.0
    """Signatures checked for all peers together (0.35 ms each, with all that a new record costs): identities are free,
    so 64 flooders, each within its own bounds, would stop the rows. 10,000 nodes make 50 a second."""
    all_checks_burst: int = 4096
    """The same at once. The lower half is dealt out evenly, once a second, among those that offer something."""
    all_work_per_s: float = 512.0
    """Messages answered for all peers together, counted as for one. Beyond it each peer has an even share of this."""
    all_work_burst: int = 2048
    busy_retry_ms: int = 1000
    request_timeout_s: float = 10.0
    """Longest wait for an answer; then the peer is not asked for as long again."""
    patience_s: float = 2.0
    """A record that was asked for and did not come within this time is asked for at another peer, too."""
    max_jumps: int = 3
    """Times within max_ttl_s that we jump above a higher version of our own key: a restored disk needs one, another
    live holder of the key would answer for ever."""
