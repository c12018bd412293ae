"""`swarmnode backbone`: serve a model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

import click
import trio

from swarmnode.cli.checked import Checked
from swarmnode.cli.common import (
    DEFAULT_API,
    DEFAULT_LISTEN,
    DEFAULT_NETWORK,
    DEFAULT_SWARM_PORT,
    LEAVING,
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
    membership_of,
    network_option,
    parse_host_port,
    place_type,
    say,
    secret_option,
    wrong_usage,
)
from swarmnode.cli.leaving import until_leaving
from swarmnode.cli.logs import log_event, logging_options, set_up_logging
from swarmnode.cli.progress import Pace, Progress
from swarmnode.cli.sizes import ByteSize, format_bytes
from swarmnode.cli.verb import Verb
from swarmnode.config import Config, Drafts, EngineConfig, Repack, Speculate
from swarmnode.counts import counted
from swarmnode.errors import UsageError
from swarmnode.net.address import PeerAddress, is_loopback
from swarmnode.net.invite import join_command, suggested_budget
from swarmnode.net.own_hosts import own_hosts
from swarmnode.node.backbone import run_backbone
from swarmnode.node.backbone_parts import BackboneOptions, routed_bytes
from swarmnode.services.own_record import WILDCARDS
from swarmnode.services.remote_experts import EXACT, WireForm
from swarmnode.services.reports import (
    BackboneEvent,
    Connecting,
    CoverageChanged,
    Hashing,
    Leaving,
    Ready,
    Stopped,
    Waiting,
    WorkerChanged,
)
from swarmnode.weights.catalog import resolve_model


@click.command("backbone", cls=Verb)
@click.option(
    "--model", help="A GGUF file (any part of a split one) or a known name; default: the bundled model."
)
@click.option(
    "--listen",
    type=place_type(DEFAULT_SWARM_PORT),
    default=DEFAULT_LISTEN,
    show_default=True,
    help=f"Where workers dial; 0.0.0.0:{DEFAULT_SWARM_PORT} lets other machines in.",
)
@click.option(
    "--api",
    type=place_type(8790),
    default=DEFAULT_API,
    show_default=True,
    help="Where the HTTP API listens; for other machines, which need a key (`swarmnode key new`): 0.0.0.0:8790.",
)
@click.option(
    "--cors",
    type=Checked("ORIGIN", lambda origin: checked_origins((origin,))),
    multiple=True,
    help="Let web pages of this origin (https://chat.example) use the API; several times. *: all, with a key.",
)
@advertise_option
@allow_option
@bootstrap_option
@click.option(
    "--context", type=click.IntRange(2), default=4096, show_default=True, help="Tokens a conversation holds."
)
@click.option(
    "--slots", type=click.IntRange(1, 64), default=4, show_default=True, help="Conversations at a time."
)
@click.option(
    "--exact", is_flag=True, help="f32 rows, one row back per expert: bit-equal, up to 16 times the bytes."
)
@click.option(
    "--q8", is_flag=True, help="8-bit rows to workers, half of f16's bytes, as good for K-quants on CPUs."
)
@click.option(
    "--deadline-ms", type=click.IntRange(1, 60_000), help="Longest wait for one layer's remote rows."
)
@click.option(
    "--send",
    type=click.Choice(["auto", "always"]),
    default="auto",
    show_default=True,
    help="What workers get: rows that they are expected to finish sooner, or whatever they hold.",
)
@click.option(
    "--local-budget",
    type=ByteSize(),
    help="Memory for routed experts of the model's file: the most wanted ones are kept in it.",
)
@click.option(
    "--speculate",
    type=click.Choice(["auto", "mtp", "ngram", "always", "never"]),
    default="auto",
    show_default=True,
    help="Try out guessed tokens where steps wait for workers, or always, or never. mtp: guesses of the model's MTP "
    "block only; ngram: from the text so far only. Answers are the same.",
)
@click.option(
    "--repack",
    type=click.Choice(get_args(Repack)),
    default="auto",
    show_default=True,
    help="Copy the dense weights into the CPU's favourite order; always: also where an answer's last bits "
    "then depend on who else asks.",
)
@compute_options
@network_option
@secret_option
@lan_option
@home_option
@logging_options
@clear_errors
def command(
    model: str | None,
    listen: str,
    api: str,
    cors: tuple[str, ...],
    advertise: tuple[str, ...],
    allow: Path | None,
    bootstrap: tuple[str, ...],
    context: int,
    slots: int,
    exact: bool,
    q8: bool,
    deadline_ms: int | None,
    send: Literal["auto", "always"],
    local_budget: int | None,
    speculate: str,
    repack: Repack,
    device: str | None,
    threads: int,
    network: str | None,
    secret_file: Path | None,
    lan: bool,
    home: Path | None,
    verbose: int,
    log_json: bool,
) -> None:
    """Serve a model: the dense path, the gate, and every expert that no worker answers for.

    \b
    Example: swarmnode backbone --model model.gguf --listen 0.0.0.0:4790
    """
    set_up_logging(verbose, as_json=log_json)
    folders = folders_of(home)
    with wrong_usage():
        member = membership_of(bootstrap, network, secret_file, folders, lan=lan)
        resolve_model(model, folders.models)
        config = _config_of(threads, deadline_ms, send, local_budget)
        config = replace(
            config,
            engine=_engine_of(config.engine, speculate),
            models=replace(config.models, repack=repack),
            api=replace(config.api, cors=checked_origins(cors)),
        )
        options = BackboneOptions(
            folders=folders,
            network=member.network,
            secret=member.secret,
            bootstrap=member.peers,
            lan=lan,
            listen=parse_host_port(listen, DEFAULT_SWARM_PORT),
            advertise=advertised_of(advertise),
            allowed=allowed_of(allow),
            device=device,
            config=config,
            model=model,
            api=parse_host_port(api, 8790),
            form=_form_of(exact, q8),
            n_ctx=context,
            n_slots=slots,
        )
    private = "" if member.secret is None else " --secret FILE"
    named = "" if member.network == DEFAULT_NETWORK else f" --network {shlex.quote(member.network)}"
    show = _in_log(Pace()) if log_json else _Face(named + private).show
    trio.run(partial(run_backbone, options, until_leaving(show)))
    show(Stopped())


def checked_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """As browsers send them: scheme, host and port, and nothing behind."""
    for origin in origins:
        if origin != "*" and re.fullmatch(r"https?://[^/*\s]+", origin) is None:
            raise UsageError(f"--cors {origin}: write https://HOST or http://HOST:PORT, or * for all pages")
    return origins


def _config_of(
    threads: int, deadline_ms: int | None, send: Literal["auto", "always"], local_budget: int | None
) -> Config:
    config = config_of(threads, deadline_ms)
    return replace(config, dispatch=replace(config.dispatch, send=send, local_budget_bytes=local_budget))


def _engine_of(engine: EngineConfig, speculate: str) -> EngineConfig:
    """One option says when to guess, and from what."""
    if speculate in get_args(Drafts) and speculate not in get_args(Speculate):
        return replace(engine, drafts=cast(Drafts, speculate))
    return replace(engine, speculate=cast(Speculate, speculate))


def _form_of(exact: bool, q8: bool) -> WireForm:
    if exact and q8:
        raise click.UsageError("--exact and --q8 exclude each other")
    if exact:
        return EXACT
    return WireForm(encoding="q8") if q8 else WireForm()


def _in_log(pace: Pace) -> Callable[[BackboneEvent], None]:
    def show(event: BackboneEvent) -> None:
        if not isinstance(event, Hashing) or pace.is_due(event.done_bytes, event.total_bytes):
            log_event(event)

    return show


class _Face:
    """Turns events into lines."""

    def __init__(self, join_options: str) -> None:
        self._join_options = join_options
        self._hashing = Progress("hashing the model")

    def show(self, event: BackboneEvent) -> None:
        match event:
            case Hashing():
                self._hashing.update(event.done_bytes, event.total_bytes)
            case Ready():
                self._hashing.close()
                self._ready(event)
            case WorkerChanged():
                self._worker(event)
            case CoverageChanged():
                say(f"{event.covered} of {event.total} experts covered by workers")
            case Connecting():
                say(f"dialling {event.address}")
            case Waiting():
                say(f"waiting {event.delay_s:.1f} s: {event.reason}")
            case Leaving():
                say(LEAVING)
            case Stopped():
                say("stopped")

    def _worker(self, event: WorkerChanged) -> None:
        reason = f" ({event.reason})" if event.reason else ""
        say(
            f"worker {event.worker} {event.standing}{reason}: {counted(event.n_experts, 'expert')}; "
            f"{event.covered} of {event.total} covered by workers"
        )

    def _ready(self, event: Ready) -> None:
        manifest = event.manifest
        experts = sum(layer.layout.n_expert for layer in manifest.layers.values())
        routed = routed_bytes(manifest)
        say(
            f"model {manifest.name}: {counted(experts, 'expert')}, {format_bytes(routed)}, "
            f"id {manifest.model_id.hex()[:16]}"
        )
        say(f"device {event.device.name} ({event.device.description})")
        say(
            f"{counted(event.n_slots, 'conversation')} of {event.n_ctx} tokens at a time, "
            f"{format_bytes(event.state_bytes // event.n_slots)} each; "
            f"at most {format_bytes(event.checkpoint_bytes)} more to go on from earlier turns"
        )
        for address in event.addresses:
            say(f"swarm {address}")
        say(f"api {event.api_url}")
        budget = suggested_budget(routed)
        for address in dict.fromkeys(map(_dialled_at, event.addresses)):
            beside = is_loopback(address.host)
            line = join_command(budget, str(address), self._join_options, beside=beside)
            say(f"Workers join with: {line}")
        if any(address.host in WILDCARDS for address in event.addresses):
            say(
                "From outside this network they need another address of this machine: see `swarmnode invite`."
            )
        if all(is_loopback(address.host) for address in event.addresses):
            port = event.addresses[0].port
            say(
                f"Only this machine can join, each worker with a --home of its own; for others start with "
                f"--listen 0.0.0.0:{port}."
            )


def _dialled_at(address: PeerAddress) -> PeerAddress:
    """An address that others can dial: where all are listened on, the one of this machine towards the internet."""
    hosts = own_hosts() if address.host in WILDCARDS else []
    return replace(address, host=hosts[0]) if hosts else address
