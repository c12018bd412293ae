"""What a node tells between its goodbye and its end: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from swarmnode.services.reports import Leaving, Stopped

T = TypeVar("T")


def until_leaving(show: Callable[[T], None]) -> Callable[[T], None]:
    """`show`, but nothing behind Leaving except Stopped: that peers go, that nothing covers experts any more and the
    like is what leaving means."""
    is_leaving = False

    def show_until(event: T) -> None:
        nonlocal is_leaving
        if not is_leaving or isinstance(event, Stopped):
            show(event)
        is_leaving |= isinstance(event, Leaving)

    return show_until
