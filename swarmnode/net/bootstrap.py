"""Where a node finds the nodes to dial first. bootstrap/README.md describes the sources and the format of lists.

Looked for in this order, and the first that is given is used alone:
1. `--bootstrap`, any number of times: an address or link, a file of addresses, the URL of such a list, or dns:NAME
2. the variable SWARMNODE_BOOTSTRAP: the same, separated by spaces or commas
3. `peers.txt` in the user's configuration folder of swarmnode, if it is there
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from swarmnode.config import BootstrapConfig
from swarmnode.errors import UsageError
from swarmnode.net.address import SCHEME, PeerAddress
from swarmnode.net.invite import Invite
from swarmnode.net.list_file import parse_entries, read_text
from swarmnode.net.remote_list import Fetch, RemoteList, fetch_lists, is_remote
from swarmnode.wire.secret import NetworkSecret

ENVIRONMENT_VARIABLE = "SWARMNODE_BOOTSTRAP"

T = TypeVar("T")


@dataclass(frozen=True)
class Bootstrap:
    """What all sources together say."""

    peers: tuple[PeerAddress, ...] = ()
    """The nodes to dial, in order, each address once."""
    network: str | None = None
    """The network that a link names."""
    secret: NetworkSecret | None = None
    """The secret that a link carries."""
    warnings: tuple[str, ...] = ()
    """Sources that did not work, while others did."""
    failure: str = ""
    """Why there are no peers, though lists were named: none could be fetched; "" in all other cases."""


def find_peers(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    default_list: Path,
    *,
    cache: Path,
    config: BootstrapConfig | None = None,
    fetch: Fetch | None = None,
) -> Bootstrap:
    """The nodes to dial. Raises UsageError naming the source, the line and the reason.

    A mistake in an argument or in a file on this machine is an error; a list elsewhere that cannot be fetched, and of
    which `cache` has no copy, is a warning, and the `failure` if there is nobody else to dial. Blocks
    for as long as `config` says.
    """
    items, name = list(arguments), "--bootstrap"
    if not items:
        items = sources_of(environment.get(ENVIRONMENT_VARIABLE, ""))
        name = ENVIRONMENT_VARIABLE
    if not items:
        return Bootstrap(read_list(default_list)) if default_list.exists() else Bootstrap()
    remote = [item.strip() for item in items if is_remote(item.strip())]
    lists = fetch_lists(remote, cache, BootstrapConfig() if config is None else config, fetch)
    by_source = {found.source: found for found in lists}
    invites = [_invite(item, name, by_source) for item in items]
    return _together(invites, lists)


def sources_of(text: str) -> list[str]:
    """The sources that SWARMNODE_BOOTSTRAP names."""
    return [item for item in re.split(r"[,\s]+", text) if item]


def check_source(text: str) -> None:
    """UsageError for a `--bootstrap` that cannot be right. Nothing is fetched, nobody dialled."""
    if not is_remote(text.strip()):
        _invite(text, "--bootstrap", {})


def is_file_name(source: str) -> bool:
    """True of a source that can only be a file, there or not."""
    return not is_remote(source.strip()) and not source.strip().startswith(SCHEME)


def read_list(path: Path) -> tuple[PeerAddress, ...]:
    """The addresses of a list file. Raises UsageError naming the file, the line and the reason."""
    return parse_list(read_text(path, "the bootstrap list"), str(path))


def parse_list(text: str, source: str) -> tuple[PeerAddress, ...]:
    """The addresses of a list, each once; `#` starts a comment. Raises UsageError naming `source`, line and reason."""
    return _unique(parse_entries(text, source, PeerAddress.parse))


def _invite(item: str, name: str, lists: Mapping[str, RemoteList]) -> Invite:
    """What one item gives."""
    item = item.strip()
    if item in lists:
        return Invite(lists[item].peers)
    if not item.startswith(SCHEME):
        if not _is_file(item):
            raise UsageError(
                f"{name}: {item!r} is neither an address ({SCHEME}NODEID@host:port) nor a file, "
                "nor does it begin with https:// or dns:"
            )
        return Invite(read_list(_path(item)))
    try:
        return Invite.parse(item)
    except UsageError as error:
        raise UsageError(f"{name} {item.partition('?')[0]!r}: {error}") from None


def _is_file(name: str) -> bool:
    try:
        return _path(name).is_file()
    except OSError:  # too long for a file's name, say
        return False


def _path(name: str) -> Path:
    """With the user's folder for a `~`, which shells leave in `--bootstrap=~/peers.txt` and in lists of a variable."""
    return Path(os.path.expanduser(name))


def _together(invites: Sequence[Invite], lists: Sequence[RemoteList]) -> Bootstrap:
    peers = _unique([peer for invite in invites for peer in invite.addresses])
    problems = tuple(f"{found.source}: {found.problem}" for found in lists if found.problem)
    if not peers and not all(found.is_usable for found in lists):
        return Bootstrap(failure="no bootstrap list could be fetched: " + "; ".join(problems))
    network = _only((invite.network for invite in invites), "networks")
    secret = _only((invite.secret for invite in invites), "network secrets")
    return Bootstrap(peers, network, secret, problems)


def _only(values: Iterable[T | None], what: str) -> T | None:
    known = {value for value in values if value is not None}
    if len(known) > 1:
        raise UsageError(f"the links given are for different {what}; a node is in one network")
    return next(iter(known), None)


def _unique(peers: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    return tuple(dict.fromkeys(peers))
