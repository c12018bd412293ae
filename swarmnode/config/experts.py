"""Rows that travel: when the backbone sends them, and what a worker accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarmnode.config.units import MIB


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
    max_pieces: int = 64
    """Most requests that a worker gets of one layer; what its `max_rows` leaves over is computed here. A request costs
    0.1 to 0.3 ms of trio's thread however few its pairs are: 4,096 pairs one by one take a second of it, for what the
    backbone computes in 0.6."""
    max_layer_pieces: int = 256
    """Most requests of one layer of all workers, but for the first of each: identities are free, so without it many
    workers could ask for one pair at a time."""
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
    """A worker that refused something of its last so many layers, be it only as `busy`, is out until it answers a
    probe."""
    suspect_max_s: float = 256.0
    """A worker that let requests down gets no rows for probe_tick_s, twice that the next time, ... at most this:
    one that answers probes and no work then costs deadline_s every four minutes."""
    forgiven_after_s: float = 60.0
    """Seconds of work after which the next pause is one step shorter: whoever lets one layer down as often as that is
    forgiven costs a token's deadline a minute, 0.8 % of the time. After the longest pause it takes eight minutes."""
    work_gap_s: float = 1.0
    """Most of the time between two answered layers that counts as work: while nothing is asked nothing is forgiven."""
    rebuild_s: float = 0.5
    """Least time between two new routings, 10 ms of trio's thread each with many workers. What is lost meanwhile is
    local at once."""
    announce_burst: int = 16
    """Announcements that a node may make at once; then announces_per_s. A worker that fetches 300 MB over a LAN makes
    ten of them, each when a run of experts is there."""
    announces_per_s: float = 1.0

    # Whether a row is sent at all (schedule/sending.py, sending_auto.py, docs/decisions/0030)
    send: Literal["auto", "always"] = "always"
    """`always`: whatever a worker owns; `auto`: what is expected to finish sooner there, which is the command line's
    default. Tests, benchmarks and the demo are there to see workers work."""
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
    explore_passes: int = 16
    """... and no more than one pass in so many: it is cut at every layer. With 48 layers that would be most passes."""
    explore_share: float = 0.02
    """... and less often where that is slow: all of it may cost this share of the time."""
    replica_margin: float = 1.25
    """A share goes to another holder than the owner only if that is so many times better: shares should stay whole."""
    hedges: bool = True
    """Whether a late share is asked for a second time."""
    hedge_samples: int = 8
    """Shares of a size that were answered, by which a worker is known well enough to say when it is late."""
    hedge_min_s: float = 0.01
    """Least wait before somebody else is asked: below that the machine's own hiccups decide."""
    hedge_times: float = 4.0
    """A share is also late when its second holder would have done it so many times over: by its own times a worker that
    grows slower by a little each time is never late."""
    replace_passes: int = 128
    """Experts in memory are also chosen anew after so many counted passes of an answer (every 4th: some 500 tokens)."""

    def pieces_each(self, n_workers: int) -> int:
        """Most requests of a layer for each of so many workers: max_pieces, or an equal part of max_layer_pieces."""
        return max(1, min(self.max_pieces, self.max_layer_pieces // n_workers))

    def share_deadline_s(self, n_pairs: int, n_bytes: int) -> float:
        """Longest wait for a share: max(deadline_s, n_pairs * deadline_per_pair_s + n_bytes / deadline_bytes_per_s),
        capped. `n_bytes` go both ways.

        So a decode step waits for deadline_s, and a chunk of a prompt for what its compute and transfer may take.
        """
        return min(max(self.deadline_s, self.share_work_s(n_pairs, n_bytes)), self.max_deadline_s)

    def share_work_s(self, n_pairs: int, n_bytes: int) -> float:
        """What compute and transfer of a share may take on the slowest device and link that are waited for."""
        return n_pairs * self.deadline_per_pair_s + n_bytes / self.deadline_bytes_per_s


@dataclass(frozen=True)
class ServeConfig:
    """What a worker accepts (services/expert_server)."""

    max_queued_pairs: int = 8192
    """(row, expert) pairs waiting for the compute thread: 1.1 s of work at the real sizes; more is refused as busy."""
    max_queue_s: float = 2.0
    """Longest estimated wait that is accepted: a slow worker takes fewer pairs than max_queued_pairs. One peer may fill
    half of the queue."""
    small_pairs: int = 64
    """Requests of up to so many pairs (8 rows of 8 experts) are coalesced, and are the measure of the next number. Who
    goes first is what the class of traffic says: answers and probes, before prompts."""
    small_before_large: int = 8
    """After so many small ones of answers in a row, or larger ones with as many pairs (512), a waiting prompt's has its
    turn: whoever calls everything an answer's has half of the time at most while prompts wait."""
    coalesced_requests: int = 64
    """Most small requests for one layer that are computed together, within the widest batch; 1: each alone."""
    max_overtaking_pairs: int = 256
    """Most pairs that are computed before an older small request of another layer because they fit a batch: 0.05 s of
    work, and 0.5 s on a phone ten times slower, which is what a layer's decode step waits for."""
    max_work_bytes: int = 64 * MIB
    """Work memory of one graph of a worker: wide models get narrower batches. 512 pairs at n_embd 7,168, n_ff 2,048
    take 42 MB; without the bound a manifest could ask for gigabytes."""
    retry_after_ms: int = 200
