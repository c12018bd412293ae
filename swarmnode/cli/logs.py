"""Logs to standard error: lines for people, or one JSON object a line (`--log-json`). No secret gets into either."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

EVENTS = "swarmnode.events"
"""The logger of what a node would tell the person who started it."""

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)

_HIDDEN = "[hidden]"
_SECRETS = (
    re.compile(r"(?i)([?&]secret=)[^&\s\"']+"),  # in an invitation's link
    re.compile(r"(?i)(\bbearer\s+)[^\s\"']+"),  # the node's token, an API key
    re.compile(r"\b(sk-)[A-Za-z0-9_-]{8,}"),  # an API key by itself
)


def logging_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`-v` and `--log-json`."""
    function = click.option(
        "--log-json", is_flag=True, help="One JSON object a line, to standard error, in place of all lines."
    )(function)
    return click.option("-v", "--verbose", count=True, help="Log more (-vv: everything).")(function)


def set_up_logging(verbose: int, *, as_json: bool = False) -> None:
    """Warnings by default; -v information, -vv everything. To standard error. As JSON, events are always told."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else Lines())
    logging.basicConfig(level=_LEVELS[min(verbose, 2)], handlers=[handler])
    logging.getLogger(EVENTS).setLevel(logging.INFO)


def hide_secrets(text: str) -> str:
    """The text without network secrets (of links), tokens and API keys."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<1>{_HIDDEN}", text)
    return text


class Lines(logging.Formatter):
    """`time level logger: message`, with secrets hidden."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return hide_secrets(super().format(record))


class JsonLines(logging.Formatter):
    """`{"time": ISO 8601 in UTC, "level", "logger", "message"}`, and what an event or an error adds."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return hide_secrets(json.dumps(entry, ensure_ascii=False, default=str))


def log_event(event: object) -> None:
    """An event of services/reports as a log entry: `event` is its name, its plain fields beside it."""
    name = type(event).__name__
    logging.getLogger(EVENTS).info(name, extra={"fields": {"event": name, **fields_of(event)}})


def fields_of(event: object) -> dict[str, Any]:
    """The fields of a dataclass that JSON has a form for; addresses as text, what has a name by that, any other
    dataclass by its own fields."""
    if not dataclasses.is_dataclass(event):
        return {}
    return {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, tuple | list | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    return str(value) if type(value).__str__ is not object.__str__ else fields_of(value) or None
