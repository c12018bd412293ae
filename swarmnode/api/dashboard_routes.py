"""The page at `/` and its files, and how to join. The events that keep it up to date: api/events_route.

The page is the package's own: no build step, no other host, no inline script. A browser is told so by a strict policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

import segno
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarmnode.api.access import is_loopback_host
from swarmnode.api.answers import refusal
from swarmnode.api.byte_range import is_fresh
from swarmnode.api.event_feed import EventFeed
from swarmnode.api.events_route import EventsRoute
from swarmnode.api.token_guard import TokenGuard
from swarmnode.config import DashboardConfig

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Content-Security-Policy: what peers chose can neither run nor call anybody, even where the page had a fault."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_NOT_SHOWN = (
    "how to join is told to the node's own page and to whoever has its token, on this machine only: "
    "open / in a browser, send Authorization: Bearer TOKEN (`swarmnode identity --token`), or run `swarmnode invite`"
)


@dataclass(frozen=True)
class Invitation:
    """What `swarmnode invite` prints, never with the network's secret in it. `command`: for the other machine."""

    link: str
    command: str
    needs_secret: bool
    """The other machine needs the file of the network's secret, too."""
    is_limited: bool
    """Only nodes on a list are admitted (--allow)."""
    reach: str
    """Who can dial the addresses in the link: `machine`, `network` (this one's own) or `internet`."""
    port: int
    """Where this node listens."""


@dataclass(frozen=True)
class Dashboard:
    """What the routes work with. `invitation` is made anew at each question: a machine's addresses change."""

    feed: EventFeed
    invitation: Callable[[], Invitation | None]
    token: str
    config: DashboardConfig


@dataclass(frozen=True)
class PageFile:
    """A file of the page, in memory."""

    data: bytes
    media_type: str

    @cached_property
    def etag(self) -> str:
        """Stands for the bytes."""
        return f'"{hashlib.sha256(self.data).hexdigest()[:32]}"'


def page_files() -> dict[str, PageFile]:
    """All files of the page by name, read from the package."""
    folder = files("swarmnode").joinpath("data", "dashboard")
    found = {}
    for item in folder.iterdir():
        suffix = item.name[item.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            found[item.name] = PageFile(item.read_bytes(), MEDIA_TYPES[suffix])
    return found


def dashboard_routes(dashboard: Dashboard) -> list[Route]:
    """For the application."""
    pages = _Pages(page_files())
    events = EventsRoute(dashboard.feed, dashboard.config)
    invite = _InviteRoute(dashboard)
    return [
        Route("/", pages.index, methods=["GET"]),
        Route("/dashboard/{name}", pages.file, methods=["GET"]),
        Route("/api/events", events.answer, methods=["GET"]),
        Route("/api/invite", invite.answer, methods=["GET"]),
    ]


class _Pages:
    def __init__(self, known: dict[str, PageFile]) -> None:
        self._files = known

    async def index(self, request: Request) -> Response:
        """The page."""
        return _answer(request, self._files["index.html"])

    async def file(self, request: Request) -> Response:
        """One of its files; 404 for any other name."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            return refusal(404, f"there is no {request.path_params['name'][:80]!r} here", code="unknown_url")
        return _answer(request, found)


def _answer(request: Request, file: PageFile) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if is_fresh(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.media_type)


class _InviteRoute:
    """GET /api/invite: docs/decisions/0037-dashboard.md says who is told."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._guard = TokenGuard(dashboard.token)

    async def answer(self, request: Request) -> Response:
        """200; 403 for who must not be told, 404 if this node cannot be dialled."""
        if not self._may_know(request):
            return refusal(403, _NOT_SHOWN, code="forbidden")
        invitation = self._dashboard.invitation()
        if invitation is None:
            message = "nobody can dial this node: start it with --listen 0.0.0.0:PORT"
            return refusal(404, message, code="not_listening")
        headers = {"cache-control": "no-store", "cross-origin-resource-policy": "same-origin"}
        return JSONResponse(_as_json(invitation), headers=headers)

    def _may_know(self, request: Request) -> bool:
        """A page of ours or the token, and never over a network: who listens there may pass the link on."""
        client = request.client
        if client is None or not is_loopback_host(f"[{client.host}]" if ":" in client.host else client.host):
            return False
        if self._guard.admits(request.headers.getlist("authorization")):
            return True
        return request.headers.getlist("sec-fetch-site") == ["same-origin"]


def _as_json(invitation: Invitation) -> dict[str, Any]:
    """`qr`: the code's rows without a border, a 1 for each dark module."""
    code = segno.make(invitation.link, error="l", micro=False)
    return {
        "link": invitation.link,
        "command": invitation.command,
        "needs_secret": invitation.needs_secret,
        "limited": invitation.is_limited,
        "reach": invitation.reach,
        "port": invitation.port,
        "qr": ["".join("1" if module & 1 else "0" for module in row) for row in code.matrix],
    }
