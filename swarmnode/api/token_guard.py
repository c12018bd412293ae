"""Keeps the node-local routes to whoever has the node's token (services/node_token), also on loopback."""

from __future__ import annotations

import functools
import hmac
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from swarmnode.api.answers import refusal

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_REASON = (
    "this route needs the node's token, as the header Authorization: Bearer TOKEN; "
    "`swarmnode identity --token` prints it"
)


class TokenGuard:
    """Wraps routes: 401 without the right token, before anything else is looked at."""

    def __init__(self, token: str) -> None:
        self._expected = token.encode("ascii")

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        @functools.wraps(endpoint)
        async def guarded(request: Request) -> Response:
            if not self.admits(request.headers.getlist("authorization")):
                return refusal(401, _REASON, code="unauthorized", headers={"WWW-Authenticate": "Bearer"})
            return await endpoint(request)

        return guarded

    def admits(self, values: list[str]) -> bool:
        """Whether these values of the header `Authorization` are one, and right. Takes as long for any wrong token."""
        if len(values) != 1:
            return False
        scheme, _, token = values[0].partition(" ")
        given = token.strip().encode("utf-8", "replace")
        return hmac.compare_digest(given, self._expected) and scheme.lower() == "bearer"
