"""Types of options whose values are looked at before a verb runs.

So `config show` refuses what the verb would refuse, and what is wrong ends as wrong usage does, naming the option, the
variable or the key of the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from swarmnode.errors import LocalError, UsageError


class Checked(click.ParamType[str]):
    """A text that `check` reads without a UsageError. The verb gets the text itself, and reads it again.

    What else goes wrong while it is looked at is no fault of the value: the verb will meet it, and say so.
    """

    def __init__(self, name: str, check: Callable[[str], object]) -> None:
        self.name = name
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            self._check(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)
        except LocalError:
            pass
        return str(value)


class Finite(click.types.FloatParamType):
    """A number: neither infinity nor nan, which compares with nothing and is no JSON."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number; write for example 0.7", param, ctx)
        return number


class UserPath(click.Path):
    """A Path of which a `~` at the beginning is the user's folder, as in the settings file: shells leave it in
    `--home=~/node`, and systemd and docker leave it in variables."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), param, ctx)


class CheckedFile(UserPath):
    """A file that `read` reads, or finds fit to be written, without a UsageError. The verb gets its path."""

    def __init__(self, read: Callable[[Path], object]) -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        try:
            self._read(Path(str(path)))
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return path


def check_device(name: str) -> None:
    """UsageError if this machine has no ggml device of that name. Loads ggml, as the verb is about to."""
    from swarmnode.compute.devices import list_devices

    known = [info.name for info in list_devices()]
    if name not in known:
        raise UsageError(f"no device named {name!r}; this machine has: {', '.join(known) or 'none'}")
