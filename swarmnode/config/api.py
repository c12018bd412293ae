"""What a backbone serves over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.config.units import KIB, MIB


@dataclass(frozen=True)
class ApiConfig:
    """The HTTP API of a backbone."""

    max_waiting: int = 64
    """Generations that wait for a slot, or for their prompt to become tokens; more are refused with status 429."""
    retry_after_s: int = 5
    """What such a client is told to wait: about one short answer."""
    prompt_threads: int = 2
    """Threads that render and tokenize prompts: one long prompt does not hold up the others."""
    stalled_s: float = 60.0
    """A client that takes no byte for so long is disconnected (HTTP/1.1: by the kernel, Linux only)."""
    crowded_stalled_s: float = 10.0
    """... while others wait for a slot: it holds one."""
    head_wait_s: float = 2.0
    """A stream's headers wait so long for its first token: they say what the swarm did for the prompt then, and what
    fails until then has its own status. Longer, and clients that wait for headers would give up."""
    unsent_bytes: int = 32 * KIB
    """Of a stream, in the kernel (Linux, macOS): so far a client may fall behind before its answer pauses: some 60
    tokens. Without it the kernel takes megabytes, and would go on for a client that has stalled long ago."""
    idle_s: float = 30.0
    """A connection without a request, or with a part of its head, is closed after so long."""
    linger_s: float = 2.0
    """After its last answer a connection is read for so long, what comes is dropped: closed at once, the kernel would
    reset it, and the answer could be lost on the way. Long enough for a round trip over any link."""
    max_connections: int = 256
    """At a time; for a new one the one that is idle for longest is closed, else it has status 503. All generations that
    may wait or run (max_waiting, slots), and pages that listen to events."""
    max_connections_per_address: int = 64
    """Of these, from one IPv4 address or IPv6 /64 (loopback is exempt, and what a proxy here passes on comes from
    there), a quarter of all at most: whoever has one machine must not keep all others out. More have status 429."""
    descriptor_share: float = 0.25
    """Of the descriptors that the process may have, for these connections at most: the swarm's come first."""
    arriving_bytes: int = 32 * MIB
    """Bodies that arrive or become prompts, all together, in memory: four of the longest. For more, the one that has
    most while it still arrives is refused with status 503, but for short ones."""
    short_body_bytes: int = 64 * KIB
    """Bodies of up to so much are never refused for want of memory: of all connections together they have 16 MiB."""
    body_wait_s: float = 20.0
    """A body may take so long, and a second more for every `body_bytes_per_s` that have come; else status 408."""
    body_bytes_per_s: int = 64 * KIB
    """Half of a slow uplink (1 Mbit/s)."""
    max_body_marks: int = 65536
    """Lists, objects, strings and commas in the JSON of a body: a long conversation with a hundred tools has 20,000.
    Parsing holds Python's lock, 0.5 us for each of them, and everything else waits."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may use the API; "*": all, but those need a key everywhere."""


@dataclass(frozen=True)
class NodeApiConfig:
    """The node-local routes (api/node_routes, api/shard_route) and what they show (services/market_watch)."""

    max_holders: int = 256
    """Holders that announce themselves over HTTP: as many as nodes of one site count (GossipConfig.max_per_prefix)."""
    max_lease_s: int = 3600
    """Longest lease of such a holder, as GossipConfig.max_ttl_s: it has to say now and then that it lives."""
    holder_weight: float = 0.1
    """What a replica of such a holder counts, as MarketConfig.suspect_weight: nobody signs for it."""
    max_body_bytes: int = 256 * KIB
    """Of a request: 4,096 ranges in JSON are 100 KB."""
    max_body_marks: int = 32768
    """As ApiConfig.max_body_marks; 4,096 ranges have 16,400."""
    max_shards: int = 8
    """Shards sent at a time; more are refused with status 429. A place is lost as a connection is
    (WireConfig.min_progress_bytes_per_s)."""
    shard_piece_bytes: int = 128 * KIB
    """Read and sent at once: what a client that stalls keeps in memory, and what rows wait for (25 us)."""
    beside_rows_per_s: float = 120e6
    """While rows travel, all shards together leave at this rate (bytes/s): handing a piece on takes no time that a rest
    could follow (StoreConfig.rest_share), its cost comes later, in the kernel and in the client."""
    threads: int = 2
    """Threads that read shards and make JSON: one reads 2 GB/s from the page cache, and a disk that is asked twice at a
    time is fast enough."""
    max_nodes: int = 256
    """Nodes listed in GET /api/swarm, connected ones first: 70 KB of JSON, 10 ms for which rows wait."""
    scarcest: int = 8
    """Runs of experts listed there as the scarcest."""
