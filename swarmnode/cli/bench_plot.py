"""The figures of `swarmnode bench` as a picture. The only file that imports matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from swarmnode.cli.bench_figures import Figures, TokenFigure
from swarmnode.counts import counted
from swarmnode.errors import MissingExtraError, UsageError

PANEL_INCHES = (4.5, 3.6)


def check_drawing() -> None:
    """Before minutes of measuring: can pictures be drawn? MissingExtraError if not."""
    try:
        import_module("matplotlib")
    except ImportError:
        raise MissingExtraError("--plot", "bench") from None


def check_name(path: Path) -> None:
    """UsageError if no picture can be written there."""
    if path.suffix != ".png":
        raise UsageError(f"{path}: write a name that ends in .png")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")


def draw(figures: Figures, path: Path) -> None:
    """Write the PNG: a panel for each section that was measured. UsageError if the file cannot be written."""
    backend = import_module("matplotlib.backends.backend_agg")  # no display, no global state
    figure_module = import_module("matplotlib.figure")
    panels: list[Callable[[Any], None]] = []
    if figures.kernels:
        panels.append(lambda axes: _draw_kernels(axes, figures))
    if local := figures.prefill + figures.decode:
        panels.append(lambda axes: _draw_local(axes, figures, local))
    if figures.swarm:
        panels.append(lambda axes: _draw_swarm(axes, figures))
    width, height = PANEL_INCHES
    picture = figure_module.Figure(figsize=(width * len(panels), height), layout="constrained")
    backend.FigureCanvasAgg(picture)
    for number, panel in enumerate(panels, start=1):
        panel(picture.add_subplot(1, len(panels), number))
    picture.suptitle(f"{figures.machine.model}, {figures.machine.device}", fontsize=9)
    try:
        picture.savefig(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _draw_kernels(axes: Any, figures: Figures) -> None:
    axes.plot([row.rows for row in figures.kernels], [row.rows_per_s for row in figures.kernels], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(title="experts", xlabel="rows at once", ylabel="rows/s")


def _draw_local(axes: Any, figures: Figures, rows: list[TokenFigure]) -> None:
    names = ["prefill"] * len(figures.prefill) + [f"decode x{row.sequences}" for row in figures.decode]
    axes.bar(names, [row.tokens_per_s for row in rows])
    axes.set(title="no worker: 0 layers remote, no RTT", ylabel="tok/s")


def _draw_swarm(axes: Any, figures: Figures) -> None:
    for sequences in sorted({row.sequences for row in figures.swarm}):
        rows = [row for row in figures.swarm if row.sequences == sequences]
        remote = [row for row in rows if row.rtt_measured_ms is not None]
        (line,) = axes.plot(
            [row.rtt_measured_ms for row in remote],
            [row.tokens_per_s for row in remote],
            marker="o",
            label=f"{sequences} at once",
        )
        for alone in (row for row in rows if row.rtt_ms is None):
            axes.axhline(alone.tokens_per_s, linestyle=":", color=line.get_color())
    least = min((row for row in figures.swarm if row.workers), key=lambda row: row.layers_remote)
    title = (
        f"{counted(least.workers, 'worker')}, {least.layers_remote:g}/{least.layers_total} layers remote,\n"
        f"{least.rounds_per_token:g} rounds a token; dotted: no worker"
    )
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="RTT ms (measured)", ylabel="decode tok/s, all sequences")
    axes.title.set_fontsize(9)
    axes.legend()
