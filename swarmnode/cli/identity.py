"""`swarmnode identity`: who this node is."""

from __future__ import annotations

import os
from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, folders_of, home_option, say
from swarmnode.identity import NodeKey


@click.command("identity")
@home_option
@clear_errors
def command(home: Path | None) -> None:
    """Show this node's identity; makes a key on first use.

    \b
    Example: swarmnode identity --home ./node1
    """
    folders = folders_of(home)
    existed = os.path.exists(folders.key_file)  # Path.exists raises for a name too long
    key = NodeKey.load_or_create(folders.key_file)
    say(f"node id   {key.node_id}")
    say(f"key file  {folders.key_file}{'' if existed else '  (new)'}")
    say("Keep the key file private: whoever has it is this node.")
