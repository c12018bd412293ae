"""What verbs share: options, the exit codes, and turning errors into one clear line.

Exit codes: 0 all went well (so ends a backbone or worker that ran until Ctrl-C, SIGTERM or `swarmnode leave`);
1 something failed (the line says what and what to do); 2 wrong usage: the command line, the environment or the settings
file (click's own; `wrong_usage`, cli/checked: an option that does not take any text has a type that looks at it);
130 Ctrl-C ended any other command, or one that did not run yet.
"""

from __future__ import annotations

import functools
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from swarmnode.cli import STOPPED
from swarmnode.cli.checked import Checked, CheckedFile, UserPath, check_device
from swarmnode.config import Config, Folders
from swarmnode.errors import LocalError, MissingExtraError, SwarmError, UsageError, first_error
from swarmnode.identity import NodeId
from swarmnode.net.address import PeerAddress, split_host_port
from swarmnode.net.bootstrap import check_source, find_peers
from swarmnode.net.invite import checked_network
from swarmnode.net.list_file import read_allowed
from swarmnode.net.secret_file import read_secret
from swarmnode.weights.catalog import resolve_model
from swarmnode.wire.secret import NetworkSecret, network_tag

P = ParamSpec("P")
T = TypeVar("T")

LEAVING = "leaving: the others are told, and rows under way are finished (Ctrl-C once more stops at once)"

DEFAULT_NETWORK = "public"
SECRET_VARIABLE = "SWARMNODE_SECRET"
DEFAULT_SWARM_PORT = 4790
DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_SWARM_PORT}"
DEFAULT_API = "127.0.0.1:8790"


def visible(text: str, keep: str = "") -> str:
    """`text` with control characters made visible, except those in `keep`.

    Names and reasons come from files and peers: none of them may move the cursor or look like a line of ours.
    """
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in ("Cc", "Cs")
        else ascii(character)[1:-1]
        for character in text
    )


def say(text: str = "") -> None:
    """Print a line for the person, at once even into a pipe."""
    click.echo(visible(text))
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print a line (or a list) about a problem to standard error."""
    click.echo(visible(text, keep="\n"), err=True)


def home_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--home DIR`: where the key and the slices live (default: the platform's folders)."""
    return click.option(
        "--home",
        type=UserPath(path_type=Path, file_okay=False),
        envvar="SWARMNODE_HOME",
        help="Folder for key and slices; each node on a machine needs its own.",
    )(function)


def network_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--network NAME`: nodes of different networks never talk."""
    return click.option(
        "--network",
        type=Checked("NAME", checked_network),
        show_default=f"{DEFAULT_NETWORK}, or what the link given says",
        help="Name of the network; others are not talked to.",
    )(function)


def secret_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--secret FILE`: a private network."""
    return click.option(
        "--secret",
        "secret_file",
        type=CheckedFile(read_secret),
        metavar="FILE",
        help="The secret of a private network; only nodes that have it can connect. "
        "`swarmnode invite --new-secret FILE` makes one.",
    )(function)


def advertise_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--advertise HOST:PORT`: where others reach this node."""
    return click.option(
        "--advertise",
        type=Checked("HOST:PORT", lambda text: advertised_of([text])),
        multiple=True,
        help="An address at which others reach this node (a forwarded port, say); several times.",
    )(function)


def lan_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--lan`: look for nodes in the local network."""
    return click.option(
        "--lan",
        is_flag=True,
        help="Also find nodes of this network on the LAN, and be found there (needs the extra `lan`).",
    )(function)


def folders_of(home: Path | None) -> Folders:
    """The node's folders under `--home`, or the platform's."""
    return Folders.under(home)


def clear_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Turn SwarmError into one line and exit code 1, Ctrl-C into 130, a closed pipe into silence."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except SwarmError as error:
            complain(f"swarmnode: {error}")
            sys.exit(1)
        except BaseExceptionGroup as group:
            errors = group.split(SwarmError)
            if errors[0] is not None and errors[1] is None:
                complain(f"swarmnode: {first_error(errors[0])}")
                sys.exit(1)
            if group.subgroup(KeyboardInterrupt) is not None:  # what else is in it, Ctrl-C brought about
                sys.exit(STOPPED)
            raise
        except KeyboardInterrupt:
            sys.exit(STOPPED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    return wrapper


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Around what a verb makes of its options before anything runs: a UsageError ends as click's own do, with 2.

    Later ones end with 1: they may be over when a service starts the node again, as a port that is taken may be.
    """
    try:
        yield
    except MissingExtraError:
        raise  # the settings are right; the installation is not
    except UsageError as error:
        raise click.UsageError(str(error)) from error


def model_of(name: str | None, folders: Folders) -> Path:
    """The file of `--model` or MODEL: what no file and no known model is, is wrong usage."""
    with wrong_usage():
        return resolve_model(name, folders.models)


def place_type(default_port: int) -> Checked:
    """The type of an option that says where to listen."""
    return Checked("HOST:PORT", lambda text: parse_host_port(text, default_port))


def parse_host_port(text: str, default_port: int) -> tuple[str, int]:
    """Host and port of "host:port", "host", ":port" or "[v6]:port"; raises click.BadParameter."""
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not port:
        return host or "127.0.0.1", default_port
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        raise click.BadParameter(f"{text!r}: write HOST:PORT, for example 0.0.0.0:{default_port}")
    return host or "127.0.0.1", int(port)


def advertised_of(places: Sequence[str], *, listens: bool = True) -> tuple[tuple[str, int], ...]:
    """The places of `--advertise`, each with its port: others are told them as they are. UsageError."""
    if places and not listens:
        raise UsageError("--advertise says where others reach this node, but with --no-listen nobody can")
    found = []
    for place in places:
        try:
            found.append(split_host_port(place))
        except UsageError as error:
            raise UsageError(
                f"--advertise {place}: {error}; write HOST:PORT, an IPv6 address as [ADDRESS]:PORT"
            ) from None
    return tuple(found)


def bootstrap_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--bootstrap SOURCE`, several times."""
    return click.option(
        "--bootstrap",
        type=Checked("SOURCE", check_source),
        multiple=True,
        help="swarm://NODEID@HOST:PORT or an invitation's link, a file of addresses, the https:// address of such a "
        "list, or dns:NAME; may be given several times.",
    )(function)


def allow_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--allow FILE`: who may dial this node."""
    return click.option(
        "--allow",
        type=CheckedFile(read_allowed),
        metavar="FILE",
        help="Only these nodes may dial this one: an id a line, # comments.",
    )(function)


