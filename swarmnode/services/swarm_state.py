"""The swarm as this backbone sees it, for GET /api/swarm, `swarmnode status` and `swarmnode demo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trio

from swarmnode.config import DispatchConfig
from swarmnode.services.gossip_state import GossipState
from swarmnode.services.members import Members, Standing, Worker
from swarmnode.services.remote_experts import WireForm
from swarmnode.weights.manifest import Manifest


@dataclass
class SwarmState:
    """Answers `as_dict` with plain JSON values. `gossip`: what is known beyond our workers, once there is gossip."""

    manifest: Manifest
    members: Members
    form: WireForm
    config: DispatchConfig
    gossip: GossipState | None = None

    def as_dict(self) -> dict[str, Any]:
        """Model, coverage and workers now."""
        manifest = self.manifest
        covered, _ = self.coverage()
        heard = {} if self.gossip is None else self.gossip.as_dict()
        return heard | {
            "model": manifest.name,
            "model_id": manifest.model_id.hex(),
            "layers": len(manifest.layers),
            "experts_per_layer": manifest.n_expert,
            "experts_covered": covered,
            "form": self.form.form,
            "encoding": self.form.encoding,
            "deadline_ms": self.config.deadline_s * 1e3,
            "workers": [self._worker(worker) for worker in self.members.workers],
        }

    def coverage(self) -> tuple[int, int]:
        """Experts for which some worker gets rows, and all routed experts."""
        covered = {
            (layer, expert)
            for worker in self.members.workers
            if worker.standing is Standing.SERVING
            for layer, experts in worker.proven.items()
            for expert in experts
        }
        return len(covered), self.manifest.n_expert * len(self.manifest.layers)

    def _worker(self, worker: Worker) -> dict[str, Any]:
        return {
            "node": str(worker.node_id),
            "name": worker.node_id.short,
            "standing": worker.standing.value,
            "reason": worker.reason,
            "device": worker.device,
            "max_rows": worker.max_rows,
            "experts": sum(len(experts) for experts in worker.holdings.values()),
            "holdings": [[item.layer, item.first, item.count] for item in worker.ranges],
            "rtt_ms": None if worker.peer.rtt_s is None else round(worker.peer.rtt_s * 1e3, 2),
            "answered_s_ago": _seconds_since(worker.answered_at_s),
            "pairs": worker.tally.pairs,
            "late": worker.tally.late,
            "bad_replies": worker.tally.bad_replies,
        }


def _seconds_since(time_s: float) -> float | None:
    """Seconds since a time of trio's clock; None for never."""
    return None if time_s == float("-inf") else round(trio.current_time() - time_s, 2)
