"""The command line: one file per verb, loaded when asked for. The only place that prints."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

STOPPED = 130
"""Exit code of what Ctrl-C ended, as shells have it."""

try:
    import click
    from click.shell_completion import CompletionItem

    from swarmnode import __version__
    from swarmnode.cli.closed_streams import open_closed_streams
    from swarmnode.errors import MissingExtraError, SwarmError
except KeyboardInterrupt:
    sys.exit(STOPPED)

# Before anything imports numpy: its BLAS is used by the self-test only, and a thread of its own for every core costs
# 40 MB of address space and fights ggml's threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

VERBS = {
    "backbone": "Serve a model: dense path, gate and the fallback replica of every expert.",
    "bench": "Measure this machine, alone and with workers at an emulated RTT.",
    "chat": "Talk with a model: a backbone's, or one at any URL.",
    "completion": "Print what a shell needs to complete verbs and options.",
    "config": "Show the settings, and where each value comes from.",
    "demo": "Run a whole swarm on this machine and check that its answer is right.",
    "doctor": "Say what this machine can do and what is wrong with it.",
    "generate": "Continue a prompt with a running backbone.",
    "identity": "Show this node's identity.",
    "inspect": "Show what a GGUF file holds: layers, experts, bytes.",
    "invite": "Bring another machine in: a link, a QR code, a line to run there.",
    "join": "Lend memory and compute to a swarm: hold a few experts.",
    "key": "Make, list and revoke keys of the HTTP API.",
    "leave": "Have the node that runs here say goodbye and end.",
    "limits": "Show or change what the worker that runs here may take.",
    "models": "List, show, add, verify and remove models.",
    "pause": "Have the worker that runs here stop computing for a while.",
    "resume": "Have a paused worker go on.",
    "shard": "Cut experts out of a GGUF into a small valid GGUF.",
    "status": "Show the swarm: nodes, coverage of each layer, what is scarce.",
}


BACKBONE_LIBRARIES = frozenset({"tokenizers", "jinja2", "starlette", "hypercorn", "httpx"})
"""Of the extra `backbone` (pyproject.toml): what a worker does without."""


class LazyGroup(click.Group):
    """Imports a verb's module when it is needed, so that `--help` and light verbs start at once."""

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C before the verb runs, while it is imported, say, ends as silently as later (common.clear_errors)."""
        open_closed_streams()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(STOPPED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        try:
            command: click.Command = module_of(cmd_name).command
        except SwarmError as error:  # an extra, or of compute/ggml.py: SWARMNODE_GGML_LIB names a bad library
            click.echo(f"swarmnode: {error}", err=True)
            sys.exit(1)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, and an unknown verb's error names the nearest one, as it does for options."""
        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], VERBS, 1)
            ctx.fail(f"No such command {args[0]!r}.{f' Did you mean {near[0]!r}?' if near else ''}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs from the list here: to import all of them takes a second, and some need the extra."""
        verbs = [
            CompletionItem(verb, help=text) for verb, text in VERBS.items() if verb.startswith(incomplete)
        ]
        return verbs or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))


def module_of(verb: str) -> Any:
    """MissingExtraError if it needs what only the extra `backbone` installs."""
    try:
        return importlib.import_module(f"swarmnode.cli.{verb}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in BACKBONE_LIBRARIES:
            raise
        raise MissingExtraError(f"`swarmnode {verb}`", "backbone") from None


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="swarmnode")
def main(**_: Any) -> None:
    """Serve a large Mixture-of-Experts model from devices none of which could hold it.

    \b
    Example: swarmnode backbone
             swarmnode join --budget 300MB --bootstrap swarm://ID@host:4790
             swarmnode generate "To Sherlock Holmes she is always"
    """
