"""`swarmnode pause`: a running worker gets no rows for a while."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.common import clear_errors, home_option, say
from swarmnode.cli.control import same_node, tell


@click.command("pause")
@home_option
@clear_errors
def command(home: Path | None) -> None:
    """Have the worker that runs here stop computing; it keeps its experts and its connections.

    Backbones are told at once, and others fetch what it held. Downloads that run come to their end.

    \b
    Example: swarmnode pause
    """
    state = tell(home, do="pause")
    say(f"{state['node']} is paused; `{same_node('resume', home)}` goes on")
