"""The port of a node's last run, in its data folder: the next run takes it again, and invitations name it.

Beside it, in files of their own that older versions do not look for, the host that was listened on, and the budget
that a backbone's last run named for workers of its model.
"""

from __future__ import annotations

import re
from pathlib import Path

from swarmnode.state_file import read_small, replace_small

MIN_PORT, MAX_PORT = 1024, 65_535
"""A system that is asked for any port gives none below."""
MAX_PORT_FILE_BYTES = 16
MAX_HOST_FILE_BYTES = 256


def read_port(path: Path) -> int | None:
    """The port in the file, None if there is none: whatever is wrong with it, another port does as well."""
    try:
        text = read_small(path, MAX_PORT_FILE_BYTES).strip()
    except OSError:
        return None
    port = int(text) if text.isdigit() else 0
    return port if MIN_PORT <= port <= MAX_PORT else None


def write_port(path: Path, port: int) -> None:
    """Raises OSError."""
    replace_small(path, b"%d\n" % port)


def read_host(port_file: Path) -> str | None:
    """The host that the last run listened on, None if that is not known."""
    try:
        return read_small(_host_file(port_file), MAX_HOST_FILE_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def write_host(port_file: Path, host: str) -> None:
    """Raises OSError."""
    replace_small(_host_file(port_file), f"{host}\n".encode())


def _host_file(port_file: Path) -> Path:
    return port_file.with_name(port_file.name + ".host")


def read_budget(port_file: Path) -> str | None:
    """The budget ("3MB") that the last backbone of this node named for workers, None if there was none."""
    try:
        text = read_small(_budget_file(port_file), MAX_PORT_FILE_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if re.fullmatch(r"[0-9]+MB", text) else None


def write_budget(port_file: Path, budget: str) -> None:
    """Raises OSError."""
    replace_small(_budget_file(port_file), f"{budget}\n".encode())


def _budget_file(port_file: Path) -> Path:
    return port_file.with_name(port_file.name + ".budget")
