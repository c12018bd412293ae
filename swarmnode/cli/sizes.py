"""Byte sizes as people write them."""

from __future__ import annotations

import math
import re

import click

from swarmnode.errors import UsageError

UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes of "300MB" (10^6), "1.5GiB" (2^30), "512M" (2^20) or "1000B"; raises ValueError otherwise."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write for example 300MB or 1.5GiB")
    n_bytes = math.floor(float(match[1]) * unit)
    if not 0 < n_bytes < 2**50:
        raise ValueError(f"{text!r} is out of range")
    return n_bytes


def check_size(text: str) -> None:
    """UsageError for what `parse_bytes` does not read: for options that are passed on as they were written."""
    try:
        parse_bytes(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def format_bytes(n_bytes: float) -> str:
    """A short decimal form: 1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000 or unit == "GB":
            break
        n_bytes /= 1000
    return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"


class ByteSize(click.ParamType[int]):
    """A click type for `--budget 300MB`."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
