"""`swarmnode completion`: what a shell needs to complete verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from swarmnode.cli import main
from swarmnode.cli.common import clear_errors
from swarmnode.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SWARMNODE_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@clear_errors
def command(shell: str) -> None:
    """Print a script that makes SHELL complete swarmnode's verbs and options.

    \b
    Example: swarmnode completion bash > ~/.swarmnode-complete.bash
             echo '. ~/.swarmnode-complete.bash' >> ~/.bashrc
             swarmnode completion zsh > "${fpath[1]}/_swarmnode"
             swarmnode completion fish > \\
               ~/.config/fish/completions/swarmnode.fish
    """
    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"click has no completion for {shell}")
    click.echo(found(main, {}, "swarmnode", VARIABLE).source())
