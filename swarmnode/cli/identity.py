"""`swarmnode identity`: who this node is."""

from __future__ import annotations

import os
from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, folders_of, home_option, say
from swarmnode.identity import NodeKey
from swarmnode.services.node_token import load_or_create_token


@click.command("identity")
@click.option(
    "--token", "with_token", is_flag=True, help="Print only the token of the node-local HTTP routes."
)
@home_option
@clear_errors
def command(with_token: bool, home: Path | None) -> None:
    """Show this node's identity; makes a key (and a token for its HTTP routes) on first use.

    \b
    Example: swarmnode identity --home ./node1
    """
    folders = folders_of(home)
    if with_token:
        say(load_or_create_token(folders.token_file))
        return
    existed = os.path.exists(folders.key_file)  # Path.exists raises for a name too long
    key = NodeKey.load_or_create(folders.key_file)
    say(f"node id   {key.node_id}")
    say(f"key file  {folders.key_file}{'' if existed else '  (new)'}")
    load_or_create_token(folders.token_file)
    say(f"api token {folders.token_file}")
    say(
        "Keep these files private: whoever has the key is this node; whoever has the token may use its HTTP routes."
    )
