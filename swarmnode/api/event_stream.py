"""A response of server-sent events that does not outlive its client, nor wait for one that has stalled."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmnode.api.answers import explain, failure
from swarmnode.api.serve import HANG_UP

Event: TypeAlias = dict[str, Any]
Tell: TypeAlias = Callable[[Event], Awaitable[None]]


class EventStream(Response):
    """Sends what `produce` tells, then [DONE].

    The status line waits for the first event, `head_wait_s` at most, so that what fails at once fails with its status;
    a later failure is the last event. `figures` are further headers, looked up then. A client that takes nothing for
    `stalled_s()` seconds is disconnected; one that goes away cancels `produce`.
    """

    def __init__(
        self,
        produce: Callable[[Tell], Awaitable[None]],
        figures: Callable[[], Mapping[str, str]],
        *,
        head_wait_s: float,
        stalled_s: Callable[[], float],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._produce = produce
        self._figures = figures
        self._head_wait_s = head_wait_s
        self._stalled_s = stalled_s
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        tell, told = trio.open_memory_channel[Event | Exception](0)
        async with trio.open_nursery() as nursery, told:
            nursery.start_soon(end_when_gone, receive, nursery.cancel_scope)
            nursery.start_soon(self._end_when_stalled, scope, nursery.cancel_scope)
            nursery.start_soon(self._run, tell)
            first: Event | Exception | None = None
            with trio.move_on_after(self._head_wait_s):
                first = await told.receive()
            if isinstance(first, Exception):
                await failure(first)(scope, receive, send)
            else:
                await self._stream(first, told, send)
            nursery.cancel_scope.cancel()

    async def _run(self, tell: trio.MemorySendChannel[Event | Exception]) -> None:
        async with tell:
            try:
                await self._produce(tell.send)
            except Exception as error:  # whatever it is, the stream ends as it should
                await tell.send(error)

    async def _stream(
        self, first: Event | None, told: trio.MemoryReceiveChannel[Event | Exception], send: Send
    ) -> None:
        self.headers.update(self._figures())
        await self._send(
            send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        if first is not None:
            await self._send(send, _body(first))
        async for event in told:
            await self._send(send, _body(event))
        await self._send(send, {"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._sending_since_s = trio.current_time()
        await send(message)
        self._sending_since_s = None

    async def _end_when_stalled(self, scope: Scope, nursery_scope: trio.CancelScope) -> None:
        """Hypercorn shields what it sends from every deadline, so its connection is ended under it."""
        while True:
            limit_s, now_s = self._stalled_s(), trio.current_time()
            # A time to wait until, not for how long: what is left of a wait may be too short for a clock to show it.
            until_s = (now_s if self._sending_since_s is None else self._sending_since_s) + limit_s
            if now_s >= until_s:
                break
            await trio.sleep_until(min(until_s, now_s + limit_s / 4))
        if hang_up := scope.get("extensions", {}).get(HANG_UP):
            await hang_up()
        nursery_scope.cancel()


async def end_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _body(event: Event | Exception) -> dict[str, Any]:
    value = explain(event)[1] if isinstance(event, Exception) else event
    text = f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}
