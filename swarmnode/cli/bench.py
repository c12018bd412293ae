"""`swarmnode bench`: how fast this machine is, alone and with workers at an emulated distance."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import trio

from swarmnode.cli.bench_figures import Figures, Machine, Plan, lines_of
from swarmnode.cli.bench_kernels import measure_kernels
from swarmnode.cli.bench_plot import check_drawing, check_name, draw
from swarmnode.cli.checked import CheckedFile
from swarmnode.cli.common import (
    clear_errors,
    complain,
    compute_options,
    config_of,
    folders_of,
    home_option,
    model_of,
    say,
)
from swarmnode.cli.sizes import ByteSize
from swarmnode.cli.verb import Verb
from swarmnode.compute.devices import Device
from swarmnode.config import Folders
from swarmnode.errors import MissingExtraError
from swarmnode.node.common import NodeOptions, open_compute, stop_on_signal
from swarmnode.weights.index import ModelIndex

SECTIONS = ("kernels", "prefill", "decode", "swarm")
DEADLINE_MS = 30_000
"""An emulated distance, or a busy machine, must not turn remote rows into local ones here."""
MAX_RTT_MS = 10_000.0
MAX_SEQUENCES = 64


class Numbers(click.ParamType[tuple[float, ...]]):
    """A click type for `--rtt 0,10,40`."""

    name = "LIST"

    def __init__(self, low: float, high: float, *, whole: bool = False) -> None:
        self._low, self._high, self._whole = low, high, whole

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys((int if self._whole else float)(x) for x in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers; write for example 1,4", param, ctx)
        if not all(self._low <= number <= self._high for number in numbers):
            self.fail(f"{value!r}: numbers must be from {self._low:g} to {self._high:g}", param, ctx)
        return numbers


@click.command("bench", cls=Verb)
@click.argument(
    "sections", nargs=-1, type=click.Choice(SECTIONS), metavar="[kernels|prefill|decode|swarm]..."
)
@click.option("--model", help="A GGUF file or a known name; default: the bundled model.")
@click.option(
    "--rtt", "rtts_ms", type=Numbers(0, MAX_RTT_MS), default="0,10,40", show_default=True, help="RTTs in ms."
)
@click.option(
    "--sequences",
    type=Numbers(1, MAX_SEQUENCES, whole=True),
    default="1,4",
    show_default=True,
    help="Conversations at once, in decode and swarm.",
)
@click.option("--workers", type=click.IntRange(1, 16), default=2, show_default=True)
@click.option("--budget", type=ByteSize(), help="Of each worker; default: its part of all experts.")
@click.option(
    "--worker-threads",
    type=click.IntRange(1, 512),
    help="Of each worker; default: an even part of the cores.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Medians are of these."
)
@click.option(
    "--tokens", type=click.IntRange(1, 4096), default=32, show_default=True, help="Tokens to decode."
)
@click.option(
    "--prompt", type=click.IntRange(1, 65536), default=128, show_default=True, help="Tokens of a prompt."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, to standard output.")
@click.option(
    "--plot",
    type=CheckedFile(check_name),
    metavar="FILE.png",
    help="Draw the figures, too (needs the extra `bench`).",
)
@compute_options
@home_option
@clear_errors
def command(
    sections: tuple[str, ...],
    model: str | None,
    rtts_ms: tuple[float, ...],
    sequences: tuple[int, ...],
    workers: int,
    budget: int | None,
    worker_threads: int | None,
    rounds: int,
    tokens: int,
    prompt: int,
    as_json: bool,
    plot: Path | None,
    device: str | None,
    threads: int,
    home: Path | None,
) -> None:
    """Measure experts by batch, prefill, decode, and decode over workers at an emulated RTT.

    Without a section, all of them. Workers are processes of this machine that share
    its cores: what they cost shows, what more machines bring does not.

    \b
    Example: swarmnode bench
             swarmnode bench swarm --rtt 0,10,40 --sequences 1,4 --plot swarm.png
    """
    if plot is not None:
        check_drawing()
    plan = Plan(
        sections=tuple(name for name in SECTIONS if not sections or name in sections),
        model=model_of(model, folders_of(home)),
        device=device,
        config=config_of(threads, DEADLINE_MS),
        rounds=rounds,
        prompt_tokens=prompt,
        decode_tokens=tokens,
        rtts_ms=rtts_ms,
        sequences=sequences,
        n_workers=workers,
        worker_threads=worker_threads or max(1, (os.cpu_count() or 1) // (workers + 1)),
        budget_bytes=budget,
    )
    figures = trio.run(_until_stopped, plan)
    if figures is None:
        raise KeyboardInterrupt
    if as_json:
        click.echo(json.dumps(figures.as_dict()))
    else:
        for line in lines_of(figures):
            say(line)
    if plot is not None:
        draw(figures, plot)
        complain(f"wrote {plot}")
    sys.stdout.flush()


async def _until_stopped(plan: Plan) -> Figures | None:
    """The figures; None when Ctrl-C or SIGTERM came first. Nothing runs or lies about afterwards."""
    figures: Figures | None = None
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_on_signal, nursery.cancel_scope)
            figures = await _measure(plan, Path(folder))
            nursery.cancel_scope.cancel()
    return figures


async def _measure(plan: Plan, folder: Path) -> Figures:
    folders = Folders.under(folder / "backbone")
    options = NodeOptions(folders, "bench", device=plan.device, config=plan.config)
    with ModelIndex.open(plan.model) as index:
        async with open_compute(options) as (gate, device):
            figures = Figures(_machine(plan, index, device))
            # Kernels are measured on a worker's machine, too, which has no extra `backbone`; what needs it is told
            # before they are.
            measure_others = _needing_backbone() if set(plan.sections) - {"kernels"} else None
            if "kernels" in plan.sections:
                complain("measuring kernels ...")
                figures.kernels = await measure_kernels(index, device, gate, plan.config, plan.rounds)
            if measure_others is not None:
                await measure_others(plan, folder, index, gate, device, figures)
    return figures


def _needing_backbone() -> Callable[..., Awaitable[None]]:
    try:
        from swarmnode.cli.bench_model import measure_model
    except ModuleNotFoundError:
        raise MissingExtraError("all but kernels", "backbone") from None
    return measure_model


def _machine(plan: Plan, index: ModelIndex, device: Device) -> Machine:
    return Machine(
        model=str(index.metadata.get("general.name", plan.model.name)),
        n_layer=index.n_layer,
        n_expert=index.n_expert,
        n_expert_used=index.n_expert_used,
        device=f"{device.info.name} ({device.info.description})",
        threads=device.n_threads,
        worker_threads=plan.worker_threads,
        rounds=plan.rounds,
        prompt_tokens=plan.prompt_tokens,
        decode_tokens=plan.decode_tokens,
        cores=os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )
