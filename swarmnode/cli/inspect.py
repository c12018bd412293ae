"""`swarmnode inspect`: what a GGUF holds."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, folders_of, home_option, model_of, say
from swarmnode.cli.sizes import format_bytes
from swarmnode.counts import counted
from swarmnode.errors import ModelFileError, UnsupportedModelError
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.inspect import Description, describe
from swarmnode.weights.shard import ShardFile
from swarmnode.weights.slices import ranges_of


@click.command("inspect")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@home_option
@clear_errors
def command(model: str | None, as_json: bool, home: Path | None) -> None:
    """Show layers, experts, bytes per expert, quantisation and the dense path of MODEL.

    MODEL is a GGUF file (any part of a split one) or a known name; without it, the bundled model.

    \b
    Example: swarmnode inspect model-00001-of-00003.gguf
    """
    path = model_of(model, folders_of(home))
    shard = _shard(path)
    if shard is not None:
        _print_shard(shard)
        return
    with ModelIndex.open(path) as index:
        description = describe(index)
    if as_json:
        click.echo(json.dumps(_plain(description), indent=1))
    else:
        print_description(description)


def _shard(path: Path) -> ShardFile | None:
    """The file as a shard that `swarmnode shard` or a worker wrote; None if it is something else."""
    try:
        return ShardFile(path)
    except (ModelFileError, UnsupportedModelError):
        return None


def _print_shard(shard: ShardFile) -> None:
    count = sum(len(experts) for experts in shard.experts.values())
    say(
        f"a shard of model {shard.model_id.hex()[:16]}: {counted(count, 'expert')}, {format_bytes(shard.n_bytes)}"
    )
    for item in ranges_of(shard.experts):
        say(f"  {item}")


def print_description(about: Description) -> None:
    """Print layers, experts, bytes and quantisation."""
    say(
        f"{about.name} ({about.architecture}), {format_bytes(about.n_bytes)} in {counted(len(about.parts), 'file')}"
    )
    for path in about.parts:
        say(f"  {path}")
    say(f"layers            {about.n_layer}, of which {len(about.expert_bytes)} with routed experts")
    say(f"experts           {about.n_expert} a layer, {about.n_expert_used} used for each token")
    say(
        f"width             n_embd {about.n_embd}, {about.n_vocab} tokens, trained context {about.n_ctx_train}"
    )
    say(f"routed experts    {format_bytes(about.routed_bytes)}")
    say(f"dense path        {format_bytes(about.dense_bytes)} (what a backbone must hold beside its state)")
    if about.mtp_bytes:
        say(f"prediction blocks {format_bytes(about.mtp_bytes)} (guesses tokens: --speculate)")
    say("bytes of one expert")
    for n_bytes, layers in _runs(about):
        say(f"  {layers:<24} {n_bytes:>12,} B   {_fit(about, n_bytes)}")
    say("quantisation, by kind of tensor")
    for kind, types in about.quantisation.items():
        say(f"  {kind:<24} {', '.join(f'{name} x{count}' for name, count in types.items())}")


def _runs(about: Description) -> list[tuple[int, str]]:
    """Neighbouring layers with experts of the same size, as ('layers 0-3', bytes)."""
    rows: list[tuple[int, str]] = []
    for n_bytes, group in groupby(sorted(about.expert_bytes.items()), key=lambda item: item[1]):
        layers = [layer for layer, _ in group]
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        rows.append((n_bytes, name))
    return rows


def _fit(about: Description, n_bytes: int) -> str:
    total = about.n_expert * len(about.expert_bytes)
    fits = 300_000_000 // n_bytes
    return f"300MB hold {fits} of {total}" if fits < total else f"300MB hold all {total}"


def _plain(about: Description) -> dict[str, object]:
    return {
        "name": about.name,
        "architecture": about.architecture,
        "parts": [str(path) for path in about.parts],
        "bytes": about.n_bytes,
        "layers": about.n_layer,
        "experts": about.n_expert,
        "experts_used": about.n_expert_used,
        "n_embd": about.n_embd,
        "n_vocab": about.n_vocab,
        "context": about.n_ctx_train,
        "expert_bytes": dict(about.expert_bytes),
        "routed_bytes": about.routed_bytes,
        "dense_bytes": about.dense_bytes,
        "mtp_bytes": about.mtp_bytes,
        "quantisation": {kind: dict(types) for kind, types in about.quantisation.items()},
    }
