"""Keeps web pages out: a page in the user's browser may send requests to loopback, where the API has no keys.

A page of another site shows itself by its `Origin`, or (an image or a script, of which it sees nothing, but which costs
us work) by `Sec-Fetch-Site`; one whose name was made to point at 127.0.0.1 (DNS rebinding) by the `Host` it asks for.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from swarmnode.api.answers import refusal

_HOST = re.compile(
    r"(?:(?P<name>localhost)|(?P<v4>[0-9.]+)|\[(?P<v6>[0-9a-f:.]+)\])(?::[0-9]{1,5})?", re.IGNORECASE
)
_OTHER_ORIGIN = "requests of web pages of other origins are not answered"
_ORIGIN = re.compile(r"https?://(?P<host>.*)", re.IGNORECASE)


class LoopbackGuard:
    """ASGI middleware: 403 for requests that do not ask for this machine by a loopback name, or come from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        reason = refusal_of(scope["headers"]) if scope["type"] == "http" else ""
        if reason:
            await refusal(403, reason, code="forbidden_host")(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def refusal_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Why a request with these headers is refused; "" if it is not."""
    found_headers: dict[bytes, list[str]] = {b"host": [], b"origin": [], b"sec-fetch-site": []}
    for name, value in headers:
        if (known := found_headers.get(name.lower())) is not None:
            known.append(value.decode("latin-1"))
    hosts, origins, sites = found_headers.values()
    if len(hosts) != 1 or not is_loopback_host(hosts[0]):
        return "the Host of a request must be localhost, 127.0.0.1 or [::1]: the API serves this machine only"
    for origin in origins:
        found = _ORIGIN.fullmatch(origin)
        if found is None or not is_loopback_host(found["host"]):
            return _OTHER_ORIGIN
    if not origins and "cross-site" in sites:
        return _OTHER_ORIGIN
    return ""


def is_loopback_host(text: str) -> bool:
    """Whether `host` or `host:port` names this machine without a look-up."""
    found = _HOST.fullmatch(text)
    if found is None:
        return False
    if found["name"]:
        return True
    try:
        return ipaddress.ip_address(found["v4"] or found["v6"]).is_loopback
    except ValueError:
        return False
