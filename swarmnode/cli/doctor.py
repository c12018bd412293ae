"""`swarmnode doctor`: what this machine can do, and what is wrong with it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, folders_of, home_option, max_rows_option, say
from swarmnode.cli.sizes import format_bytes
from swarmnode.cli.verb import Verb
from swarmnode.compute import library
from swarmnode.compute.devices import DeviceInfo, build_report, list_devices, open_device
from swarmnode.compute.self_test import SelfTestReport, check_device
from swarmnode.config import Folders
from swarmnode.errors import SwarmError
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.index import ModelIndex

Finding = tuple[str, str]
"""("ok" | "warn" | "fail", what was found and, if not ok, what to do)."""


@click.command("doctor", cls=Verb)
@click.option("--device", help="Test this ggml device only; default: all that are found.")
@max_rows_option
@home_option
@clear_errors
def command(device: str | None, max_rows: int | None, home: Path | None) -> None:
    """Check Python, ggml, devices, memory, folders and the bundled model.

    Exit code 1 if something would keep swarmnode from working.

    \b
    Example: swarmnode doctor
    """
    folders = folders_of(home)
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _ggml,
        lambda: _devices(device, max_rows),
        _memory,
        lambda: _folders(folders),
        _model,
    ]
    failed = False
    for check in checks:
        try:
            for level, text in check():
                failed |= level == "fail"
                say(f"{level:<5} {text}")
        except SwarmError as error:
            failed = True
            say(f"fail  {error}")
    sys.exit(1 if failed else 0)


def _python() -> Iterator[Finding]:
    level = "ok" if sys.version_info >= (3, 11) else "fail"
    yield level, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"


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


def _memory() -> Iterator[Finding]:
    """Linux only: other systems do not tell without a library."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
    total, available = kilobytes["MemTotal:"] * 1024, kilobytes["MemAvailable:"] * 1024
    budget = max(1, available // 2 // 10**6)
    yield (
        "ok",
        f"memory: {format_bytes(available)} available of {format_bytes(total)}; "
        f"half of it as a worker's budget: --budget {budget}MB",
    )


def _folders(folders: Folders) -> Iterator[Finding]:
    for what, folder in (("key", folders.data), ("slices", folders.cache)):
        existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
        if not os.access(existing, os.W_OK):
            yield "fail", f"{what}: {existing} is not writable; choose another folder with --home DIR"
        else:
            yield "ok", f"{what}: {folder}, {format_bytes(shutil.disk_usage(existing).free)} free on its disk"


def _model() -> Iterator[Finding]:
    with ModelIndex.open(bundled_model()) as index:
        yield (
            "ok",
            f"bundled model: {index.paths[0].name}, {index.n_layer} layers of {index.n_expert} experts",
        )
