"""`swarmnode key`: keys of the HTTP API, for those who ask from other machines."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from swarmnode.cli.checked import Checked
from swarmnode.cli.common import clear_errors, complain, folders_of, home_option, say
from swarmnode.services.api_keys import (
    MAX_CONCURRENT,
    MAX_PER_MINUTE,
    ApiKey,
    check_name,
    new_key,
    read_keys,
    revoke_key,
)


@click.group("key")
def command() -> None:
    """Make, list and revoke keys of the HTTP API. A running backbone knows at once.

    \b
    Example: swarmnode key new --name laptop
    """


@command.command("new")
@click.option(
    "--name",
    type=Checked("NAME", check_name),
    default="default",
    show_default=True,
    help="To tell keys apart.",
)
@click.option(
    "--max-concurrent",
    metavar="N",
    type=click.IntRange(1, MAX_CONCURRENT),
    help="Answers at a time; a request may ask for several.",
)
@click.option(
    "--per-minute",
    metavar="N",
    type=click.IntRange(1, MAX_PER_MINUTE),
    help="Answers that begin in any minute.",
)
@home_option
@clear_errors
def new(name: str, max_concurrent: int | None, per_minute: int | None, home: Path | None) -> None:
    """Print a new key: the only time that it is shown. Its limits stay; for others, make another key.

    \b
    Example: swarmnode key new --name laptop --max-concurrent 2 --per-minute 60
    """
    path = folders_of(home).api_keys_file
    say(new_key(path, name, max_concurrent=max_concurrent, per_minute=per_minute))
    complain("Keep it: only its hash is stored. Clients send it as Authorization: Bearer KEY.")


@command.command("list")
@home_option
@clear_errors
def list_keys(home: Path | None) -> None:
    """List names, beginnings and limits of all keys.

    \b
    Example: swarmnode key list
    """
    keys = read_keys(folders_of(home).api_keys_file)
    if not keys:
        say("There are no keys; make one with `swarmnode key new`.")
        return
    wide = max(len("name"), *(len(key.name) for key in keys))
    say(f"{'name':<{wide}}  {'key begins with':<16}  made")
    for key in keys:
        made = datetime.fromtimestamp(key.created_s).strftime("%Y-%m-%d %H:%M")
        say(f"{key.name:<{wide}}  {key.shown + '...':<16}  {made}{_limits(key)}")
    say("A key itself is shown once, by `swarmnode key new`; here is what tells them apart.")


def _limits(key: ApiKey) -> str:
    limits = []
    if key.max_concurrent is not None:
        limits.append(f"{key.max_concurrent} at a time")
    if key.per_minute is not None:
        limits.append(f"{key.per_minute} a minute")
    return f"  at most {' and '.join(limits)}" if limits else ""


@command.command("revoke")
@click.argument("name")
@home_option
@clear_errors
def revoke(name: str, home: Path | None) -> None:
    """Make the key of that name good for nothing.

    \b
    Example: swarmnode key revoke laptop
    """
    revoke_key(folders_of(home).api_keys_file, name)
    say(f"the key {name} is revoked")
