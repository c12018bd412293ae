"""Every number that tunes swarmnode, with its unit, formula and reason.

Frozen dataclasses, one for each room; a service gets the one it needs. Defaults are for a home connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import platformdirs

Speculate: TypeAlias = Literal["auto", "always", "never"]

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
    bulk_step_bytes: int = 64 * KIB
    """Largest read and write on a connection of class BULK: rows on other connections wait for one (50 us)."""
    bulk_held_bytes: int = 1 * MIB
    """What the kernel may hold of a connection of class BULK: nothing more urgent waits behind it, and the two ends
    need not take turns (up to a fifth faster)."""
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
    quarantine_s: float = 3600.0
    """How long a node that computed wrong numbers gets no rows: long enough to make lying useless, short enough for a
    machine whose driver was repaired."""
    audit_share: float = 1 / 32
    """Share of a worker's answers of which one row, drawn at random, is recomputed before use. A worker that lies in
    every row is found after 32 answers on average (8 tokens at 4 remote layers), one that lies in a tenth of them
    after 320."""
    probe_backoff_max_s: float = 32.0
    """A worker that fails probes is tried again after 1, 2, 4 ... seconds, at most this."""
    refusals_in_a_row: int = 3
    """A worker whose last so many requests brought nothing, be it only `busy`, is out until it answers a probe."""
    suspect_max_s: float = 256.0
    """A worker that let requests down gets no rows for probe_tick_s, twice that the next time, ... at most this:
    one that answers probes and no work then costs deadline_s every four minutes."""
    forgiven_after: int = 64
    """Requests answered in a row after which the next pause begins at probe_tick_s again: more than the layers of a
    model, or letting down one layer of every token would be forgiven before the next."""
    rebuild_s: float = 0.5
    """Least time between two new routings, 10 ms of trio's thread each with many workers. What is lost meanwhile is
    local at once."""
    announce_burst: int = 16
    """Announcements that a node may make at once; then announces_per_s. A worker that fetches 300 MB over a LAN makes
    ten of them, each when a run of experts is there."""
    announces_per_s: float = 1.0

    # Whether a row is sent at all (schedule/sending.py, docs/decisions/0030)
    send: Literal["auto", "always"] = "always"
    """`always`: whatever a worker owns; `auto`: what is expected to finish sooner there. The command line's default is
    `auto`; whoever wants to see workers work (tests, the demo, the benchmarks) does not have to say so."""
    local_budget_bytes: int | None = None
    """Routed experts of the mapped file that count as in memory; None: as many as are used."""
    pair_s: float = 1.5e-4
    """A pair where nothing was measured yet: one of a 122B model takes 0.13-0.19 ms on two cores of a PC."""
    disk_bytes_per_s: float = 2e9
    """Reading an expert where nothing was measured yet: an SSD."""
    cut_s: float = 5e-4
    """Sending a layer out, beyond the wait, where nothing was measured yet: 500 us of Python (benchmarks.decode)."""
    hop_s: float = 1e-4
    """A share computed here beside one that is sent: one more handover between threads, 28-57 us on an idle machine."""
    estimate_weight: float = 0.1
    """Of a new sample; a change is followed after about ten."""
    estimate_half_life_s: float = 10.0
    """What was slow and is therefore not used is taken to be half as far above its best after this time."""
    max_known_workers: int = 4096
    """Nodes whose times are kept, 3 KB each."""
    explore_layers: int = 64
    """About one layer in so many is done the other way, to learn what that takes now ..."""
    explore_share: float = 0.02
    """... and less often where that is slow: all of it may cost this share of the time."""
    replica_margin: float = 1.25
    """A share goes to another holder than the owner only if that is so many times better: shares should stay whole."""
    hedges: bool = False
    """Whether a late share is asked for a second time. Off by itself: a prompt's share that is late once can cost its
    worker the standing, and one without room is not seen to be late (decision 0030, what is missing)."""
    hedge_samples: int = 8
    """Answers of a size by which a worker is known well enough to say when it is late."""
    hedge_min_s: float = 0.01
    """Least wait before a second replica is asked: below that the machine's own hiccups decide."""
    replace_passes: int = 128
    """Experts in memory are also chosen anew after so many counted passes of an answer (every 4th: some 500 tokens)."""

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
    max_tentative_tokens: int = 32
    """Most tokens of a pass that may be taken back. What is kept of each until then takes 50 KB a recurrent layer at
    the real sizes: 57 MB with 36 of them."""
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
class EngineConfig:
    """Steps (services/batcher), and what is kept of conversations so as not to run it again (services/prefix_cache)."""

    tokens_ahead: int = 16
    """Tokens of an answer that may wait for whoever asked for it; then its sequence pauses, and holds nobody up."""
    mixed_rows: int = 64
    """Rows of prompts in a step that also has rows of answers: 64 rows take 15 to 20 times as long as one."""
    max_steps: int = 4
    """Steps under way at once, of different sequences, where they wait for workers."""
    short_wait: float = 0.1
    """Steps that wait less than this share of their compute time are not divided: each reads the experts' weights."""

    speculate: Speculate = "auto"
    """When steps also try out guessed tokens: "auto" where the compute thread is idle most of the time, because steps
    wait for workers. Tokens do not depend on it."""
    draft_tokens: int = 7
    """Most guessed tokens in a step: with the one before them they are DispatchConfig.decode_rows, which travel before
    prompts'. Less than ModelsConfig.max_tentative_tokens."""
    draft_match: int = 3
    """Tokens at the end of the text that must have occurred before, for what came then to be guessed."""
    draft_longest_match: int = 8
    """Of several places the one with the longest match counts, and the latest of those that match this far."""
    draft_places: int = 8
    """So many are looked at, the latest."""
    draft_pause_tokens: int = 31
    """Longest time without guesses after wrong ones: a token without any costs nothing."""

    checkpoint_bytes: int = 1024 * MIB
    """All checkpoints of all slots. One takes 156 MB at the real sizes (36 recurrent layers of 64 f32 matrices of 128 x
    128, 4.2 MB, and 147 KB of convolution): six, which is three turns of one conversation or the last one of three."""
    min_checkpoint_tokens: int = 32
    """No checkpoint is made so close behind another: it would save less than it costs, a pass of its own."""
    checkpoint_tokens: int = 2048
    """Within a long prompt one is made at least so many tokens behind the one before: four chunks."""
    checkpoints_a_prompt: int = 4
    """... and about so many at most, or one long prompt would drive out all others."""
    continued_share: float = 0.5
    """A prompt goes on in a slot if that keeps at least this share of its tokens (or holds all of the prompt), and else
    takes the one not used for the longest time: a beginning that two conversations share must not make them take one
    slot in turns."""


