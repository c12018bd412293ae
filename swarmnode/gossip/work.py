"""What peers' requests cost to answer, and whether there is time for one more: bounds by peer and for all. Pure."""

from __future__ import annotations

import math

from swarmnode.config import GossipConfig
from swarmnode.gossip.overlay import Overlay, Peer
from swarmnode.gossip.rates import TokenBucket
from swarmnode.wire import constants as c
from swarmnode.wire.messages import GossipDigest, GossipWant, Message

DIGEST_WORK = 32.0
"""What a comparison counts for among the messages of a peer: DIGEST_WORK * (1 + records here / DIGEST_RECORDS)."""
DIGEST_RECORDS = 4096
QUIET_SHARE = 0.5
"""Of a peer's burst: who has saved so much is not refused, whatever the request costs (a comparison of a full table:
0.2 s). What it costs beyond is owed, and nothing is answered meanwhile."""
IDS_A_WORK = 64.0
RECORDS_A_WORK = 32.0


def work_of(message: Message, body_bytes: int, n_records: int) -> float:
    """What the request costs a table of `n_records`; 1 is a short one."""
    if isinstance(message, GossipDigest):
        return DIGEST_WORK * (1.0 + n_records / DIGEST_RECORDS)
    if isinstance(message, GossipWant):
        return 1.0 + body_bytes / c.GOSSIP_ID_BYTES / RECORDS_A_WORK
    return 1.0 + body_bytes / c.GOSSIP_OFFER_BYTES / IDS_A_WORK


class Work:
    """What is done for the peers of an overlay."""

    def __init__(self, config: GossipConfig, overlay: Overlay) -> None:
        self._config = config
        self._overlay = overlay
        self._all = TokenBucket(config.all_work_per_s, config.all_work_burst, -math.inf)

    def take(self, peer: Peer, work: float, now_s: float) -> bool:
        """Whether the peer's request may be answered. When all together ask for too much, each has an even share.

        The peer's own bucket is asked first: what is refused takes nothing from others.
        """
        config = self._config
        quiet = QUIET_SHARE * config.work_burst
        left = peer.work.left(now_s)
        if left < min(work, quiet):
            return False
        cost = work
        if not self._all.take(work, now_s):
            share = config.all_work_per_s / (config.work_per_s * len(self._overlay))
            cost = work / min(1.0, share)
            if left < min(cost, quiet):
                return False
        peer.work.spend(cost, now_s)
        return True
