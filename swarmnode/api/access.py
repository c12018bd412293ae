"""Who may use the API: this machine without a key, others with one; web pages only if their origin is allowed.

A page in the user's browser may send requests to loopback, where no key is asked for. A page of another site shows
itself by its `Origin`, or (an image or a script, of which it sees nothing, but which costs us work) by
`Sec-Fetch-Site`; one whose name was made to point at 127.0.0.1 (DNS rebinding) by the `Host` it asks for. A request
that a proxy on this machine passed on comes from loopback, too, but not from this machine: it says so in its headers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnode.api.answers import refusal
from swarmnode.services.api_keys import PREFIX, ApiKey
from swarmnode.services.key_limits import Counted, Exhausted, KeyLimits

_HOST = re.compile(
    r"(?:(?P<name>localhost)|(?P<v4>[0-9.]+)|\[(?P<v6>[0-9a-f:.]+)\])(?::[0-9]{1,5})?", re.IGNORECASE
)
_ORIGIN = re.compile(r"https?://(?P<host>.*)", re.IGNORECASE)
_COUNTED = "swarmnode.counted"
"""Key of a request's scope: how it counts for its key's limits."""
_PASSED_ON = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
OPEN_PATHS = frozenset({"/health"})
"""For load balancers: tells nothing but that somebody listens."""


def _no_key(key: str) -> bool:
    return False


def _no_entry(key: str) -> ApiKey | None:
    return None


@dataclass(frozen=True)
class Access:
    """The rules. `admits`: whether this is a key; `origins`: of web pages that need none on this machine; `is_public`:
    whether the API listens to other machines; `entry`: what is known of a key, if it may have limits, which `limits`
    keeps count of.
    """

    admits: Callable[[str], bool] = _no_key
    origins: Collection[str] = ()
    is_public: bool = False
    entry: Callable[[str], ApiKey | None] = _no_entry
    limits: KeyLimits | None = None


@dataclass(frozen=True)
class Refused:
    """Why a request is refused."""

    status: int
    reason: str
    code: str


class AccessGuard:
    """ASGI middleware of all routes: 401 without the key that is needed, 403 for what comes from web pages."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        refused = refusal_of(scope, self._access) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else None
        answer = refusal(refused.status, refused.reason, code=refused.code, headers=headers)
        await answer(scope, receive, send)


class LimitGuard:
    """ASGI middleware of one route, whose requests count for the limits of keys: 429 for a key that has asked as much
    as it may.

    Of a route, not of paths: which spellings of a path reach it only the router knows (`/v1/completions%0A` does).
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the request until the last of its answer is sent, or refuse it. As one answer: how many it asks for
        stands in its body, and whoever reads that calls `count_answers`."""
        limits, key = self._access.limits, _key_of(Headers(scope=scope))
        entry = None if limits is None or key is None else self._access.entry(key)
        if limits is None or entry is None:
            await self._app(scope, receive, send)
            return
        with ExitStack() as running:
            counted = running.enter_context(limits.request(entry))
            if not isinstance(counted, Exhausted):
                await self._app({**scope, _COUNTED: counted}, receive, partial(_send, send, running))
                return
        await _exhausted(counted)(scope, receive, send)


def count_answers(scope: Scope, n_answers: int) -> Response | None:
    """Count this request as so many answers from now on; its refusal if the key may not have them. None, too, where
    nothing is counted."""
    counted: Counted | None = scope.get(_COUNTED)
    exhausted = None if counted is None else counted.answers(n_answers)
    return None if exhausted is None else _exhausted(exhausted)


def _exhausted(why: Exhausted) -> Response:
    wait_s = why.retry_after_s
    if wait_s is None:
        return refusal(400, why.reason)
    message, headers = f"{why.reason}; try again in {wait_s} s", {"Retry-After": str(wait_s)}
    return refusal(429, message, "rate_limit_error", "rate_limit_exceeded", headers)


async def _send(send: Send, running: ExitStack, message: Message) -> None:
    """Send a part of an answer. With the last one the request counts no more, and before it is sent: who has all of an
    answer may ask again at once, long before the application has returned.
    """
    if message["type"] == "http.response.body" and not message.get("more_body", False):
        running.close()
    await send(message)


def refusal_of(scope: Scope, access: Access) -> Refused | None:
    """Why a request is refused; None if it is not."""
    headers = Headers(scope=scope)
    key = _key_of(headers)
    if key is not None and access.admits(key):
        return None
    if key is not None and key.startswith(PREFIX):
        return Refused(
            401, "this API key is not known here (any more); `swarmnode key new` makes one", "invalid_api_key"
        )
    if access.is_public and scope["path"] in OPEN_PATHS:
        return None
    if not _is_local(scope, headers):
        return Refused(
            401,
            "from another machine the API needs a key, as the header Authorization: Bearer KEY; whoever runs the "
            "backbone makes one with `swarmnode key new`",
            "invalid_api_key",
        )
    reason = _page_reason(headers, access.origins)
    return Refused(403, reason, "forbidden_host") if reason else None


def _key_of(headers: Headers) -> str | None:
    """What one header `Authorization: Bearer KEY` has; None without, or with several."""
    values = headers.getlist("authorization")
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the request was made on this machine; not known counts as not."""
    client = scope.get("client")
    if client is None or any(name in headers for name in _PASSED_ON):
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _page_reason(headers: Headers, allowed: Collection[str]) -> str:
    """Why a request without a key comes from a page that may send none; "" if it does not."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or not is_loopback_host(hosts[0]):
        return (
            "without a key the Host of a request must be localhost, 127.0.0.1 or [::1]; with one "
            "(`swarmnode key new`) it does not matter"
        )
    other = "requests of web pages of other origins are not answered; `swarmnode backbone --cors ORIGIN` allows one"
    for origin in origins:
        found = _ORIGIN.fullmatch(origin)
        if origin not in allowed and (found is None or not is_loopback_host(found["host"])):
            return other
    if not origins and "cross-site" in headers.getlist("sec-fetch-site"):
        return other
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
