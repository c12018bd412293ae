"""`swarmnode join`: lend memory and compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import trio

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
    say,
    secret_option,
)
from swarmnode.cli.logs import log_event, logging_options, set_up_logging
from swarmnode.cli.memory import return_freed_memory, trim_heap
from swarmnode.cli.progress import Progress
from swarmnode.cli.sizes import ByteSize, format_bytes
from swarmnode.cli.verb import Verb
from swarmnode.errors import UsageError
from swarmnode.node.worker import WorkerOptions, run_worker
from swarmnode.services.reports import (
    Connecting,
    Fetched,
    JoinEvent,
    Listening,
    Planned,
    Serving,
    Settled,
    Started,
    Stopped,
    Tested,
    Waiting,
)
from swarmnode.wire.secret import network_tag

_DOWNLOAD = "downloading experts"


@click.command("join", cls=Verb)
@click.option("--budget", type=ByteSize(), required=True, help="Most memory for experts: 300MB, 1.5GiB ...")
@bootstrap_option
@click.option(
    "--listen",
    default="0.0.0.0:0",
    show_default=True,
    help="Where other nodes may dial this one, HOST:PORT; port 0: the last run's, or a free one.",
)
@click.option("--no-listen", is_flag=True, help="Dial only: other nodes cannot fetch slices from this one.")
@advertise_option
@allow_option
@compute_options
@max_rows_option
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
    set_up_logging(verbose, as_json=log_json)
    folders = folders_of(home)
    member = membership_of(bootstrap, network, secret_file, folders, lan=lan)
    remembered = folders.address_book(network_tag(member.network, member.secret))
    if not (member.peers or lan or remembered.exists() or listen != "0.0.0.0:0"):
        raise UsageError(
            "no peer is known: give --bootstrap swarm://NODEID@HOST:PORT (a backbone prints its address), "
            f"set SWARMNODE_BOOTSTRAP, write a list into {folders.settings / 'peers.txt'}, or look around with --lan"
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
    )
    face = _Face(as_json=log_json)
    try:
        trio.run(partial(run_worker, options, face.show))
    finally:
        face.close()
    face.show(Stopped())


class _Face:
    """Turns events into lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._download = Progress(_DOWNLOAD)

    def close(self) -> None:
        """Leave the terminal as it should be, whatever ended the command."""
        self._download.close()

    def show(self, event: JoinEvent) -> None:
        if isinstance(event, Serving):
            trim_heap()
        if self._as_json:
            log_event(event)
        else:
            self._show(event)

    def _show(self, event: JoinEvent) -> None:
        match event:
            case Started():
                say(f"this node is {event.node}")
            case Connecting():
                say(f"dialling {event.address}")
            case Waiting():
                self._download.close()
                say(f"waiting {event.delay_s:.1f} s: {event.reason}")
            case Listening():
                for address in event.addresses:
                    say(f"listening {address}")
            case Stopped():
                say("stopped")
            case _:
                self._show_experts(event)

    def _show_experts(self, event: JoinEvent) -> None:
        match event:
            case Planned():
                self._download.close()
                self._download = Progress(_DOWNLOAD)  # each try counts from its own beginning
                say(
                    f"downloading {event.new_experts} experts of {event.model_name} "
                    f"({format_bytes(event.fetch_bytes)}) beside {event.kept_experts} held"
                )
            case Fetched():
                self._download.update(event.done_bytes, event.total_bytes)
            case Tested():
                self._download.close()
                self._tested(event)
            case Serving():
                say(
                    f"serving {event.backbone}: {event.n_experts} experts, {format_bytes(event.held_bytes)}, "
                    f"up to {event.max_rows} rows at once on {event.device}"
                )
            case Settled():
                self._download.close()
                say(
                    f"full: {event.n_experts} experts of {event.model_name}, {format_bytes(event.held_bytes)}"
                )

    def _tested(self, event: Tested) -> None:
        worst = min(event.report.results, key=lambda result: result.min_cosine)
        say(
            f"self-test: {len(event.report.results)} checks, lowest cosine {worst.min_cosine:.6f} "
            f"({worst.weights}, width {worst.width}, against {worst.reference})"
        )
