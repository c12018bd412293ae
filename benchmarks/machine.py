"""What the kernel says about this machine and its processes (Linux, /proc)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, int]:
    """The Vm* and Rss* lines of /proc/PID/status, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[0].startswith(("Vm", "Rss"))
    }


def cpu_s(pids: Iterable[int]) -> float:
    """CPU time that these processes have used."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # utime, stime
    return total / _TICKS_PER_S


def busy_s() -> float:
    """CPU time that all processes together have used since the machine started."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / _TICKS_PER_S
