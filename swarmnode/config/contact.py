"""How other nodes are found, dialled and remembered."""

from __future__ import annotations

from dataclasses import dataclass


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
