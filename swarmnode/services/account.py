"""What the swarm did for one answer: told to the person at the end, and live while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WorkerShare:
    """One worker's part. Pairs are (row, expert) pairs; bytes are message bodies; waits last until a reply is taken."""

    pairs: int = 0
    requests: int = 0
    late: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    wait_s: float = 0.0


@dataclass
class Account:
    """Counts of one generation.

    `pairs` is all of them; `remote` were answered by workers, `fallback` were sent out but computed by the local
    replica after all, the rest was local from the start.
    """

    pairs: int = 0
    remote: int = 0
    fallback: int = 0
    layers: int = 0
    remote_layers: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were not run, because a slot held them."""
    wait_s: float = 0.0
    """Time the forward pass stood still for workers, beyond its own share of the layer."""
    workers: dict[str, WorkerShare] = field(default_factory=dict)

    def worker(self, name: str) -> WorkerShare:
        """The entry of one worker, made when it is new."""
        return self.workers.setdefault(name, WorkerShare())

    @property
    def remote_share(self) -> float:
        """Part of all pairs that workers computed, 0 to 1."""
        return self.remote / self.pairs if self.pairs else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the API's `swarm` field."""
        return {
            "pairs": self.pairs,
            "pairs_remote": self.remote,
            "pairs_fallback": self.fallback,
            "share_remote": round(self.remote_share, 4),
            "cached_tokens": self.cached_tokens,
            "layers": self.layers,
            "layers_remote": self.remote_layers,
            "wait_ms": round(self.wait_s * 1e3, 2),
            "workers": {
                name: {
                    "pairs": share.pairs,
                    "requests": share.requests,
                    "late": share.late,
                    "bytes_out": share.bytes_out,
                    "bytes_in": share.bytes_in,
                    "wait_ms": round(share.wait_s * 1e3, 2),
                }
                for name, share in self.workers.items()
            },
        }
