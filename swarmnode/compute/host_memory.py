"""How much memory the system could still give."""

from __future__ import annotations

from pathlib import Path

from swarmnode.state_file import read_small

_MEMINFO = Path("/proc/meminfo")
_MAX_BYTES = 65_536


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """What new allocations can take without swapping, or None where the system does not say (it is Linux that does)."""
    try:
        lines = read_small(meminfo, _MAX_BYTES).decode("ascii").splitlines()
        amounts = {name: amount for name, _, amount in (line.partition(":") for line in lines)}
        return 1024 * int(amounts["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError, IndexError):
        return None
