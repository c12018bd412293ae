"""`swarmnode resume`: a paused worker goes on."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, home_option, say
from swarmnode.cli.control import same_node, tell


@click.command("resume")
@home_option
@clear_errors
def command(home: Path | None) -> None:
    """Have the worker that runs here go on after `swarmnode pause`.

    It says if something else still holds it: the battery, or the hours set.

    \b
    Example: swarmnode resume
    """
    state = tell(home, do="resume")
    if state["paused"]:
        see = same_node("limits", home)
        say(f"{state['node']} may go on, but does not yet: {state['paused']} (see `{see}`)")
    else:
        say(f"{state['node']} goes on")
