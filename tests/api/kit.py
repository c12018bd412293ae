"""For tests over real sockets."""

from __future__ import annotations

from collections.abc import Callable

import trio


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; TooSlowError after 20 s."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - what happens in Hypercorn's tasks cannot wake us
            await trio.sleep(0.01)
