"""`swarmnode leave`: a running node says goodbye and ends."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, home_option, say
from swarmnode.cli.control import tell


@click.command("leave")
@home_option
@clear_errors
def command(home: Path | None) -> None:
    """Have the node that runs here leave the swarm and end, as Ctrl-C does.

    It tells the others in a signed record, finishes rows under way, and ends with exit code 0. Experts stay
    on disk for the next `swarmnode join`.

    \b
    Example: swarmnode leave
    """
    state = tell(home, do="leave")
    say(f"{state['node']} leaves")
