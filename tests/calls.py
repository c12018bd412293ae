"""How much a function does, counted: the same on every machine, however busy that is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

Trace: TypeAlias = Callable[[FrameType, str, Any], Any]


def count_calls(function: Callable[[], object]) -> int:
    """Calls of Python and C functions that `function` makes. What a C function does by itself is not seen."""
    n_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return n_calls


def count_lines(function: Callable[[], object]) -> int:
    """Lines of Python that `function` runs, of all it calls: loops that call nothing count, too."""
    n_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Trace:
        nonlocal n_lines
        n_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return n_lines
