"""`swarmnode join`: lend memory and compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import get_args

import click
import trio

from swarmnode.cli.checked import Checked
from swarmnode.cli.common import (
    DEFAULT_SWARM_PORT,
    advertise_option,
    advertised_of,
    allow_option,
    allowed_of,
    bootstrap_option,
    clear_errors,
    compute_options,
    config_of,
    folders_of,
    home_option,
    lan_option,
    max_rows_option,
    membership_of,
    network_option,
    parse_host_port,
    place_type,
    secret_option,
    wrong_usage,
)
from swarmnode.cli.join_face import JoinFace
from swarmnode.cli.leaving import until_leaving
from swarmnode.cli.logs import logging_options, set_up_logging
from swarmnode.cli.memory import return_freed_memory
from swarmnode.cli.priority import give_way
from swarmnode.cli.sizes import ByteSize
from swarmnode.cli.verb import Verb
from swarmnode.errors import UsageError
from swarmnode.node.worker import WorkerOptions, run_worker
from swarmnode.schedule.restraint import Hours, OnBattery
from swarmnode.services.reports import Stopped
from swarmnode.wire.secret import network_tag


@click.command("join", cls=Verb)
@click.option("--budget", type=ByteSize(), required=True, help="Most memory for experts: 300MB, 1.5GiB ...")
@bootstrap_option
@click.option(
    "--listen",
    type=place_type(DEFAULT_SWARM_PORT),
    default="0.0.0.0:0",
    show_default=True,
    help="Where other nodes may dial this one, HOST:PORT; port 0: the last run's, or a free one.",
)
@click.option("--no-listen", is_flag=True, help="Dial only: other nodes cannot fetch slices from this one.")
@advertise_option
@allow_option
@compute_options
@max_rows_option
@click.option(
    "--hours",
    type=Checked("A-B", Hours.parse),
    multiple=True,
    help="Lend at these hours only, local time: 22:00-07:00; several times.",
)
@click.option(
    "--on-battery",
    type=click.Choice(get_args(OnBattery)),
    default="pause",
    show_default=True,
    help="What to do while the machine runs on battery.",
)
@click.option(
    "--keep-free",
    type=ByteSize(),
    show_default="5 % of it, 256 MiB at least",
    help="Memory that must stay available; experts are given up for it.",
)
@network_option
@secret_option
@lan_option
@home_option
@logging_options
@clear_errors
def command(
    budget: int,
    bootstrap: tuple[str, ...],
    listen: str,
    no_listen: bool,
    advertise: tuple[str, ...],
    allow: Path | None,
    device: str | None,
    threads: int,
    max_rows: int | None,
    hours: tuple[str, ...],
    on_battery: OnBattery,
    keep_free: int | None,
    network: str | None,
    secret_file: Path | None,
    lan: bool,
    home: Path | None,
    verbose: int,
    log_json: bool,
) -> None:
    """Hold the scarcest experts that fit the budget, and compute them for a backbone.

    \b
    Example: swarmnode join --budget 300MB \\
               --bootstrap swarm://NODEID@192.168.1.5:4790
    """
    return_freed_memory()
    give_way()
    set_up_logging(verbose, as_json=log_json)
    folders = folders_of(home)
    with wrong_usage():
        member = membership_of(bootstrap, network, secret_file, folders, lan=lan)
        remembered = folders.address_book(network_tag(member.network, member.secret))
        if not (member.peers or lan or remembered.exists() or listen != "0.0.0.0:0"):
            raise UsageError(
                "no peer is known: give --bootstrap swarm://NODEID@HOST:PORT (a backbone prints its address), "
                f"set SWARMNODE_BOOTSTRAP, write a list into {folders.settings / 'peers.txt'}, "
                "or look around with --lan"
            )
        if allow is not None and no_listen:
            raise UsageError("--allow says who may dial this node, but with --no-listen nobody can")
        options = WorkerOptions(
            folders=folders,
            network=member.network,
            secret=member.secret,
            bootstrap=member.peers,
            lan=lan,
            listen=None if no_listen else parse_host_port(listen, DEFAULT_SWARM_PORT),
            advertise=advertised_of(advertise, listens=not no_listen),
            allowed=allowed_of(allow),
            device=device,
            config=config_of(threads, None, max_rows),
            budget_bytes=budget,
            hours=tuple(Hours.parse(text) for text in hours),
            on_battery=on_battery,
            keep_free_bytes=keep_free,
        )
    face = JoinFace(as_json=log_json)
    try:
        trio.run(partial(run_worker, options, until_leaving(face.show)))
    finally:
        face.close()
    face.show(Stopped())