@dataclass(frozen=True)
class ServeConfig:
    """What a worker accepts (services/expert_server)."""

    max_queued_pairs: int = 8192
    """(row, expert) pairs waiting for the compute thread: 1.1 s of work at the real sizes; more is refused as busy."""
    max_queue_s: float = 2.0
    """Longest estimated wait that is accepted: a slow worker takes fewer pairs than max_queued_pairs. One peer may fill
    half of the queue."""
    small_pairs: int = 64
    """Requests of up to so many pairs (decode, probes) are computed before larger ones: 8 rows of 8 experts."""
    small_before_large: int = 8
    """After so many small ones in a row a waiting large one has its turn: 20 ms of small ones to 70 ms at most."""
    coalesced_requests: int = 64
    """Most small requests for one layer that are computed together, within the widest batch; 1: each alone."""
    max_overtaking_pairs: int = 256
    """Most pairs that are computed before an older small request of another layer because they fit a batch: 0.05 s of
    work, and 0.5 s on a phone ten times slower, which is what a layer's decode step waits for."""
    max_work_bytes: int = 64 * MIB
    """Work memory of one graph of a worker: wide models get narrower batches. 512 pairs at n_embd 7,168, n_ff 2,048
    take 42 MB; without the bound a manifest could ask for gigabytes."""
    retry_after_ms: int = 200


@dataclass(frozen=True)
class ContactConfig:
    """How other nodes are dialled (services/contact, services/dial_plan)."""

    dials_at_once: int = 128
    """Half of the file descriptors that macOS gives a process by default."""
    attempt_delay_s: float = 0.25
    """RFC 8305's connection attempt delay: a dial that has had so long no longer keeps the next one waiting. With
    max_contacts, 500 dead addresses are gone through in 500 / 12 * 0.25 = 10 s."""
    patience_s: float = 2.0
    """When all dials_at_once are taken, one as old as this makes room for an address that was never tried; it is tried
    again later with all of WireConfig.dial_timeout_s."""
    max_contacts: int = 12
    """Most connections to nodes of bootstrap lists at a time: enough for a connected overlay, few for the listed."""
    max_targets: int = 2048
    """Most nodes that may be on the lists of whom to dial."""
    max_addresses: int = 8
    """Most addresses of one node; the latest are kept."""
    redial_min_s: float = 0.5
    redial_max_s: float = 30.0
    """A peer that failed is dialled again after 0.5, 1, 2 ... seconds, at most this, times 0.5 to 1 at random."""
    remembered_after_s: float = 3.0
    """A node that is connected to nobody for so long also dials peers of earlier runs: bootstrap nodes that live have
    answered by then."""
    simultaneous_s: float = 10.0
    """Two nodes that dialled each other within so long keep the dial of the lower id; later, the newer one counts. As
    long as a handshake may take."""
    max_backbones: int = 16
    """Backbones of its model that a worker stays connected with."""
    neighbours: int = 8
    """Other nodes that a node stays connected with, for gossip and for slices."""
    choose_interval_s: float = 5.0
    """They are chosen anew at most this often."""
    report_dials: int = 8
    """Up to so many nodes to dial, each dial and each pause is reported; with more, the pauses of one every
    report_interval_s, while nobody is connected."""
    report_interval_s: float = 5.0


