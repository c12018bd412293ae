"""Who goes first where two nodes claim the same experts, and other choices that everybody can repeat. Pure."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from swarmnode.weights.slices import ExpertRange


def is_before(other: bytes, own: bytes, claim: ExpertRange, item: ExpertRange) -> bool:
    """Whether `other`'s claim goes before `own`'s on the experts that both name. Both nodes find the same.

    By hash of node and expert, so that no node is always first.
    """
    first = max(claim.first, item.first)
    return _rank(other, item.layer, first) < _rank(own, item.layer, first)


def share_of(node_id: bytes, epoch: int, purpose: str) -> float:
    """A number in [0, 1) that node and epoch decide: jitter, and who may act in a round."""
    digest = hashlib.blake2b(_seed(node_id, epoch, purpose), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64


def order_of(node_id: bytes, epoch: int, count: int) -> npt.NDArray[np.uint32]:
    """u32 [count]: a key for each of `count` things, by which node and epoch order them; ties are rare."""
    digest = hashlib.shake_256(_seed(node_id, epoch, "sample")).digest(4 * count)
    return np.frombuffer(digest, np.dtype("<u4")).astype(np.uint32)


def _seed(node_id: bytes, epoch: int, purpose: str) -> bytes:
    return node_id + epoch.to_bytes(8, "little") + purpose.encode()


def _rank(node_id: bytes, layer: int, expert: int) -> bytes:
    return hashlib.blake2b(node_id + f"{layer}:{expert}".encode(), digest_size=16).digest()
