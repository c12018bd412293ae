"""Every number that tunes swarmnode, with its unit, formula and reason.

Frozen dataclasses, one for each room; a service gets the one it needs. Defaults are for a home connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class WireConfig:
    """Caps on what a peer may send; a length over a cap is refused before memory moves."""

    chunk_bytes: int = 16 * KIB
    """Largest piece of a body between two scheduling decisions: a decode waits for one, 1.3 ms at 100 Mbit/s."""
    max_body_bytes: int = 64 * MIB
    """Largest body of any message; 2,048 rows of 3,072 f32 with 8 experts each would be 201 MB, so callers chunk."""
    max_requests_in_flight: int = 256
    max_queued_bytes: int = 8 * MIB
    """Bytes waiting for one socket before askers have to wait (a slow reader meets back-pressure)."""
    handshake_timeout_s: float = 10.0
    ping_interval_s: float = 15.0
    dead_after_pings: int = 3
    write_timeout_s: float = 30.0
    """A peer that reads nothing for this long is closed."""
    close_timeout_s: float = 1.0
    """How long a last message (bye) may take to leave."""
    dial_timeout_s: float = 10.0
    """Longest wait for a TCP (or relay) connection; the handshake has its own."""
    fast_write_s: float = 0.002
    """A write that drained within this time lets the next one be twice as long (up to max_write_bytes), one that took
    four times as long halves it (down to chunk_bytes): a link holds 2-8 ms of what a decode would have to wait for."""
    max_write_bytes: int = 256 * KIB
    receive_bytes: int = 256 * KIB
    """Largest read from a socket."""
    min_progress_bytes_per_s: int = 16 * KIB
    """A connection that is slower than this, over two ping intervals in the middle of one message, is closed."""
    max_held_bytes: int = 64 * MIB
    """Bodies of a peer's requests that handlers work on or that wait for their turn: one of the largest; more is
    refused as busy."""
    decode_reply_bytes: int = 2 * MIB
    """A peer's request waits while so many bytes of replies of its class are in the making or wait to be sent, so a
    peer that does not read costs 8 MiB and one reply a class. A decode's reply at the real sizes: 25 to 800 KB."""
    prefill_reply_bytes: int = 4 * MIB
    """The same for prompts: one reply of 512 f16 rows of 3,072 (3 MiB) is computed while another leaves."""
    bulk_reply_bytes: int = 2 * MIB
    """The same for slices: what one joining worker asks for at once (StoreConfig.blocks_in_flight)."""
    busy_retry_ms: int = 200
    max_unauthenticated: int = 64
    """Accepted sockets that have not proven an identity."""
    max_unauthenticated_per_ip: int = 8
    """The same from one IPv4 address or IPv6 /64; loopback is exempt (a demo runs a swarm on one machine)."""
    max_peers: int = 512
    """Authenticated connections: half of the common limit of 1,024 file descriptors."""
    max_peers_per_ip: int = 64
    """Authenticated connections from one IPv4 address or IPv6 /64 (loopback is exempt): identities are free, so without
    it one machine could take all of max_peers; an eighth still leaves room for a whole site behind one address."""
    max_connections_per_node: int = 4
    """Two classes, each with an old and a new one while a peer reconnects."""


@dataclass(frozen=True)
class ComputeConfig:
    """How experts are computed and checked."""

    n_threads: int = 0
    """0: the cores this process may use."""
    poll: int = 0
    """0..100: how long idle threads of ggml's pool spin before they sleep. Several workers on one machine must not spin
    against each other; waking costs 20-30 us a graph (docs/decisions/0002-ggml-build.md)."""
    graph_cache_bytes: int = 16 * MIB
    """Work memory of a bank's cached graphs: single rows of 48 layers with 8 experts each at n_embd 3,072, n_ff 1,024
    take 14 MB."""
    worker_graph_cache_bytes: int = 4 * MIB
    """The same for a worker: a graph of 64 pairs takes 1.6 MB, that of a decode step's few 0.2 MB."""
    worker_cpu_rows: int = 64
    """Most (row, expert) pairs in one graph of a worker's CPU; requests of up to max_rows pairs are computed in pieces
    of this size, sorted by expert. 512 pairs of 24 experts take 90 ms on two cores either way, and 1.6 MB at n_embd
    3,072 instead of 12.6 MB."""
    self_test_widths: tuple[int, ...] = (1, 8, 9, 16, 64, 256, 512)
    max_rows: int = 512
    """Most (row, expert) pairs in one request to a worker, and in one ggml graph of it; more are computed in pieces."""
    backbone_max_rows: int = 4096
    """The same on a backbone, which can spare the memory: 512 tokens with 8 experts each (100 MB at n_embd 3,072)."""


