"""`swarmnode shard`: cut experts out of a model into a small valid GGUF."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.checked import Checked, CheckedFile
from swarmnode.cli.common import clear_errors, folders_of, home_option, model_of, say, wrong_usage
from swarmnode.cli.progress import Progress
from swarmnode.cli.sizes import format_bytes
from swarmnode.counts import counted
from swarmnode.errors import UsageError
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.parts import split_name
from swarmnode.weights.shard import write_shard
from swarmnode.weights.slices import ExpertRange, parse_span


def _check_output(path: Path) -> None:
    """UsageError unless a shard may be written there."""
    if split_name(path.name) is not None:
        raise UsageError(f"{path.name} looks like a part of a split model; choose another name")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file; choose another name")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}; make it first")


@click.command("shard")
@click.argument("model")
@click.option("--layers", required=True, type=Checked("A:B", parse_span), help="Layers A to B-1.")
@click.option(
    "--experts",
    required=True,
    type=Checked("A:B", parse_span),
    help="Experts A to B-1 of each of these layers.",
)
@click.option("-o", "--output", required=True, metavar="FILE", type=CheckedFile(_check_output))
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
@home_option
@clear_errors
def command(model: str, layers: str, experts: str, output: Path, force: bool, home: Path | None) -> None:
    """Write some experts of MODEL to a GGUF that any GGUF tool opens; the bytes are those of the source.

    \b
    Example: swarmnode shard model.gguf --layers 0:2 --experts 0:16 -o slice.gguf
    """
    wanted_layers, wanted_experts = parse_span(layers), parse_span(experts)
    if output.exists() and not force:
        raise click.UsageError(f"{output} exists; choose another name, or --force")
    with ModelIndex.open(model_of(model, folders_of(home))) as index:
        with wrong_usage():
            _check_span(index, wanted_layers, wanted_experts)
        if output.resolve() in {path.resolve() for path in index.paths}:
            raise click.UsageError(f"{output} is the model itself; choose another name")
        progress = Progress("hashing the model")
        manifest = load_or_build_manifest(index, folders_of(home).cache, progress.update)
        progress.close()
        ranges = [ExpertRange(layer, wanted_experts.start, len(wanted_experts)) for layer in wanted_layers]
        # The manifest is of exactly this file, and whoever takes slices checks them.
        write_shard(output, index, manifest, ranges, check=False, sync=False)
    count = len(ranges) * len(wanted_experts)
    say(f"{output}: {counted(count, 'expert')}, {format_bytes(output.stat().st_size)}")


def _check_span(index: ModelIndex, layers: range, experts: range) -> None:
    """UsageError unless every wanted layer has routed experts, and those experts; before anything is hashed."""
    known = sorted(index.expert_layers)
    if (
        layers.start not in index.expert_layers
        or layers.stop > known[-1] + 1
        or not set(layers) <= set(known)
    ):
        raise UsageError(
            f"not all of layers {layers.start} to {layers.stop - 1} have routed experts; "
            f"layers {known[0]} to {known[-1]} do"
        )
    if experts.stop > index.n_expert:
        raise UsageError(
            f"this model has experts 0 to {index.n_expert - 1} in a layer, not up to {experts.stop - 1}"
        )
