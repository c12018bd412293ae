"""What is read of a machine: from folders that look like /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.services.machine import MachineState, read_machine


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def supply(root: Path, name: str, **files: str) -> None:
    for file, text in files.items():
        put(root, f"sys/class/power_supply/{name}/{file}", text + "\n")


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert read_machine(tmp_path) == MachineState()


def test_memory_and_pressure(tmp_path: Path) -> None:
    put(
        tmp_path,
        "proc/meminfo",
        "MemTotal:       8000 kB\nMemFree: 1 kB\nMemAvailable:   2000 kB\nHugePages: 0\n",
    )
    put(
        tmp_path,
        "proc/pressure/memory",
        "some avg10=12.50 avg60=1.00 avg300=0.0 total=1\nfull avg10=3.0 total=1\n",
    )
    state = read_machine(tmp_path)
    assert (state.total_bytes, state.available_bytes) == (8000 * 1024, 2000 * 1024)
    assert state.stalled_percent == 12.5


@pytest.mark.parametrize(
    ("status", "online", "expected"),
    [("Discharging", "0", True), ("Discharging", "1", False), ("Charging", "1", False), ("Full", "0", False)],
)
def test_on_battery(tmp_path: Path, status: str, online: str, expected: bool) -> None:
    supply(tmp_path, "BAT0", type="Battery", status=status, capacity="81")
    supply(tmp_path, "AC", type="Mains", online=online)
    state = read_machine(tmp_path)
    assert (state.on_battery, state.battery_percent) == (expected, 81)


def test_a_mouse_is_no_machine(tmp_path: Path) -> None:
    supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", status="Discharging", capacity="5")
    state = read_machine(tmp_path)
    assert (state.on_battery, state.battery_percent) == (None, None)


def test_the_hottest_zone_that_makes_sense(tmp_path: Path) -> None:
    for number, text in enumerate(["45000\n", "61500\n", "-273000\n", "200000\n", "n/a\n"]):
        put(tmp_path, f"sys/class/thermal/thermal_zone{number}/temp", text)
    put(tmp_path, "sys/class/thermal/cooling_device0/temp", "99000")
    assert read_machine(tmp_path).temperature_c == 61.5


def test_this_machine_can_be_read() -> None:
    read_machine()