def compute_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--device NAME` and `--threads N`."""
    function = click.option(
        "--device",
        type=Checked("NAME", check_device),
        help="ggml device; default: the best (see `swarmnode doctor`).",
    )(function)
    return click.option(
        "--threads", type=click.IntRange(0, 512), default=0, show_default="all cores", help="CPU threads."
    )(function)


def max_rows_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--max-rows N`: the widest batch to test and to compute."""
    return click.option(
        "--max-rows",
        type=click.IntRange(1),
        metavar="N",
        help="Widest batch to test and use; for drivers that take minutes to compile their kernels.",
    )(function)


@dataclass(frozen=True)
class Membership:
    """Which network a node is in, and whom it dials first."""

    peers: tuple[PeerAddress, ...]
    network: str
    secret: NetworkSecret | None


def membership_of(
    bootstrap: Sequence[str], network: str | None, secret_file: Path | None, folders: Folders, *, lan: bool
) -> Membership:
    """What was given on the command line, in the environment, in the settings folder or in a link, put together.

    The peers of --bootstrap, else SWARMNODE_BOOTSTRAP, else the settings folder's peers.txt; the secret of --secret,
    else a link's, else SWARMNODE_SECRET, else the settings folder's network.secret. UsageError if a link and an option
    disagree; LocalError if no list could be fetched and there is nobody else to meet: met earlier, or on the LAN.
    """
    found = find_peers(bootstrap, os.environ, folders.settings / "peers.txt", cache=folders.cache)
    for warning in found.warnings:
        complain(f"warning: {warning}")
    if network is not None and found.network not in (None, network):
        raise UsageError(f"--network {network} was given, but the link is for the network {found.network}")
    secret = found.secret
    if secret_file is not None:
        secret = read_secret(secret_file)
        if found.secret not in (None, secret):
            raise UsageError(f"the link carries another secret than the one in {secret_file}")
    if secret is None:
        secret = default_secret(folders)
    name = checked_network(network or found.network or DEFAULT_NETWORK)
    if found.failure:
        has_others = lan or folders.address_book(network_tag(name, secret)).exists()
        if not has_others:
            raise LocalError(  # no fault of the settings: the next try may fetch it
                f"{found.failure}; try again, or name a node: --bootstrap swarm://NODEID@HOST:PORT"
            )
        complain(f"warning: {found.failure}; going on with {'the LAN and ' if lan else ''}nodes met earlier")
    return Membership(found.peers, name, secret)


def default_secret(folders: Folders) -> NetworkSecret | None:
    """The secret in SWARMNODE_SECRET, or in the settings folder; None for a public network."""
    if text := os.environ.get(SECRET_VARIABLE, "").strip():
        try:
            return NetworkSecret.parse(text)
        except UsageError as error:
            raise UsageError(f"{SECRET_VARIABLE}: {error}") from None
    return read_secret(folders.secret_file) if folders.secret_file.exists() else None


def allowed_of(path: Path | None) -> frozenset[NodeId] | None:
    """The nodes of `--allow`, None without it."""
    return None if path is None else read_allowed(path)


def config_of(threads: int, deadline_ms: int | None, max_rows: int | None = None) -> Config:
    """The defaults with what was given on the command line."""
    config = Config()
    compute = replace(config.compute, n_threads=threads)
    if max_rows is not None:
        compute = replace(compute, max_rows=max_rows)
    dispatch = config.dispatch
    if deadline_ms is not None:
        dispatch = replace(dispatch, deadline_s=deadline_ms / 1e3)
    return replace(config, compute=compute, dispatch=dispatch)
