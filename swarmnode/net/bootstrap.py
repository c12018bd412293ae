"""Lists of nodes to dial first: one `swarm://NODEID@host:port` a line. bootstrap/README.md describes the format.

Looked for in this order, and the first that is given is used alone:
1. `--bootstrap`, any number of times: an address, or a file of addresses
2. the variable SWARMNODE_BOOTSTRAP: the same, separated by spaces or commas
3. `peers.txt` in the user's configuration folder of swarmnode, if it is there
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.net.address import SCHEME, PeerAddress
from swarmnode.net.list_file import parse_entries, read_text

ENVIRONMENT_VARIABLE = "SWARMNODE_BOOTSTRAP"


def find_peers(
    arguments: Sequence[str], environment: Mapping[str, str], default_list: Path
) -> tuple[PeerAddress, ...]:
    """The nodes to dial, in order, each once. Raises UsageError naming the source, the line and the reason."""
    if arguments:
        return _unique([peer for item in arguments for peer in _from_item(item, "--bootstrap")])
    items = [item for item in re.split(r"[,\s]+", environment.get(ENVIRONMENT_VARIABLE, "")) if item]
    if items:
        return _unique([peer for item in items for peer in _from_item(item, ENVIRONMENT_VARIABLE)])
    if default_list.exists():
        return read_list(default_list)
    return ()


def read_list(path: Path) -> tuple[PeerAddress, ...]:
    """The addresses of a list file. Raises UsageError naming the file, the line and the reason."""
    return parse_list(read_text(path, "the bootstrap list"), str(path))


def parse_list(text: str, source: str) -> tuple[PeerAddress, ...]:
    """The addresses of a list, each once; `#` starts a comment. Raises UsageError naming `source`, line and reason."""
    return _unique(parse_entries(text, source, PeerAddress.parse))


def _from_item(item: str, source: str) -> tuple[PeerAddress, ...]:
    """An address, or a file of them."""
    if not item.startswith(SCHEME):
        if not Path(item).is_file():
            raise UsageError(
                f"{source}: {item!r} is neither an address ({SCHEME}NODEID@host:port) nor a file"
            )
        return read_list(Path(item))
    try:
        return (PeerAddress.parse(item),)
    except UsageError as error:
        raise UsageError(f"{source} {item!r}: {error}") from None


def _unique(peers: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    return tuple(dict.fromkeys(peers))
