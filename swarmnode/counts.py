"""How many of what, in words for people. Below all rooms: errors of every one of them say such things."""

from __future__ import annotations


def counted(count: int, what: str, many: str | None = None) -> str:
    """The number and the word for it: 1 row, 2 rows, 0 rows. `many`: the plural, if it is not `what` and an s."""
    return f"{count} {what if count == 1 else many or f'{what}s'}"