@dataclass(frozen=True)
class BootstrapConfig:
    """Bootstrap lists from the web and from DNS (net/remote_list)."""

    timeout_s: float = 10.0
    """Longest wait for all of them together, before the node starts; then the last good copies are used."""
    stall_timeout_s: float = 5.0
    """Longest wait for a connection, or for the next bytes."""


@dataclass(frozen=True)
class LanConfig:
    """Finding nodes of the same network on the LAN (services/lan)."""

    max_nodes: int = 64
    """Most nodes taken from the LAN: anybody there may announce any number."""
    max_hosts: int = 4
    """Addresses taken of one announcement."""
    resolve_timeout_s: float = 3.0
    """How long an announced node may take to tell its addresses."""


@dataclass(frozen=True)
class AddressBookConfig:
    """Peers remembered for the next start (services/address_book)."""

    max_nodes: int = 256
    max_addresses: int = 4
    """Of one node."""
    save_interval_s: float = 60.0
    """How often the file is written when something changed: a crash forgets a minute of meetings."""
    dial_nodes: int = 64
    """So many are dialled, met before heard of, latest first."""
    precision_s: int = 3600
    """A node that was seen again within this time is no news for the file."""


@dataclass(frozen=True)
class StoreConfig:
    """The slices a worker keeps on disk."""

    block_bytes: int = 256 * KIB
    """A slice is pulled in blocks of this size, so that a lost source costs little."""
    blocks_in_flight: int = 8
    """Most blocks that one source is asked for at once: fills a link of 8 * 256 KiB per round trip (160 Mbit/s at
    100 ms)."""
    first_blocks: int = 2
    """The same for a source of unknown speed: what a kill in the first moments costs."""
    window_round_trips: float = 1.0
    """Blocks under way: what a source's speed brings in so many round trips of one block, and one more. While that is
    more than before, it grows by a block each time, until the path is full; its queue then holds about one."""
    rows_recent_s: float = 0.25
    """While rows travelled with one of the sources so recently (a decode step and its compute), blocks come one at a
    time, and ..."""
    rest_share: float = 1.0
    """... a source is left in peace for so many times as long as its last block took, ..."""
    max_rest_s: float = 0.05
    """... at most this: rows find a fast path and the processors free half of the time, a path of 20 Mbit/s, where a
    block takes 100 ms, one third."""
    max_flight_bytes: int = 8 * MIB
    """Memory of the blocks, of all sources, that were asked for and are not on disk yet."""
    takeover_s: float = 1.0
    """When nothing else is left to ask for, a block that a source has held for so long is asked of another one, too:
    ten times a common round trip ..."""
    takeover_times: float = 3.0
    """... or this many times what the other one needs for a block, if that is longer."""
    max_wrong_slabs: int = 3
    """A source that gave wrong bytes so often is not asked again at all; once, not for that range."""
    patient_bytes_per_s: float = 1.25e6
    """A manifest that comes more slowly is asked of another source as well: 10 Mbit/s."""
    sources_s: float = 0.2
    """How often a fetch looks for new sources; at once when it has none."""
    bulk_dial_s: float = 3.0
    """How long slices wait for a connection of their own before they share the one of the rows."""
    bulk_retry_s: float = 60.0
    """A node whose bulk connection could not be dialled, or broke, is not dialled for another one for so long."""
    bulk_idle_s: float = 10.0
    """A bulk connection on which nothing was asked for so long is closed."""
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
    gossip.core.DIGEST_WORK); more is refused as busy."""
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


@dataclass(frozen=True)
class Config:
    """All of the above, as the node passes it to its services."""

    wire: WireConfig = field(default_factory=WireConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    contact: ContactConfig = field(default_factory=ContactConfig)
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    lan: LanConfig = field(default_factory=LanConfig)
    address_book: AddressBookConfig = field(default_factory=AddressBookConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    gossip: GossipConfig = field(default_factory=GossipConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    node_api: NodeApiConfig = field(default_factory=NodeApiConfig)
    market: MarketConfig = field(default_factory=MarketConfig)


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

    @property
    def port_file(self) -> Path:
        """The port at which others know this node, if it was free to choose one."""
        return self.data / "listen.port"

    @property
    def token_file(self) -> Path:
        """What the node-local HTTP routes ask for (services/node_token)."""
        return self.data / "api.token"

    def address_book(self, tag: bytes) -> Path:
        """Peers met in earlier runs in the network of this tag (wire/secret.network_tag)."""
        return self.data / f"peers-met-{tag.hex()[:8]}.txt"

    @property
    def secret_file(self) -> Path:
        """The secret of the private network that this node is in, unless another is given."""
        return self.settings / "network.secret"
