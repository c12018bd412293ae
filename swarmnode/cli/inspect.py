"""`swarmnode inspect`: what a GGUF holds."""

from __future__ import annotations

import json
from itertools import groupby

import click

from swarmnode.cli.common import clear_errors, say
from swarmnode.cli.sizes import format_bytes
from swarmnode.weights.catalog import resolve_model
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.inspect import Description, describe


@click.command("inspect")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@clear_errors
def command(model: str | None, as_json: bool) -> None:
    """Show layers, experts, bytes per expert, quantisation and the dense path of MODEL.

    MODEL is a GGUF file (any part of a split one) or a known name; without it, the bundled model.

    \b
    Example: swarmnode inspect model-00001-of-00003.gguf
    """
    with ModelIndex.open(resolve_model(model)) as index:
        description = describe(index)
    if as_json:
        click.echo(json.dumps(_plain(description), indent=1))
    else:
        _print(description)


def _print(about: Description) -> None:
    say(f"{about.name} ({about.architecture}), {format_bytes(about.n_bytes)} in {len(about.parts)} file(s)")
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
        say(f"prediction blocks {format_bytes(about.mtp_bytes)} (not used)")
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
    return f"300MB hold {min(300_000_000 // n_bytes, about.n_expert * len(about.expert_bytes))}"


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
