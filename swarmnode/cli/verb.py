"""A verb whose options may also come from the environment and from the settings file.

The strongest first: the command line, SWARMNODE_<VERB>_<OPTION>, SWARMNODE_<OPTION>, the file's table of the verb, the
file's top level, the default. click has this order; here it is told the names and the file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from swarmnode.cli import VERBS
from swarmnode.cli.logs import JsonLines
from swarmnode.cli.settings import (
    SettingsFile,
    long_name,
    read_settings,
    settable,
    unknown_variables,
    variables_of,
)
from swarmnode.config import Folders
from swarmnode.errors import UsageError

HOME_VARIABLE = "SWARMNODE_HOME"


class Verb(click.Command):
    """Use as `@click.command(NAME, cls=Verb)`. What is wrong in file or environment ends as wrong usage does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in settable(self).values():
            option.envvar = variables_of(self.name or "", option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, with the file's values behind everything else."""
        verb = self.name or ""
        try:
            found = self.settings_file(ctx, args)
            ctx.default_map = found.of(self, verb)
        except UsageError as error:
            raise click.UsageError(str(error), ctx) from error
        try:
            rest = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:
                warn_of_variables(self, verb, as_json=bool(ctx.params.get("log_json")))
            return rest
        except click.BadParameter as error:
            blame = _blame(ctx, error.param, found, verb)
            if not blame:
                raise
            raise click.BadParameter(f"{error.message} ({blame})", error.ctx, error.param) from error

    def settings_file(self, ctx: click.Context, args: list[str]) -> SettingsFile:
        """The file of the home that these arguments, or the environment, name. UsageError."""
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        home = parsed.get("home") or os.environ.get(HOME_VARIABLE)
        return read_settings(Folders.under(Path(home) if isinstance(home, str) else None).settings, VERBS)


def warn_of_variables(command: click.Command, verb: str, *, as_json: bool) -> None:
    """Misspelt ones would be passed over in silence. Logging is not set up yet when a verb's options are read."""
    for name, hint in unknown_variables(os.environ, verb, command, VERBS).items():
        text = f"the environment's {name} is no setting{hint}"
        if as_json:
            entry = {"name": "swarmnode.cli", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
            click.echo(JsonLines().format(logging.makeLogRecord(entry)), err=True)
        else:
            click.echo(f"swarmnode: {text}", err=True)


@dataclass(frozen=True)
class Origin:
    """One option of a verb: its value as it would be used, and where it comes from. `problem`: why it is refused."""

    name: str
    value: Any
    source: str
    problem: str = ""


def origins(command: click.Command, verb: str, args: list[str]) -> tuple[SettingsFile, list[Origin]]:
    """Each option of a verb, as it would be with these arguments. click.UsageError for arguments that it has not, and
    UsageError for a file that is wrong."""
    ctx = click.Context(command, info_name=f"swarmnode {verb}", resilient_parsing=True)
    parsed, _, _ = command.make_parser(ctx).parse_args(list(args))
    ctx.resilient_parsing = False
    known = command if isinstance(command, Verb) else None
    found = SettingsFile(Path()) if known is None else known.settings_file(ctx, args)
    ctx.default_map = {} if known is None else found.of(command, verb)
    return found, list(_origins(command, ctx, parsed, found, verb))


def _origins(
    command: click.Command, ctx: click.Context, parsed: dict[str, Any], found: SettingsFile, verb: str
) -> Iterator[Origin]:
    for param in command.params:
        if not isinstance(param, click.Option) or long_name(param) in ("help", "version"):
            continue
        raw, source = param.consume_value(ctx, parsed)
        ctx.set_parameter_source(param.name or "", source)
        name = long_name(param)
        if source is ParameterSource.DEFAULT:
            yield Origin(name, _default_of(param, ctx), "default")
            continue
        try:
            value, problem = param.type_cast_value(ctx, raw), ""
        except click.BadParameter as error:
            value, problem = raw, error.message
        yield Origin(name, value, _source(ctx, param, found, verb), problem)


def _default_of(option: click.Option, ctx: click.Context) -> Any:
    """None where there is none: click marks that with a value of its own."""
    value = option.get_default(ctx)
    return value if isinstance(value, str | int | float | bool | tuple | list | Path) else None


def _source(ctx: click.Context, option: click.Option, found: SettingsFile, verb: str) -> str:
    source = ctx.get_parameter_source(option.name or "")
    if source is ParameterSource.ENVIRONMENT:
        names = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
        return f"environment {next((name for name in names if os.environ.get(name)), names[0])}"
    if source is ParameterSource.DEFAULT_MAP:
        return f"file {found.place_of(verb, long_name(option))}"
    return "command line"


def _blame(ctx: click.Context, param: click.Parameter | None, found: SettingsFile, verb: str) -> str:
    """Where a value that was refused comes from, if not from the command line."""
    if not isinstance(param, click.Option):
        return ""
    source = ctx.get_parameter_source(param.name or "")
    if source is ParameterSource.ENVIRONMENT:
        return _source(ctx, param, found, verb)
    if source is ParameterSource.DEFAULT_MAP:
        return f"{found.path}: {found.place_of(verb, long_name(param))}"
    return ""
