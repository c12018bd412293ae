"""Talking to the node that runs in a folder: what `pause`, `resume`, `leave` and `limits` share."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from swarmnode.cli.common import folders_of, say
from swarmnode.cli.sizes import format_bytes
from swarmnode.counts import counted
from swarmnode.net.control_socket import ask_control


def tell(home: Path | None, **request: Any) -> dict[str, Any]:
    """The running node's answer. ConnectionLostError if none runs there, UsageError if it refuses."""
    return ask_control(folders_of(home).control_socket, request)


def same_node(verb: str, home: Path | None) -> str:
    """The line that says another word to the node that was asked: without its --home it would go to another one."""
    return f"swarmnode {verb}" if home is None else f"swarmnode {verb} --home {shlex.quote(str(home))}"


def show_state(state: dict[str, Any]) -> None:
    """What a worker holds to now, for people."""
    say(f"node       {state['node']}, a {state['role']} on {state['device']}")
    least_bytes = state.get("least_bytes", 0)  # not told by older nodes
    is_empty = state["allowed_bytes"] < least_bytes
    say(
        f"now        {'paused: ' + state['paused'] if state['paused'] else 'not lending' if is_empty else 'lending'}"
    )
    held = f"{counted(state['n_experts'], 'expert')}, {format_bytes(state['held_bytes'])}"
    in_memory = format_bytes(state["memory_bytes"])
    beside = "" if in_memory == format_bytes(state["held_bytes"]) else f", in {in_memory} of memory"
    if is_empty and not state["n_experts"]:
        say(f"holds      nothing: {too_small(state['allowed_bytes'], least_bytes, state['model'])}")
    else:
        say(f"holds      {held} of {state['model']}{beside}" if state["model"] else "holds      nothing yet")
    say(f"budget     {_budget(state)}")
    say(f"hours      {', '.join(state['hours']) or 'always'}")
    say(f"on battery {state['on_battery']}{_battery(state)}")
    say(f"keeps free {format_bytes(state['keep_free_bytes'])} of memory{_available(state)}")
    say(f"helped     {counted(state['tokens'], 'token')} with {counted(state['rows'], 'row')}")


def too_small(budget_bytes: int, least_bytes: int, model: str) -> str:
    """Why a worker holds not one expert."""
    return (
        f"{format_bytes(budget_bytes)} are too few for one expert of {model}, which takes "
        f"{least_bytes:,} bytes: give it a larger budget, or end it"
    )


def _budget(state: dict[str, Any]) -> str:
    text = format_bytes(state["budget_bytes"])
    if state["budget_bytes"] < state["most_bytes"]:
        text += f" (started with {format_bytes(state['most_bytes'])})"
    if state["memory"]:
        text += f"; {format_bytes(state['allowed_bytes'])} now: {state['memory']}"
    return text


def _battery(state: dict[str, Any]) -> str:
    if state["battery_percent"] is None:
        return " (no battery is seen)"
    return f" (battery {state['battery_percent']} %{', in use' if state['running_on_battery'] else ''})"


def _available(state: dict[str, Any]) -> str:
    available = state["available_bytes"]
    return (
        " (the system does not tell)" if available is None else f"; {format_bytes(available)} are available"
    )
