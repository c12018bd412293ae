"""What `swarmnode doctor` finds out about the machine: memory, disks, clock, ports, the node that runs here."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from swarmnode.cli.sizes import format_bytes
from swarmnode.config import Folders
from swarmnode.errors import SwarmError
from swarmnode.net.address import join_host_port
from swarmnode.net.control_socket import ask_control
from swarmnode.services.machine import MachineState
from swarmnode.services.steward import power_text

Finding: TypeAlias = tuple[str, str]
"""("ok" | "warn" | "fail", what was found and, if not ok, what to do)."""

RELEASED_S = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
"""No clock that is right shows an earlier time."""
LEAST_DISK_BYTES = 500_000_000
"""Under which a worker's usual 300 MB, with what is on its way, do not fit."""
_TIME_ERROR = 5
"""What adjtimex(2) answers while nothing keeps the clock right."""


def memory(machine: MachineState) -> Iterator[Finding]:
    """Linux and Android only: other systems do not tell without a library."""
    if machine.available_bytes is None or machine.total_bytes is None:
        yield "ok", "memory: this system does not say how much is free; --budget is what you can spare"
        return
    budget = max(1, machine.available_bytes // 2 // 10**6)
    text = (
        f"memory: {format_bytes(machine.available_bytes)} available of {format_bytes(machine.total_bytes)}; "
    )
    if machine.available_bytes < 0.05 * machine.total_bytes:
        yield "warn", text + "a worker would step back at once: end other programs, or give --keep-free SIZE"
    else:
        yield "ok", text + f"half of it as a worker's budget: --budget {budget}MB"
    if machine.stalled_percent is not None and machine.stalled_percent >= 10:
        yield (
            "warn",
            f"programs wait for memory {machine.stalled_percent:.0f} % of the time; end some, or lend less",
        )
    if text := power_text(machine):
        what = "a worker pauses now, unless --on-battery serve" if machine.on_battery else "a worker works"
        yield "ok", f"power: {text}; {what}"


def folders(places: Folders) -> Iterator[Finding]:
    """Rights, by writing a file; and room."""
    for what, folder in (("key", places.data), ("cache", places.cache)):
        existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            yield (
                "fail",
                f"{what}: {existing} cannot be written: {error.strerror}; choose another folder: --home DIR",
            )
            continue
        free = shutil.disk_usage(existing).free
        text = f"{what}: {folder}, {format_bytes(free)} free on its disk"
        if what == "cache" and free < LEAST_DISK_BYTES:
            yield (
                "warn",
                f"{text}; slices of experts need their budget again on disk: free some, or --home DIR",
            )
        else:
            yield "ok", text


def clock(now_s: float | None = None, state: Callable[[], int | None] | None = None) -> Iterator[Finding]:
    """Records of gossip lapse by the clock, and a number that it gave makes a restarted node the newer one."""
    now_s = time.time() if now_s is None else now_s
    shown = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if now_s < RELEASED_S:
        yield (
            "fail",
            f"clock: {shown} is before this version was made; set it, other nodes refuse such records",
        )
    elif (state or _clock_state)() == _TIME_ERROR:
        yield (
            "warn",
            f"clock: {shown}, and nothing keeps it right; turn on a time service (timedatectl set-ntp true)",
        )
    else:
        yield "ok", f"clock: {shown}"


def _clock_state() -> int | None:
    """What the kernel says (Linux); None where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    buffer = ctypes.create_string_buffer(512)  # struct timex, all zero: only asked
    try:
        return int(ctypes.CDLL(None).adjtimex(buffer))
    except (AttributeError, OSError):
        return None


def running(places: Folders) -> tuple[bool, list[Finding]]:
    """Whether a node runs with this key, and what it says of itself."""
    path = places.control_socket
    if not path.exists():
        return False, [("ok", "no node runs with this key now")]
    try:
        state = ask_control(path, {"do": "limits"})
    except SwarmError as error:
        if "can only leave" in str(error):
            return True, [("ok", "a backbone runs with this key")]
        return False, [("ok", "no node runs with this key now (the last one was killed)")]
    now = f"paused: {state.get('paused')}" if state.get("paused") else "lending"
    return True, [("ok", f"node {state.get('node')} runs with this key: {now}")]


def port(what: str, place: tuple[str, int], option: str, *, is_running: bool) -> Iterator[Finding]:
    """Whether it can be listened on; a node that runs has it already."""
    host, number = place
    shown = join_host_port(host, number)
    try:
        family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, number))
    except OSError as error:
        if is_running:
            yield "ok", f"{what}: {shown} is in use, a node runs here"
        else:
            yield (
                "warn",
                f"{what}: cannot listen on {shown}: {error.strerror}; end what has it, or give {option}",
            )
    else:
        yield "ok", f"{what}: {shown} is free"


def models(places: Folders) -> Iterator[Path]:
    """Files by which models are known, beside the bundled one."""
    from swarmnode.weights.catalog import known_models

    yield from (model.path for model in known_models([places.cache / "models"]))
