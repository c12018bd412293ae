"""`swarmnode doctor`: what this machine can do, and what is wrong with it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click

from swarmnode.cli import doctor_machine
from swarmnode.cli.checked import Checked
from swarmnode.cli.checked import check_device as check_device_name
from swarmnode.cli.common import (
    DEFAULT_API,
    DEFAULT_LISTEN,
    DEFAULT_SWARM_PORT,
    bootstrap_option,
    clear_errors,
    folders_of,
    home_option,
    max_rows_option,
    membership_of,
    network_option,
    parse_host_port,
    place_type,
    say,
    secret_option,
)
from swarmnode.cli.doctor_machine import Finding
from swarmnode.cli.doctor_peers import peers
from swarmnode.cli.sizes import format_bytes
from swarmnode.cli.verb import Verb
from swarmnode.compute import library
from swarmnode.compute.devices import DeviceInfo, build_report, list_devices, open_device
from swarmnode.compute.self_test import SelfTestReport, check_device
from swarmnode.config import Folders
from swarmnode.counts import counted
from swarmnode.errors import SwarmError
from swarmnode.services.machine import read_machine
from swarmnode.weights.catalog import bundled_model, resolve_model
from swarmnode.weights.index import ModelIndex
from swarmnode.wire.secret import network_tag


@click.command("doctor", cls=Verb)
@click.option(
    "--device",
    type=Checked("NAME", check_device_name),
    help="Test this ggml device only; default: all that are found.",
)
@max_rows_option
@click.option("--model", help="Look this GGUF through, too: a file or a known name.")
@click.option(
    "--listen",
    type=place_type(DEFAULT_SWARM_PORT),
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Is this place free for nodes?",
)
@click.option(
    "--api",
    type=place_type(8790),
    default=DEFAULT_API,
    show_default=True,
    help="Is this place free for the API?",
)
@bootstrap_option
@network_option
@secret_option
@home_option
@clear_errors
def command(
    device: str | None,
    max_rows: int | None,
    model: str | None,
    listen: str,
    api: str,
    bootstrap: tuple[str, ...],
    network: str | None,
    secret_file: Path | None,
    home: Path | None,
) -> None:
    """Check this machine, and whether the peers named can be reached; each line says what to do.

    Exit code 1 if something would keep swarmnode from working (`fail`).

    \b
    Example: swarmnode doctor --bootstrap swarm://NODEID@host:4790
    """
    folders = folders_of(home)
    is_running, told = doctor_machine.running(folders)
    swarm, web = parse_host_port(listen, DEFAULT_SWARM_PORT), parse_host_port(api, 8790)
    checks: list[Callable[[], Iterable[Finding]]] = [
        _python,
        _ggml,
        lambda: _devices(device, max_rows),
        lambda: doctor_machine.memory(read_machine()),
        lambda: doctor_machine.folders(folders),
        doctor_machine.clock,
        lambda: told,
        partial(doctor_machine.port, "swarm", swarm, "--listen", is_running=is_running),
        partial(doctor_machine.port, "api", web, "--api", is_running=is_running),
        lambda: _peers(bootstrap, network, secret_file, folders),
        _relay,
        lambda: _models(model, folders),
    ]
    sys.exit(1 if _run(checks) else 0)


def _run(checks: list[Callable[[], Iterable[Finding]]]) -> bool:
    """Print what is found; whether anything failed."""
    failed = False
    for check in checks:
        try:
            for level, text in check():
                failed |= level == "fail"
                say(f"{level:<5} {text}")
        except SwarmError as error:
            failed = True
            say(
                f"fail  {' '.join(str(error).split())}"
            )  # one line each, also of what lists models below each other
    return failed


def _peers(
    bootstrap: tuple[str, ...], network: str | None, secret_file: Path | None, folders: Folders
) -> Iterator[Finding]:
    member = membership_of(bootstrap, network, secret_file, folders, lan=False)
    knows_others = folders.address_book(network_tag(member.network, member.secret)).exists()
    yield from peers(member, knows_others=knows_others)


def _relay() -> Iterator[Finding]:
    yield (
        "ok",
        "relay: this version has none; at least one of two nodes must be reachable (docs/operations.md)",
    )


def _python() -> Iterator[Finding]:
    """Older ones than `requires-python` get no installation."""
    yield "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"


def _ggml() -> Iterator[Finding]:
    report = build_report()
    yield "ok", f"ggml {report.ggml_version}; CPU features: {', '.join(report.cpu_features) or 'none'}"
    used = library.chosen()
    yield "ok", f"libggml {'of ' if used.origin != 'built in' else ''}{used.origin}: {used.folder}"
    for problem in filter(None, (used.inexact, used.passed_over)):
        yield "warn", problem
    if report.openmp:
        yield (
            "warn",
            "ggml was built with OpenMP: right, but slow beside other programs; `make setup` builds it without",
        )
    else:
        yield "ok", "ggml was built without OpenMP"
    if report.llamafile:
        yield "ok", "ggml was built with llamafile's kernels"
    else:
        yield (
            "warn",
            "ggml lacks llamafile's kernels: slower prefill, last bits differ from llama.cpp; see `make setup`",
        )


def _devices(wanted: str | None, max_rows: int | None) -> Iterator[Finding]:
    found = list_devices()
    for info in found:
        memory = f", {format_bytes(info.memory_total_bytes)}" if info.memory_total_bytes else ""
        yield "ok", f"device {info.name}: {info.description} ({info.kind}{memory})"
    yield from _why_no_gpu(found)
    for name in [wanted] if wanted else [info.name for info in found if info.kind != "accel"]:
        device = open_device(name)
        try:
            yield from _self_test(check_device(device, max_rows=max_rows))
        finally:
            device.close()


def _why_no_gpu(found: Sequence[DeviceInfo]) -> Iterator[Finding]:
    if any(info.kind != "cpu" for info in found):
        return
    backends = build_report().backends
    if backends == ("CPU",):
        yield (
            "ok",
            "no GPU is used: this ggml was built for the CPU only (docs/testing.md says how to build more)",
        )
        return
    yield (
        "warn",
        f"no GPU is used: this ggml was built for {', '.join(backends)}, but finds only the CPU here",
    )
    if "Vulkan" in backends and "GGML_VK_VISIBLE_DEVICES" not in os.environ:
        yield "ok", "a Vulkan driver that runs on the CPU is passed over; GGML_VK_VISIBLE_DEVICES=0 takes it"


def _self_test(report: SelfTestReport) -> Iterator[Finding]:
    for weights in sorted({result.weights for result in report.results}):
        results = [result for result in report.results if result.weights == weights]
        for result in results:
            if not result.passed:
                yield (
                    "warn",
                    f"{report.device}: {weights} at width {result.width}: cosine {result.min_cosine:.6f} "
                    f"< {result.threshold} ({result.reference}); batches are cut below that width",
                )
        truth = [result for result in results if result.reference == "float64"]
        worst = min(truth, key=lambda result: result.min_cosine)
        yield (
            "ok" if report.widest_good else "fail",
            f"{report.device}: {weights} experts against float64: lowest cosine {worst.min_cosine:.6f} at width "
            f"{worst.width}, max|d| {max(result.max_abs_diff for result in truth):.1e}",
        )


def _models(named: str | None, folders: Folders) -> Iterator[Finding]:
    """Opening a file checks its header, the place and size of every tensor, and that it is a model we know."""
    paths = [bundled_model(), *doctor_machine.models(folders)]
    if named is not None:
        paths.append(resolve_model(named, folders.models))
    for path in dict.fromkeys(paths):
        try:
            with ModelIndex.open(path) as index:
                layers, experts = len(index.expert_layers), index.n_expert
        except SwarmError as error:
            level = "fail" if named is not None and path == paths[-1] else "warn"
            yield level, f"model: {error}; get the file again, or `swarmnode models remove` it"
            continue
        yield (
            "ok",
            f"model {path.name}: {counted(layers, 'layer')} of {counted(experts, 'expert')}; "
            "header, tensors and sizes are sound",
        )
