"""How a node behaves towards the other programs of its machine."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def give_way() -> None:
    """Let whoever uses a core keep it until it waits or its time is up: call it before threads start.

    A worker wakes up for each layer, and a task of the usual class that wakes up interrupts the one that computes: what
    its owner does, or a backbone that had sent only the first of two requests. SCHED_BATCH is Linux's class of those
    that do not; other systems are left as they are, and so is one that does not allow it. Whoever started the node in
    a class of their own choice (`chrt`) meant it.
    """
    if sys.platform in ("linux", "android") and hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
