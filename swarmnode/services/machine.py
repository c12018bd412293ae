"""What the machine says of itself: memory, pressure, battery, temperature. What it does not tell is None.

Linux (and Android, where it lets an app look): /proc/meminfo, /proc/pressure/memory, /sys/class/power_supply and
/sys/class/thermal. Other systems do not tell without a library; there only hours and `swarmnode pause` count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarmnode.compute.host_memory import read_meminfo

MAX_ENTRIES = 64
"""Supplies and zones looked at."""


@dataclass(frozen=True)
class MachineState:
    """`battery_percent` of the fullest battery, `temperature_c` of the hottest zone."""

    available_bytes: int | None = None
    total_bytes: int | None = None
    stalled_percent: float | None = None
    on_battery: bool | None = None
    battery_percent: int | None = None
    temperature_c: float | None = None


def read_machine(root: Path = Path("/")) -> MachineState:
    """Look once; blocks for well under a millisecond. Never raises: what cannot be read is not told."""
    memory = read_meminfo(root / "proc" / "meminfo")
    on_battery, percent = _power(root / "sys" / "class" / "power_supply")
    return MachineState(
        memory.get("MemAvailable"),
        memory.get("MemTotal"),
        _stalled(root / "proc" / "pressure" / "memory"),
        on_battery,
        percent,
        _temperature(root / "sys" / "class" / "thermal"),
    )


def _stalled(path: Path) -> float | None:
    """`some avg10=1.23 avg60=...`: the share of ten seconds, in percent."""
    for line in _text(path).splitlines():
        if line.startswith("some "):
            for word in line.split():
                name, _, value = word.partition("=")
                if name == "avg10":
                    return _number(value)
    return None


def _power(folder: Path) -> tuple[bool | None, int | None]:
    """Whether a battery of the machine (not of its mouse) is being used up, and how full the fullest one is."""
    on_mains, discharging, percents = False, None, []
    for supply in _entries(folder, ""):
        kind = _text(supply / "type").strip()
        if kind in ("Mains", "USB", "Wireless"):
            on_mains |= _text(supply / "online").strip() == "1"
        elif kind == "Battery" and _text(supply / "scope").strip() != "Device":
            discharging = bool(discharging) or _text(supply / "status").strip() == "Discharging"
            percent = _number(_text(supply / "capacity"))
            if percent is not None:
                percents.append(int(percent))
    on_battery = None if discharging is None else discharging and not on_mains
    return on_battery, max(percents, default=None)


def _temperature(folder: Path) -> float | None:
    """Of the hottest zone, in degrees Celsius; sensors that say less than 1 or more than 150 are not connected."""
    found = [_number(_text(zone / "temp")) for zone in _entries(folder, "thermal_zone")]
    sensible = [value / 1000 for value in found if value is not None and 1_000 <= value <= 150_000]
    return max(sensible, default=None)


def _entries(folder: Path, start: str) -> Iterator[Path]:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(start))
    except OSError:
        return
    yield from (folder / name for name in names[:MAX_ENTRIES])


def _text(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(1 << 16)
    except OSError:  # not there, or a driver that has no answer now
        return ""


def _number(text: str) -> float | None:
    try:
        return float(text.strip())
    except ValueError:
        return None
