"""What a node tells the person who started it, as events; the command line decides how they look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from swarmnode.compute.devices import DeviceInfo
from swarmnode.compute.self_test import SelfTestReport
from swarmnode.net.address import PeerAddress
from swarmnode.weights.manifest import Manifest


@dataclass(frozen=True)
class Connecting:
    """Dialling a peer."""

    address: str


@dataclass(frozen=True)
class Waiting:
    """No peer could be reached or the connection was lost; trying again after `delay_s`."""

    reason: str
    delay_s: float


@dataclass(frozen=True)
class Settled:
    """A worker holds all that fits its budget (or all there is)."""

    model_name: str
    n_experts: int
    held_bytes: int
    budget_bytes: int = 0
    """What it may hold now."""
    least_bytes: int = 0
    """What one expert takes, the smallest."""


@dataclass(frozen=True)
class Planned:
    """What is to be held for now: experts served already, and those on their way."""

    model_name: str
    kept_experts: int
    new_experts: int
    total_bytes: int
    fetch_bytes: int


@dataclass(frozen=True)
class Fetched:
    """Bytes fetched so far in this session."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Tested:
    """The self-test's table, passed."""

    report: SelfTestReport


@dataclass(frozen=True)
class Serving:
    """Announced to a backbone: rows may come now."""

    backbone: str
    n_experts: int
    held_bytes: int
    max_rows: int
    device: str


@dataclass(frozen=True)
class Listening:
    """Nodes may dial these addresses."""

    addresses: tuple[PeerAddress, ...]


@dataclass(frozen=True)
class Hashing:
    """The manifest is being made: bytes hashed so far."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Ready:
    """A backbone serves."""

    manifest: Manifest
    state_bytes: int
    """Of all slots."""
    n_slots: int
    n_ctx: int
    """Tokens a slot holds."""
    checkpoint_bytes: int
    """Most that checkpoints of conversations may take, on top."""
    device: DeviceInfo
    addresses: tuple[PeerAddress, ...]
    api_url: str


@dataclass(frozen=True)
class WorkerChanged:
    """A backbone's view of one worker: "serving", "suspect", "quarantined", "paused", "empty" (it holds nothing,
    and `reason` says what it lacks) or "left", and what all of them cover."""

    worker: str
    standing: str
    reason: str
    n_experts: int
    covered: int
    total: int


@dataclass(frozen=True)
class CoverageChanged:
    """So many of a backbone's experts are proven at workers that serve, for some seconds."""

    covered: int
    total: int


@dataclass(frozen=True)
class Started:
    """A worker runs under this identity."""

    node: str


@dataclass(frozen=True)
class Stopped:
    """The node has ended cleanly."""


@dataclass(frozen=True)
class Leaving:
    """The node was told to stop: it says goodbye, and answers what was asked before."""


@dataclass(frozen=True)
class Paused:
    """A worker gets no rows from now on, and takes nothing new."""

    reason: str


@dataclass(frozen=True)
class Resumed:
    """And now it does again."""


@dataclass(frozen=True)
class SteppedBack:
    """A worker gives experts up, down to so many bytes, because memory is short."""

    reason: str
    budget_bytes: int


@dataclass(frozen=True)
class Lending:
    """How it goes with a worker: counts since its start. Told about once a second."""

    at_s: float
    """trio's clock."""
    model: str
    n_experts: int
    held_bytes: int
    """Of those experts."""
    memory_bytes: int
    """Taken for them, with the slots that are free between them."""
    requests: int
    rows: int
    """(row, expert) pairs computed."""
    tokens: int
    """Helped with, at least (services/expert_server.Served.tokens)."""
    bytes_in: int
    bytes_out: int
    """Rows in and out, without slices."""
    fetched_bytes: int
    """Slices downloaded."""
    device: str
    peers: int
    pause: str
    """Why it does not work now; "" if it does."""
    power: str
    """Battery and temperature, if the system tells."""


JoinEvent: TypeAlias = (
    Started
    | Connecting
    | Waiting
    | Listening
    | Planned
    | Fetched
    | Tested
    | Serving
    | Settled
    | Lending
    | Paused
    | Resumed
    | SteppedBack
    | Leaving
    | Stopped
)
BackboneEvent: TypeAlias = (
    Connecting | Waiting | Hashing | Ready | WorkerChanged | CoverageChanged | Leaving | Stopped
)
