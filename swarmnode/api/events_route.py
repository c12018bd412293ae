"""GET /api/events: the dashboard's state as server-sent events; a snapshot, then what changed, at a bounded rate.

A reader holds one event at a time, and whoever takes nothing of it is disconnected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmnode.api.answers import refusal
from swarmnode.api.event_feed import EventFeed
from swarmnode.api.serve import HANG_UP
from swarmnode.config import DashboardConfig

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
_HEAD = b"retry: 2000\n\n"
"""A browser that lost the stream asks again after 2 s."""


class EventsRoute:
    """The readers of one feed, bounded in number."""

    def __init__(self, feed: EventFeed, config: DashboardConfig) -> None:
        self.feed = feed
        self.config = config
        self.n_readers = 0
        """Pages that are being kept up to date."""

    async def answer(self, request: Request) -> Response:
        """200 and events until the reader goes; 429 where there are too many."""
        if self.n_readers >= self.config.max_readers and request.method != "HEAD":
            message = f"{self.config.max_readers} pages are kept up to date already; close one"
            return refusal(429, message, "rate_limit_error", "busy", {"Retry-After": str(RETRY_AFTER_S)})
        return _Events(self)


class _Events(Response):
    """Headers, then events, until the client is gone or takes nothing any more."""

    def __init__(self, route: EventsRoute) -> None:
        self._route = route
        self._sending_since_s: float | None = None
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        self._route.n_readers += 1
        try:
            await send(start)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                nursery.start_soon(self._drop_when_stalled, scope, nursery.cancel_scope)
                await self._tell(send)
        finally:
            self._route.n_readers -= 1

    async def _tell(self, send: Send) -> None:
        """A snapshot, then a change a tick; a snapshot again for who took longer than a tick to take one."""
        feed = self._route.feed
        await self._send(send, _HEAD)
        has = 0
        while True:
            tick = await feed.current()
            if tick.number != has:
                is_next = has > 0 and tick.number == has + 1
                await self._send(send, tick.change if is_next else await feed.snapshot(tick))
                has = tick.number
            await trio.sleep_until(tick.at_s + feed.interval_s)

    async def _send(self, send: Send, data: bytes) -> None:
        with self._waiting():
            await send({"type": "http.response.body", "body": data, "more_body": True})

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._sending_since_s = trio.current_time()
        try:
            yield
        finally:
            self._sending_since_s = None

    async def _drop_when_stalled(self, request: Scope, telling: trio.CancelScope) -> None:
        """Hypercorn shields what it sends from cancellation, so a connection is ended under it (api/serve.HANG_UP)."""
        stalled_s = self._route.config.stalled_s
        while True:
            await trio.sleep(stalled_s / 4)
            since_s = self._sending_since_s
            if since_s is not None and trio.current_time() - since_s >= stalled_s:
                log.info("a page that takes nothing of its events is disconnected")
                if hang_up := request.get("extensions", {}).get(HANG_UP):
                    with trio.CancelScope(shield=True):  # its first act tells us that the client is gone
                        await hang_up()
                telling.cancel()
                return


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
