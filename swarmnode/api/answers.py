"""What goes wrong, as OpenAI's error objects: which error has which status, and that any of them can be sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarmnode.api.forms import error_object
from swarmnode.errors import ContextFullError, SwarmError, UsageError, first_error

log = logging.getLogger(__name__)

WRONG = "invalid_request_error"
CLIENT_GONE = 499
"""Status that nobody reads (nginx's number for it)."""
_CODES = {
    404: "unknown_url",
    405: "method_not_supported",
    408: "request_timeout",
    503: "overloaded",
}


def refusal(
    status: int,
    message: str,
    kind: str = WRONG,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error object with its status."""
    return JSONResponse(error_object(message, kind, code), status, headers)


def explain(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and error object of what an answer ran into. What nobody foresaw is logged, and not told in detail."""
    first = first_error(error)
    match first:
        case ContextFullError():
            return 400, error_object(str(first), WRONG, "context_length_exceeded")
        case UsageError():
            return 400, error_object(str(first), WRONG)
        case SwarmError():
            return 500, error_object(str(first), "server_error")
    log.error("an answer failed", exc_info=error)
    return 500, error_object("the backbone failed; its log says why", "server_error")


def failure(error: Exception) -> Response:
    """The answer that `explain` describes."""
    status, body = explain(error)
    return JSONResponse(body, status)


async def on_http_error(request: Request, error: Exception) -> Response:
    """For Starlette: no such route (404), not with this method (405), or a body that was not waited for (408, 503)."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    code = _CODES.get(error.status_code)
    message = f"{where}: {error.detail}"
    if error.status_code == 404:
        message += f". There are: {', '.join(_routes(request.app))} (docs/api.md, docs/node-api.md)"
    elif allowed := (error.headers or {}).get("Allow"):
        message += f". Use {' or '.join(sorted(set(allowed.split(', ')) - {'HEAD'}))}"
    kind = WRONG if error.status_code < 500 else "server_error"
    return refusal(error.status_code, message, kind, code, error.headers)


def _routes(app: Starlette) -> list[str]:
    """`GET /health` and so on."""
    return [
        f"{method} {route.path_format}"
        for route in app.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]


async def on_gone(request: Request, error: Exception) -> Response:
    """For Starlette: the client went away before it had sent its request; nobody reads the answer."""
    return Response(status_code=CLIENT_GONE)


async def on_crash(request: Request, error: Exception) -> Response:
    """For Starlette: whatever a route raised."""
    return failure(error)
