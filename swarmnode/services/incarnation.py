"""The number that a node's records begin with: higher at every start, and on disk before it is used.

Without it a restarted node's first record would be older than its last one, and nobody would take it.
"""

from __future__ import annotations

from pathlib import Path

from swarmnode.errors import StoreError
from swarmnode.gossip.records import MAX_INCARNATION
from swarmnode.state_file import read_small, replace_small

_MAX_FILE_BYTES = 32


def next_incarnation(path: Path, wall_s: float) -> int:
    """max(the stored one + 1, unix time in ms), stored. Blocks.

    A file that cannot be read as a number counts as lost: unix time then decides, and a node that meets a record of its
    own key above that jumps over it. StoreError if it cannot be written.
    """
    by_clock = min(max(0, int(wall_s * 1000)), MAX_INCARNATION // 2)
    incarnation = max(_stored(path) + 1, by_clock)
    store_incarnation(path, incarnation)
    return incarnation


def store_incarnation(path: Path, incarnation: int) -> None:
    """Write it, whole or not at all. Blocks. StoreError if that cannot be."""
    try:
        replace_small(path, b"%d\n" % incarnation)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; choose another: --home DIR") from error


def _stored(path: Path) -> int:
    try:
        text = read_small(path, _MAX_FILE_BYTES).strip()
    except OSError:
        return 0
    if not text.isdigit():
        return 0
    number = int(text)
    return number if number < MAX_INCARNATION else 0
