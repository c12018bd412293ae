"""How much memory the system could still give: Linux says so, others do not without a library."""

from __future__ import annotations

from pathlib import Path

from swarmnode.state_file import read_small

MEMINFO = Path("/proc/meminfo")
_MAX_BYTES = 65_536


def available_bytes() -> int | None:
    """What new allocations can take without swapping, or None where the system does not say."""
    return read_meminfo(MEMINFO).get("MemAvailable")


def read_meminfo(path: Path) -> dict[str, int]:
    """Bytes by name; never raises: what cannot be read is not there."""
    found: dict[str, int] = {}
    try:
        text = read_small(path, _MAX_BYTES).decode("ascii", "replace")
    except OSError:
        return found
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * 1024
    return found
