"""Lists that people write: one entry a line, `#` starts a comment. Peers to dial, nodes that may dial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from swarmnode.errors import UsageError
from swarmnode.identity import NodeId
from swarmnode.state_file import read_small

MAX_LIST_BYTES = 1024 * 1024

T = TypeVar("T")


def read_text(path: Path, what: str) -> str:
    """The text of a list that somebody named, which may be a pipe: `--bootstrap <(pass show list)`.

    Raises UsageError naming `what`, the file and the reason.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from error
    if len(data) > MAX_LIST_BYTES:
        raise UsageError(f"{what} {path} is over 1 MiB")
    return _decoded(data, path, what)


def read_kept(path: Path, what: str) -> str:
    """The text of a list that this node wrote itself. Waits for nothing; raises as `read_text`."""
    try:
        data = read_small(path, MAX_LIST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from error
    return _decoded(data, path, what)


def _decoded(data: bytes, path: Path, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text") from None


def parse_entries(text: str, source: str, parse: Callable[[str], T]) -> list[T]:
    """`parse` of every entry, in order. Raises UsageError naming `source`, the line and what `parse` said."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            found.append(parse(entry))
        except UsageError as error:
            raise UsageError(f"{source}, line {number}: {error}") from None
    return found


def read_allowed(path: Path) -> frozenset[NodeId]:
    """The node ids of a file: who may dial us. Raises UsageError, also for a list that names nobody."""
    what = "the list of allowed nodes"
    allowed = frozenset(parse_entries(read_text(path, what), str(path), NodeId.parse))
    if not allowed:
        raise UsageError(f"{what} {path} names nobody; `swarmnode identity` prints a node's id")
    return allowed
