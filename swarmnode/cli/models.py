"""`swarmnode models`: which models are here, how large they are, what budget covers them, if they are sound."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from swarmnode.cli.checked import UserPath
from swarmnode.cli.common import clear_errors, folders_of, home_option, model_of, say
from swarmnode.cli.inspect import print_description
from swarmnode.cli.progress import Progress
from swarmnode.cli.sizes import format_bytes
from swarmnode.config import EngineConfig, Folders
from swarmnode.counts import counted
from swarmnode.errors import ModelFileError, StoreError, SwarmError, UnsupportedModelError, UsageError
from swarmnode.models.registry import state_of_slot
from swarmnode.models.state import SlotBytes
from swarmnode.weights.catalog import bundled_model, known_models, known_shards
from swarmnode.weights.hashing import forget_manifest, verified_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.inspect import Description, describe
from swarmnode.weights.shard import ShardFile

CONTEXT = 4096
"""Tokens of a slot, unless --context says otherwise."""
BUDGETS = (300_000_000, 1_000_000_000, 4_000_000_000, 16_000_000_000)
"""Of a phone, a laptop, a PC, a machine that does little else."""


@click.group("models")
def command() -> None:
    """List, show, add, verify and remove the models on this machine.

    Known are the bundled model, and GGUFs in the current folder and in `models` of the cache folder.

    \b
    Example: swarmnode models list
    """


@command.command("list")
@home_option
@clear_errors
def list_models(home: Path | None) -> None:
    """List the models that --model takes by name, with their sizes, and the shards beside them.

    \b
    Example: swarmnode models list
    """
    folders = folders_of(home)
    bundled = bundled_model()
    found = [
        (model.name, model.n_bytes, model.path)
        for model in known_models(folders.models)
        if model.path.resolve() != bundled.resolve()
    ]
    for name, n_bytes, path in [(bundled.stem, bundled.stat().st_size, bundled), *found]:
        say(f"{name:<40} {format_bytes(n_bytes):>9}  {'bundled' if path == bundled else path}")
    shards = known_shards(folders.models)
    if shards:
        say("Shards, parts of a model that no name stands for:")
    for shard in shards:
        say(f"{shard.path!s:<40} {format_bytes(shard.n_bytes):>9}  {_content(shard.path)}")
    say(f"More: swarmnode models add FILE.gguf, or put them into {own_folder(folders)}")


@command.command("show")
@click.argument("model", required=False)
@home_option
@clear_errors
def show(model: str | None, home: Path | None) -> None:
    """Show what MODEL holds, what the backbone needs for it, and how many experts a budget covers.

    \b
    Example: swarmnode models show baker-street
    """
    with ModelIndex.open(model_of(model, folders_of(home))) as index:
        about = describe(index)
        print_description(about)
        for line in needs_of(about, states_of(index)):
            say(line)


@command.command("add")
@click.argument("file", type=UserPath(path_type=Path))
@click.option("--copy", "with_copy", is_flag=True, help="Copy the file; default: a link to it.")
@home_option
@clear_errors
def add(file: Path, with_copy: bool, home: Path | None) -> None:
    """Make FILE (any part of a split model: all of it) known by its name, once it has been looked through.

    \b
    Example: swarmnode models add ~/downloads/model-00001-of-00003.gguf
    """
    folder = own_folder(folders_of(home))
    with ModelIndex.open(file) as index:
        paths = index.paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            _place(path.resolve(), folder / path.name, with_copy=with_copy)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be used: {error.strerror}; free space or choose another: --home DIR"
        ) from error
    names = [
        model.name for model in known_models([folder]) if model.path.name in {path.name for path in paths}
    ]
    say(f"{names[0]}: {counted(len(paths), 'file')} {'copied' if with_copy else 'linked'} in {folder}")
    say(f"swarmnode backbone --model {names[0]}")


@command.command("verify")
@click.argument("model", required=False)
@home_option
@clear_errors
def verify(model: str | None, home: Path | None) -> None:
    """Read all of MODEL, hash every tensor, and compare with what was found the first time.

    Exit code 1 if bytes have changed since, or the file is broken.

    \b
    Example: swarmnode models verify baker-street
    """
    folders = folders_of(home)
    with ModelIndex.open(model_of(model, folders)) as index:
        progress = Progress("hashing the model")
        manifest, is_known = verified_manifest(index, folders.cache, progress.update)
        progress.close()
        say(f"{index.paths[0].name}: id {manifest.model_id.hex()}")
        say(
            "all bytes are as they were"
            if is_known
            else "hashed for the first time; compare the id with another's"
        )


@command.command("remove")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@home_option
@clear_errors
def remove(name: str, yes: bool, home: Path | None) -> None:
    """Delete model NAME, all parts, from the folder that `models add` puts them into.

    Of a link, only the link goes. Files elsewhere are not touched.

    \b
    Example: swarmnode models remove model --yes
    """
    folders = folders_of(home)
    folder = own_folder(folders)
    found = [model for model in known_models([folder]) if model.name.lower() == name.lower()]
    if len(found) != 1:
        names = ", ".join(model.name for model in known_models([folder])) or "none"
        raise UsageError(f"{name} is no model in {folder}; there are: {names}")
    paths = _parts_of(found[0].path)
    linked = all(path.is_symlink() for path in paths)
    what = "link" if linked else "file"
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"this deletes {counted(len(paths), what)} of {found[0].name}; say so with --yes"
            )
        click.confirm(f"Delete {counted(len(paths), what)} of {found[0].name}?", abort=True)
    try:
        with ModelIndex.open(found[0].path) as index:
            forget_manifest(index, folders.cache)
    except SwarmError:
        pass  # a broken file has none
    for path in paths:
        path.unlink()
    say(f"{found[0].name} is removed: {counted(len(paths), what)}")


def _content(path: Path) -> str:
    """What a shard holds, in a few words."""
    try:
        shard = ShardFile(path)
    except SwarmError:
        return "a shard, but broken"
    count = sum(len(experts) for experts in shard.experts.values())
    return f"{counted(count, 'expert')} of model {shard.model_id.hex()[:16]}"


def own_folder(folders: Folders) -> Path:
    """Where `add` puts models and `remove` looks for them."""
    return folders.cache / "models"


def states_of(index: ModelIndex) -> list[tuple[int, SlotBytes]]:
    """(tokens, bytes of a slot's state) for the usual context and for the longest; none for a model that cannot be run
    here, of which everything else can be told."""
    longest = index.integer("context_length", 1, 2**31 - 1)
    try:
        return [(n_ctx, state_of_slot(index, n_ctx)) for n_ctx in sorted({min(CONTEXT, longest), longest})]
    except UnsupportedModelError:
        return []


def needs_of(about: Description, states: Sequence[tuple[int, SlotBytes]] = ()) -> list[str]:
    """What a backbone must hold, and what budgets cover, as lines. `states`: of a slot, by tokens that it holds."""
    checkpoints = EngineConfig.checkpoint_bytes
    total = about.n_expert * len(about.expert_bytes)
    lines = [
        "a backbone needs",
        f"  {format_bytes(about.n_bytes):>9}  on disk",
        f"  {format_bytes(about.dense_bytes):>9}  of memory for the dense path",
        *(
            f"  {format_bytes(state.total):>9}  for each of its --slots with --context {n_ctx}: {_parts(state)}"
            for n_ctx, state in states
        ),
        f"  {format_bytes(checkpoints):>9}  more, at most, to go on from earlier turns",
        "a worker's budget covers",
    ]
    smallest = min(about.expert_bytes.values(), default=0)
    for budget in BUDGETS:
        n_experts = min(total, experts_of(about, budget))
        lines.append(
            f"  {format_bytes(budget):>9}  {counted(n_experts, 'expert')} of {total} ({n_experts / max(1, total):.1%})"
        )
        if n_experts == total:
            break
    lines.append(f"all experts once: {format_bytes(about.routed_bytes)} of all budgets together")
    if smallest:
        lines.append(f"the smallest budget that holds one expert: {-(-smallest // 1000)} kB")
    return lines


def _parts(state: SlotBytes) -> str:
    return f"{format_bytes(state.cache)} KV cache, {format_bytes(state.recurrent)} recurrent state"


def experts_of(about: Description, budget_bytes: int) -> int:
    """Experts that fit a budget, the smaller ones first."""
    n_experts = 0
    for expert_bytes in sorted(about.expert_bytes.values()):
        fits = min(about.n_expert, budget_bytes // expert_bytes)
        n_experts += fits
        budget_bytes -= fits * expert_bytes
    return n_experts


def _parts_of(path: Path) -> list[Path]:
    """All parts of a split model in the same folder; without opening it, as it may be broken."""
    from swarmnode.weights.parts import split_name

    split = split_name(path.name)
    if split is None:
        return [path]
    found = [(split_name(other.name), other) for other in path.parent.iterdir()]
    return sorted(other for name, other in found if name is not None and name[0] == split[0])


def _place(source: Path, target: Path, *, with_copy: bool) -> None:
    """Copy or link; UsageError if something else has the name."""
    if target.resolve() == source:
        return
    if os.path.lexists(target):
        raise UsageError(f"{target} exists; `swarmnode models remove` it first")
    if with_copy:
        partial = target.with_name(target.name + ".partial")
        try:
            shutil.copyfile(source, partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        return
    try:
        target.symlink_to(source)
    except OSError as error:
        raise ModelFileError(f"{target}: no link can be made here ({error.strerror}); give --copy") from error
