"""`swarmnode shard`: cut experts out of a model into a small valid GGUF."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, folders_of, home_option, say
from swarmnode.cli.progress import Progress
from swarmnode.cli.sizes import format_bytes
from swarmnode.errors import UsageError
from swarmnode.weights.catalog import resolve_model
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.parts import split_name
from swarmnode.weights.shard import write_shard
from swarmnode.weights.slices import ExpertRange, parse_span


@click.command("shard")
@click.argument("model")
@click.option("--layers", required=True, metavar="A:B", help="Layers A to B-1.")
@click.option("--experts", required=True, metavar="A:B", help="Experts A to B-1 of each of these layers.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
@home_option
@clear_errors
def command(model: str, layers: str, experts: str, output: Path, home: Path | None) -> None:
    """Write some experts of MODEL to a GGUF that any GGUF tool opens; the bytes are those of the source.

    \b
    Example: swarmnode shard model.gguf --layers 0:2 --experts 0:16 -o slice.gguf
    """
    wanted_layers, wanted_experts = parse_span(layers), parse_span(experts)
    if split_name(output.name) is not None:
        raise UsageError(f"{output.name} looks like a part of a split model; choose another name")
    with ModelIndex.open(resolve_model(model)) as index:
        if output.resolve() in {path.resolve() for path in index.paths}:
            raise UsageError(f"{output} is the model itself; choose another name")
        progress = Progress("hashing the model")
        manifest = load_or_build_manifest(index, folders_of(home).cache, progress.update)
        progress.close()
        ranges = [ExpertRange(layer, wanted_experts.start, len(wanted_experts)) for layer in wanted_layers]
        for item in ranges:
            _check(manifest, item)
        write_shard(output, index, manifest, ranges)
    count = len(ranges) * len(wanted_experts)
    say(f"{output}: {count} experts, {format_bytes(output.stat().st_size)}")


def _check(manifest: Manifest, item: ExpertRange) -> None:
    if item.layer not in manifest.layers:
        known = sorted(manifest.layers)
        raise UsageError(
            f"{manifest.name} has no routed experts in layer {item.layer}; they are in layers {known[0]} to {known[-1]}"
        )
    if item.stop > manifest.n_expert:
        raise UsageError(
            f"{manifest.name} has experts 0 to {manifest.n_expert - 1}, not up to {item.stop - 1}"
        )
