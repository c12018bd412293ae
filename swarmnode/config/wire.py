"""Caps on what a peer may send, and how long a connection may take."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.config.units import KIB, MIB


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