@dataclass(frozen=True)
class DispatchConfig:
    """When a row goes to a worker and how long it may take (services/remote_experts)."""

    deadline_s: float = 0.5
    """Longest wait for one layer's remote rows in decode (above a far phone's RTT); then the local replica answers."""
    deadline_per_pair_s: float = 0.002
    """Compute allowed for every (row, expert) pair of a share: a pair of a 122B model takes 0.13-0.19 ms on two cores
    of a PC (an expert of 6 MB at 30 GB/s); a phone may be ten times slower."""
    deadline_bytes_per_s: float = 1.25e6
    """Slowest link that a share's bytes are allowed for: 10 Mbit/s, a home uplink."""
    max_deadline_s: float = 30.0
    decode_rows: int = 8
    """Calls of up to so many rows travel before prompts' (wire/constants.TrafficClass)."""
    fresh_s: float = 20.0
    """A worker gets rows only if it answered (a probe or work) within this time: attached is not serving.
    Longer than probe_interval_s + a probe's timeout, so that an idle healthy worker stays fresh."""
    probe_interval_s: float = 5.0
    probe_tick_s: float = 1.0
    """How often a worker is looked at."""
    probe_timeout_s: float = 2.0
    max_row_error: float = 0.1
    """A probe's or an audited row against the local replica, |difference| / |row|: devices that compute K-quants with
    float or 8-bit activations differ by 0.03 (cosine 0.9996), a wrong expert or noise by about 1."""
    grace_s: float = 60.0
    """How long the holdings of a worker that has not (or no longer) proven itself count as replicas."""
    quarantine_s: float = 3600.0
    """How long a node that computed wrong numbers gets no rows: long enough to make lying useless, short enough for a
    machine whose driver was repaired."""
    audit_share: float = 1 / 32
    """Share of a worker's answers of which one row, drawn at random, is recomputed before use. A worker that lies in
    every row is found after 32 answers on average (8 tokens at 4 remote layers), one that lies in a tenth of them
    after 320."""
    probe_backoff_max_s: float = 32.0
    """A worker that fails probes is tried again after 1, 2, 4 ... seconds, at most this."""

    def share_deadline_s(self, n_pairs: int, n_bytes: int) -> float:
        """Longest wait for a share: max(deadline_s, n_pairs * deadline_per_pair_s + n_bytes / deadline_bytes_per_s),
        capped. `n_bytes` go both ways.

        So a decode step waits for deadline_s, and a chunk of a prompt for what its compute and transfer may take.
        """
        work_s = n_pairs * self.deadline_per_pair_s + n_bytes / self.deadline_bytes_per_s
        return min(max(self.deadline_s, work_s), self.max_deadline_s)


@dataclass(frozen=True)
class ModelsConfig:
    """The dense path of a model on the backbone (models/)."""

    n_ubatch: int = 512
    """Most tokens of a prompt in one graph, as llama.cpp's default: larger costs memory, smaller costs speed."""
    kv_pad: int = 256
    """Attention looks at a multiple of this many KV cells, so that a graph serves 256 tokens before the next one."""
    max_prompt_chars: int = 8 * MIB
    """Longest text a chat template may give: 32 characters for each of the 262,144 tokens of a context."""
    template_compile_s: float = 10.0
    """Starting Python (60 ms) and compiling a chat template (100 KB: 0.2 s), on a machine that is busy otherwise."""
    template_render_s: float = 3.0
    """Longest rendering: 8 MB of messages take 0.1 s. A template that loops for ever delays a SIGTERM by as much."""
    template_memory_bytes: int = 512 * MIB
    """Address space of the process that renders chat templates: a Python with 8 MB of messages in several copies."""


