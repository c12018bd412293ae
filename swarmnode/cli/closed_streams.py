"""Standard streams that whoever started us has closed (`>&-`)."""

from __future__ import annotations

import os
import sys
from typing import TextIO, cast


def open_closed_streams() -> None:
    """Connect them to the null device.

    Python says None for them, which nothing that prints expects; and the next file or socket would get their number,
    into which a library written in C may print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # as the others are; programs that we start expect them
    os.close(descriptor)
    sys.stdin = sys.stdin or _null("r")
    sys.stdout = sys.stdout or _null("w")
    sys.stderr = sys.stderr or _null("w")


def _null(mode: str) -> TextIO:
    return cast(TextIO, open(os.devnull, mode))
