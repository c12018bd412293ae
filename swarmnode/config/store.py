"""Slices: how they are pulled and kept."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.config.units import KIB, MIB


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
