"""The settings file: one TOML file whose values stand behind the environment and the command line.

Keys are the long names of options. At the top level stand those of SHARED, for every verb that has such an option; a
table named after a verb holds for that verb alone, and before them:

    network = "home"

    [join]
    budget = "300MB"
    bootstrap = ["/etc/swarmnode/peers.txt"]

docs/decisions/0034-settings.md has the reasons.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import click

from swarmnode.errors import UsageError
from swarmnode.net.bootstrap import is_file_name
from swarmnode.state_file import read_small

FILE_NAME = "config.toml"
MAX_FILE_BYTES = 1 << 20

SHARED = frozenset(
    {
        "advertise", "allow", "api", "bootstrap", "device", "lan", "listen", "log-json", "max-rows", "network",
        "secret", "threads", "verbose",
    }
)  # fmt: skip
"""Options that several verbs have and that mean the same in each: settable for all of them at once."""

NOT_IN_ENVIRONMENT = frozenset({"bootstrap", "secret"})
"""SWARMNODE_BOOTSTRAP and SWARMNODE_SECRET have always meant something else than the option: a list behind all
sources, and the secret itself."""

NOT_SETTABLE = frozenset({"help", "version", "home"})
"""`home` says where the file is."""

PREFIX = "SWARMNODE_"
OTHER_VARIABLES = frozenset(
    {
        "SWARMNODE_API_KEY", "SWARMNODE_BOOTSTRAP", "SWARMNODE_GGML_LIB", "SWARMNODE_HOME", "SWARMNODE_SCREENSHOTS",
        "SWARMNODE_SECRET",
    }
)  # fmt: skip
"""Variables that are no options."""

Value: TypeAlias = str | int | float | bool | list[str]


@dataclass(frozen=True)
class SettingsFile:
    """What a file says: of all verbs, and of single ones. Nothing, if there is no file."""

    path: Path
    exists: bool = False
    shared: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    of_verbs: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, command: click.Command, verb: str) -> dict[str, Value]:
        """Values by name of parameter, for click's default_map. UsageError names file, key and what is wrong."""
        options = settable(command)
        own = self.of_verbs.get(verb, {})
        for key in own:
            if key not in options:
                raise self._unknown(f"[{verb}] {key}", key, options)
        known = {key: value for key, value in self.shared.items() if key in options}
        found: dict[str, Value] = {}
        for key, value in {**known, **own}.items():
            place = f"[{verb}] {key}" if key in own else key
            found[options[key].name or key] = self._checked(place, options[key], value)
        return found

    def place_of(self, verb: str, key: str) -> str:
        """Where in the file a key stands that holds for a verb, for people."""
        return f"[{verb}] {key}" if key in self.of_verbs.get(verb, {}) else key

    def _checked(self, place: str, option: click.Option, value: Any) -> Value:
        if option.multiple:
            items = [value] if isinstance(value, str) else value
            if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
                raise UsageError(f'{self.path}: {place} is a list of texts, like ["a", "b"]')
            return [self._from_here(option, item) for item in items]
        if option.is_flag:
            if not isinstance(value, bool):
                raise UsageError(f"{self.path}: {place} is true or false, not {value!r}")
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageError(f"{self.path}: {place} is a text or a number, not {value!r}")
        return self._from_here(option, value) if isinstance(value, str) else value

    def _from_here(self, option: click.Option, text: str) -> str:
        """A name of a file, seen from the folder of the settings file: a service starts in any folder. A model's is
        not, as it may be a known name."""
        if isinstance(option.type, click.Path) or (option.name == "bootstrap" and is_file_name(text)):
            return str(self.path.absolute().parent / os.path.expanduser(text))
        return text

    def _unknown(self, place: str, key: str, known: Collection[str]) -> UsageError:
        hint = nearest(key, known) or f"; known: {', '.join(sorted(known))}"
        return UsageError(f"{self.path}: {place} is no setting{hint}")


def read_settings(folder: Path, verbs: Collection[str]) -> SettingsFile:
    """The file in a settings folder. UsageError if it cannot be read, is no TOML, or has a key that nobody knows."""
    path = folder / FILE_NAME
    try:
        text = read_small(path, MAX_FILE_BYTES).decode()
        values = tomllib.loads(text)
    except FileNotFoundError:
        return SettingsFile(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    shared = {key: value for key, value in values.items() if key not in tables}
    found = SettingsFile(path, True, shared, tables)
    for key in shared:
        if key not in SHARED:
            in_table = "; put it into the table of a verb, like [join]" if key not in NOT_SETTABLE else ""
            raise UsageError(
                f"{path}: {key} is no setting for all verbs{nearest(key, SHARED)}{in_table}; "
                f"those are {_listed(SHARED)}"
            )
    for verb in tables:
        if verb not in verbs:
            raise UsageError(f"{path}: [{verb}] is none of the verbs {_listed(verbs)}{nearest(verb, verbs)}")
    return found


def settable(command: click.Command) -> dict[str, click.Option]:
    """The options of a verb by the name that they have in the file: `max-rows` for `--max-rows`."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    named = {long_name(option): option for option in options}
    return {name: option for name, option in named.items() if name not in NOT_SETTABLE}


def long_name(option: click.Option) -> str:
    """`max-rows` of `-m/--max-rows`."""
    return max(option.opts, key=len).lstrip("-")


def variables_of(verb: str, option: click.Option) -> list[str]:
    """The environment's variables for an option of a verb, the strongest first."""
    name = long_name(option)
    found = [f"SWARMNODE_{_as_variable(verb)}_{_as_variable(name)}"]
    if name in SHARED - NOT_IN_ENVIRONMENT:
        found.append(f"SWARMNODE_{_as_variable(name)}")
    return found


def unknown_variables(
    names: Collection[str], verb: str, command: click.Command, verbs: Collection[str]
) -> dict[str, str]:
    """Of an environment's names, those that look like ours and mean nothing, with a hint at the nearest one that does
    ("" if none is near). Those of other verbs are not looked at: their options are not known here.
    """
    own = {name for option in settable(command).values() for name in variables_of(verb, option)}
    shared = {PREFIX + _as_variable(name) for name in SHARED - NOT_IN_ENVIRONMENT}
    known = own | shared | OTHER_VARIABLES
    others = tuple(PREFIX + _as_variable(other) + "_" for other in verbs if other != verb)
    unknown = [
        name
        for name in names
        if name.startswith(PREFIX) and name not in known and not name.startswith(others)
    ]
    return {name: nearest(name, known, PREFIX) for name in sorted(unknown)}


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """ "; did you mean NAME?", or "" if none is near. All names begin with `prefix`, which makes none of them near."""
    bare = [other.removeprefix(prefix) for other in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), bare, 1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _as_variable(name: str) -> str:
    return name.replace("-", "_").upper()


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
