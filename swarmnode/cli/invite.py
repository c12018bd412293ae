"""`swarmnode invite`: bring another machine in, by a link and a QR code."""

from __future__ import annotations

import io
from pathlib import Path

import click

from swarmnode.cli.checked import Checked, UserPath
from swarmnode.cli.common import (
    DEFAULT_NETWORK,
    DEFAULT_SWARM_PORT,
    clear_errors,
    default_secret,
    folders_of,
    home_option,
    network_option,
    say,
    secret_option,
    wrong_usage,
)
from swarmnode.cli.sizes import check_size
from swarmnode.cli.verb import Verb
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress, is_loopback, is_private, split_host_port
from swarmnode.net.invite import MAX_PLACES, Invite, checked_network, join_command
from swarmnode.net.own_hosts import answering, own_hosts
from swarmnode.net.port_file import read_budget, read_host, read_port
from swarmnode.net.secret_file import create_secret, read_secret
from swarmnode.services.own_record import WILDCARDS
from swarmnode.wire.secret import NetworkSecret


@click.command("invite", cls=Verb)
@click.option(
    "--at",
    multiple=True,
    type=Checked("HOST[:PORT]", lambda text: place_of(text, DEFAULT_SWARM_PORT)),
    help=f"Where this node can be dialled; several times. Default: the addresses of this machine; without a port "
    f"the one of the node's last run, or {DEFAULT_SWARM_PORT}.",
)
@network_option
@secret_option
@click.option("--with-secret", is_flag=True, help="Put the network's secret into the link.")
@click.option(
    "--new-secret",
    type=UserPath(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Make the secret of a new private network, write it to FILE, and stop.",
)
@click.option("--qr/--no-qr", default=True, show_default=True, help="Draw the link as a QR code.")
@click.option(
    "--budget",
    type=Checked("SIZE", check_size),
    metavar="SIZE",
    help="Budget in the printed command; default: what the last backbone here named, or 300MB.",
)
@home_option
@clear_errors
def command(
    at: tuple[str, ...],
    network: str | None,
    secret_file: Path | None,
    with_secret: bool,
    new_secret: Path | None,
    qr: bool,
    budget: str | None,
    home: Path | None,
) -> None:
    """Print a link to this node, as one line to run on another machine and as a QR code.

    \b
    Example: swarmnode invite --at backbone.example.org:4790
    """
    if new_secret is not None:
        _make_secret(new_secret)
        return
    folders = folders_of(home)
    with wrong_usage():
        secret = default_secret(folders) if secret_file is None else read_secret(secret_file)
    if with_secret and secret is None:
        raise click.UsageError("there is no network secret to put into the link: give --secret FILE")
    node_id = NodeKey.load_or_create(folders.key_file).node_id
    port = read_port(folders.port_file) or DEFAULT_SWARM_PORT
    listened = read_host(folders.port_file)
    places = [place_of(text, port) for text in at] or [(host, port) for host in _hosts(listened)]
    if not places:
        raise UsageError("this machine has no address that others could dial; give --at HOST:PORT")
    addresses = tuple(PeerAddress(node_id, host, port) for host, port in places)
    invite = Invite(addresses, checked_network(network or DEFAULT_NETWORK), secret if with_secret else None)
    if len(at) > MAX_PLACES:
        raise click.UsageError(
            f"a link has room for {MAX_PLACES} places, not {len(at)}: give --at less often"
        )
    Invite.parse(str(invite))  # no link is shown that others could not read
    _show(invite, secret, budget or read_budget(folders.port_file) or "300MB", with_qr=qr)
    say(_needs(listened, port))


def _make_secret(path: Path) -> None:
    create_secret(path)
    say(f"a new network secret is in {path}")
    say("Copy the file to every node of the network over a channel you trust, and start each with:")
    say(f"  --secret {path}")


def _show(invite: Invite, secret: NetworkSecret | None, budget: str, *, with_qr: bool) -> None:
    link = str(invite)
    say(link)
    if with_qr:
        say()
        click.echo(qr_code(link))
    beside = all(is_loopback(address.host) for address in invite.addresses)
    if beside:
        say("On this machine, each worker with a --home of its own:")
    else:
        say("On the other machine (docs/operations.md: Linux, macOS, Windows, Termux):")
    hidden = secret is not None and invite.secret is None
    option = " --secret FILE" if hidden else ""
    line = join_command(budget, f'"{link}"', option, beside=beside)
    say(f"  {line}")
    if invite.secret is not None:
        say(
            "This link CARRIES THE NETWORK'S SECRET: whoever sees it can join, and it stays in the shell's history."
        )
    elif hidden:
        say("The link does not carry the network's secret: copy its file there and give its name (FILE).")
    if all(is_private(address.host) and not is_loopback(address.host) for address in invite.addresses):
        say(
            "These addresses work inside your own network only; for others give --at NAME:PORT and open the port."
        )


def _hosts(listened: str | None) -> list[str]:
    """Where a node answers that listens there; None: nobody knows yet where."""
    if listened and listened not in WILDCARDS:
        return [listened]
    return answering(listened or "0.0.0.0", own_hosts())


def _needs(listened: str | None, port: int) -> str:
    """What is left to do on this machine."""
    if listened is None:
        return f"This node must be running and listen for others: --listen 0.0.0.0:{port}"
    if is_loopback(listened):
        return f"WARNING: its last run listened for this machine only; start it with --listen 0.0.0.0:{port}"
    return f"This node must be running; it listens for others at port {port}."


def qr_code(link: str) -> str:
    """A QR code of half blocks, dark on the terminal's light colour and readable the other way round, too."""
    import segno

    text = io.StringIO()
    segno.make(link, error="l", micro=False).terminal(text, compact=True)
    return text.getvalue()


def place_of(text: str, port: int) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPv6]:PORT; `port` if none is said."""
    has_port = text.endswith("]") is False and (text.startswith("[") or text.count(":") == 1)
    if ":" in text and not has_port and not text.startswith("["):
        text = f"[{text}]"
    return split_host_port(text if has_port else f"{text}:{port}")