@dataclass(frozen=True)
class ServeConfig:
    """What a worker accepts (services/expert_server) and what it is offered (services/seeder)."""

    max_queued_pairs: int = 8192
    """(row, expert) pairs waiting for the compute thread: 1.1 s of work at the real sizes; more is refused as busy."""
    max_queue_s: float = 2.0
    """Longest estimated wait that is accepted: a slow worker takes fewer pairs than max_queued_pairs. One peer may fill
    half of the queue."""
    small_pairs: int = 64
    """Requests of up to so many pairs (decode, probes) are computed before larger ones: 8 rows of 8 experts."""
    small_before_large: int = 8
    """After so many small ones in a row a waiting large one has its turn: 20 ms of small ones to 70 ms at most."""
    max_work_bytes: int = 64 * MIB
    """Work memory of one graph of a worker: wide models get narrower batches. 512 pairs at n_embd 7,168, n_ff 2,048
    take 42 MB; without the bound a manifest could ask for gigabytes."""
    retry_after_ms: int = 200
    max_leases: int = 256
    lease_s: float = 120.0
    """How long experts offered to a joining worker count as taken while it downloads them."""


@dataclass(frozen=True)
class ContactConfig:
    """How the nodes of a peer list are dialled (services/contact)."""

    dials_at_once: int = 32
    """500 dead addresses of 10 s each then cost 160 s of the dialler's time and nobody else's."""
    redial_min_s: float = 0.5
    redial_max_s: float = 30.0
    """A peer that failed is dialled again after 0.5, 1, 2 ... seconds, at most this, times 0.5 to 1 at random."""


@dataclass(frozen=True)
class StoreConfig:
    """The slices a worker keeps on disk."""

    block_bytes: int = 256 * KIB
    """A slice is pulled in blocks of this size, so that a lost source costs little."""
    blocks_in_flight: int = 8
    """Blocks asked for at once: fills a link of 8 * 256 KiB per round trip (160 Mbit/s at 100 ms)."""
    max_flight_bytes: int = 8 * MIB
    """Memory of the slabs that are not whole or not on disk yet, or one slab: three at the real sizes (2.6 MB each), so
    that one is written while blocks of the others come."""
    commit_experts: int = 8
    """Experts of one layer that become visible on disk at once: a crash or a lost source costs at most these."""
    threads: int = 2
    """Threads that hash and write slabs: one hashes 1 GB/s, which no link feeds."""
    request_timeout_s: float = 30.0
    """Longest wait for the answer to a small request (models, offers, announcements): ten times the worst round trip
    seen on mobile links."""
    min_bytes_per_s: int = 16 * KIB
    """A source slower than this is left, as a connection is (WireConfig.min_progress_bytes_per_s)."""
    block_timeout_s: float = 20.0
    """Longest pause between two blocks: one of 256 KiB takes 16 s at min_bytes_per_s. Blocks that travel at once share
    a link, so each one that arrives gives the others as long again."""

    def reply_timeout_s(self, n_bytes: int) -> float:
        """Longest wait for a reply of about so many bytes: max(request_timeout_s, n_bytes / min_bytes_per_s)."""
        return max(self.request_timeout_s, n_bytes / self.min_bytes_per_s)


@dataclass(frozen=True)
class ApiConfig:
    """The HTTP API of a backbone."""

    max_waiting: int = 64
    """Generations that wait for a slot, or for their prompt to become tokens; more are refused with status 429."""
    retry_after_s: int = 5
    """What such a client is told to wait: about one short answer."""
    prompt_threads: int = 2
    """Threads that render and tokenize prompts: one long prompt does not hold up the others."""


@dataclass(frozen=True)
class Config:
    """All of the above, as the node passes it to its services."""

    wire: WireConfig = field(default_factory=WireConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    contact: ContactConfig = field(default_factory=ContactConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    api: ApiConfig = field(default_factory=ApiConfig)


@dataclass(frozen=True)
class Folders:
    """Where a node keeps things. `data`: the key; `cache`: slices and manifests; `settings`: peer lists."""

    data: Path
    cache: Path
    settings: Path

    @staticmethod
    def under(home: Path | None) -> Folders:
        """The platform's usual folders, or everything under `home` (`--home`, SWARMNODE_HOME).

        Several nodes of one user on one machine need a home each: a key belongs to one running node.
        """
        if home is None:
            return Folders(
                platformdirs.user_data_path("swarmnode", appauthor=False),
                platformdirs.user_cache_path("swarmnode", appauthor=False),
                platformdirs.user_config_path("swarmnode", appauthor=False),
            )
        return Folders(home / "data", home / "cache", home / "config")

    @property
    def models(self) -> tuple[Path, ...]:
        """Where models are looked for by name: the current folder and `models` in the cache folder."""
        return Path(), self.cache / "models"

    @property
    def key_file(self) -> Path:
        """The node's Ed25519 key."""
        return self.data / "node.key"
