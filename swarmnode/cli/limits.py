"""`swarmnode limits`: what a running worker may take, shown or changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click

from swarmnode.cli.checked import Checked
from swarmnode.cli.common import clear_errors, home_option
from swarmnode.cli.control import show_state, tell
from swarmnode.cli.sizes import ByteSize
from swarmnode.schedule.restraint import Hours, OnBattery

ALWAYS = "always"


@click.command("limits")
@click.option("--budget", type=ByteSize(), help="Most memory for experts; at most what it was started with.")
@click.option(
    "--hours",
    type=Checked("A-B", lambda text: text == ALWAYS or Hours.parse(text)),
    multiple=True,
    help="Lend at these hours only; several times. `always` ends it.",
)
@click.option("--on-battery", type=click.Choice(get_args(OnBattery)), help="What to do on battery.")
@click.option("--keep-free", type=ByteSize(), help="Memory that must stay available.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@home_option
@clear_errors
def command(
    budget: int | None,
    hours: tuple[str, ...],
    on_battery: OnBattery | None,
    keep_free: int | None,
    as_json: bool,
    home: Path | None,
) -> None:
    """Show what the worker that runs here may take; with options, change it until the node ends.

    For good, change the options of `swarmnode join`, or the settings file.

    \b
    Example: swarmnode limits --budget 200MB --hours 22:00-07:00
    """
    request: dict[str, Any] = {"budget_bytes": budget, "on_battery": on_battery, "keep_free_bytes": keep_free}
    request = {name: value for name, value in request.items() if value is not None}
    if hours:
        request["hours"] = _hours(hours)
    state = tell(home, do="limits", **request)
    if as_json:
        click.echo(json.dumps(state))
    else:
        show_state(state)


def _hours(texts: tuple[str, ...]) -> list[str]:
    """Checked here already."""
    if ALWAYS in texts:
        if len(texts) > 1:
            raise click.UsageError("--hours always goes alone")
        return []
    return [str(Hours.parse(text)) for text in texts]
