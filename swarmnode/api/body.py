"""The bodies of requests, bounded in bytes each, in bytes all together, and in time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request

from swarmnode.config import ApiConfig
from swarmnode.errors import UsageError


class _Arrival:
    """A body, as far as it has come."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.scope = trio.CancelScope()
        self.is_arriving = True
        self.is_refused = False

    def refuse(self) -> None:
        """Others need its room."""
        self.n_bytes = 0
        self.is_arriving = False
        self.is_refused = True
        self.scope.cancel()


class Bodies:
    """All bodies that arrive, or are worked on."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._arrivals: list[_Arrival] = []

    @property
    def n_bytes(self) -> int:
        """In memory now."""
        return sum(arrival.n_bytes for arrival in self._arrivals)

    @asynccontextmanager
    async def read(self, request: Request, most_bytes: int) -> AsyncIterator[bytes]:
        """All of a body, whose bytes count until the block ends.

        Raises UsageError as soon as it is larger than `most_bytes`, and HTTPException: 408 if it comes too slowly
        (ApiConfig.body_wait_s), 503 if there are too many bytes of all together and this one has most of them.
        """
        arrival = _Arrival()
        self._arrivals.append(arrival)
        try:
            yield await self._whole(arrival, request, most_bytes)
        finally:
            self._arrivals.remove(arrival)

    async def _whole(self, arrival: _Arrival, request: Request, most_bytes: int) -> bytes:
        config = self._config
        body = bytearray()
        until_s = arrival.scope.deadline = trio.current_time() + config.body_wait_s
        with arrival.scope:
            async with aclosing(request.stream()) as pieces:
                async for piece in pieces:
                    if arrival.is_refused:  # just when this piece came
                        await trio.sleep_forever()  # which is cancelled
                    body += piece
                    if len(body) > most_bytes:
                        raise UsageError(f"the body is larger than {most_bytes} bytes")
                    arrival.n_bytes = len(body)
                    arrival.scope.deadline = until_s + len(body) / config.body_bytes_per_s
                    self._make_room()
            arrival.is_arriving = False
        if arrival.is_refused:
            again = {"Retry-After": str(config.retry_after_s)}
            raise HTTPException(503, "more arrives than there is memory for; try again later", again)
        if arrival.scope.cancelled_caught:
            raise HTTPException(408, f"{len(body)} bytes of the body came in time, and it has more")
        return bytes(body)

    def _make_room(self) -> None:
        """Those that have most, and still arrive, go."""
        config = self._config
        while self.n_bytes > config.arriving_bytes:
            arriving = [
                item for item in self._arrivals if item.is_arriving and item.n_bytes > config.short_body_bytes
            ]
            if not arriving:
                return
            max(arriving, key=lambda item: item.n_bytes).refuse()
