"""`swarmnode config`: what a verb would be run with, and where each value comes from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from swarmnode.cli import VERBS, module_of
from swarmnode.cli.common import SECRET_VARIABLE, clear_errors, folders_of, home_option, say, wrong_usage
from swarmnode.cli.logs import hide_secrets
from swarmnode.cli.settings import FILE_NAME, read_settings
from swarmnode.cli.verb import Origin, Verb, origins, warn_of_variables
from swarmnode.errors import MissingExtraError, UsageError
from swarmnode.net.bootstrap import ENVIRONMENT_VARIABLE, check_source, sources_of
from swarmnode.wire.secret import NetworkSecret

SHOWN = ("backbone", "join")
"""Without a verb: those that run for long."""


@click.group("config")
def command() -> None:
    """Show the settings, which stand in one TOML file.

    Options of a command line are the strongest, then the environment (SWARMNODE_JOIN_BUDGET), then the
    file (budget in [join]), then the defaults.

    \b
    Example: swarmnode config show join
    """


@command.command("show", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@home_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("verb", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@clear_errors
def show(home: Path | None, as_json: bool, verb: str | None, arguments: tuple[str, ...]) -> None:
    """Show what VERB would be run with, and where each value comes from.

    Options behind VERB count as its own. Exit code 2 if a value would be refused.

    \b
    Example: swarmnode config show join --budget 300MB
    """
    folders = folders_of(home)
    with wrong_usage():
        read_settings(folders.settings, VERBS)
        found = _found(verb, arguments, home)
    if as_json:
        click.echo(json.dumps({"file": str(folders.settings / FILE_NAME), **_plain(found)}, indent=1))
    else:
        path = folders.settings / FILE_NAME
        say(f"file      {path}{'' if path.exists() else '  (not there)'}")
        say(f"key       {folders.key_file}")
        say(f"cache     {folders.cache}")
        for name, items in found.items():
            _print(name, items)
    sys.exit(2 if any(item.problem for items in found.values() for item in items) else 0)


def _found(verb: str | None, arguments: tuple[str, ...], home: Path | None) -> dict[str, list[Origin]]:
    found: dict[str, list[Origin]] = {}
    for name in [verb] if verb else SHOWN:
        try:
            found[name] = _origins_of(name, [*arguments], home)
        except MissingExtraError:  # a worker's installation
            if verb:
                raise
    return found


def _origins_of(name: str, arguments: list[str], home: Path | None) -> list[Origin]:
    if name not in VERBS:
        raise click.UsageError(f"there is no verb {name!r}; those are {', '.join(sorted(VERBS))}")
    command: click.Command = module_of(name).command
    if not isinstance(command, Verb):
        raise click.UsageError(f"`swarmnode {name}` takes no settings: give its options on the command line")
    given = [] if home is None else ["--home", str(home)]
    has_home = any(param.name == "home" for param in command.params)
    warn_of_variables(command, name, as_json=False)
    _, items = origins(command, name, [*(given if has_home else []), *arguments])
    return [*items, *_unnamed(items)]


def _unnamed(items: list[Origin]) -> list[Origin]:
    """What verbs read from the environment beside their options."""
    names = {item.name: item for item in items}
    found = []
    for option, variable in (("bootstrap", ENVIRONMENT_VARIABLE), ("secret", SECRET_VARIABLE)):
        is_used = option in names and names[option].source == "default" and os.environ.get(variable)
        if is_used:
            value = "[hidden]" if option == "secret" else os.environ[variable]
            found.append(Origin(variable, value, f"environment {variable}", _problem(variable)))
    return found


def _problem(variable: str) -> str:
    """Why the verb would refuse what stands in one of these variables; "" if it would not."""
    text = os.environ[variable].strip()
    try:
        if variable == SECRET_VARIABLE:
            NetworkSecret.parse(text)
        else:
            for source in sources_of(text):
                check_source(source)
    except UsageError as error:
        return str(error)
    return ""


def _print(verb: str, items: list[Origin]) -> None:
    say()
    say(verb)
    for item in items:
        say(f"  {item.name:<16} {_text(item.value):<28} {item.source}")
        if item.problem:
            say(f"    refused: {item.problem}")


def _text(value: Any) -> str:
    if value is None or value in ((), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(_text(item) for item in value)
    return hide_secrets(str(value))


def _plain(found: dict[str, list[Origin]]) -> dict[str, Any]:
    return {
        verb: {
            item.name: {"value": _json_value(item.value), "source": item.source}
            | ({"refused": item.problem} if item.problem else {})
            for item in items
        }
        for verb, items in found.items()
    }


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list):
        return [_json_value(item) for item in value]
    return hide_secrets(str(value))
