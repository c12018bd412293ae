"""GET of a small text over http(s), with bounds, by the standard library. Blocks; runs in a thread of its own."""

from __future__ import annotations

import ssl
import time
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib import request
from urllib.error import URLError

from swarmnode import __version__
from swarmnode.config import BootstrapConfig
from swarmnode.errors import UsageError
from swarmnode.net.list_file import MAX_LIST_BYTES

SCHEMES = ("https://", "http://")
READ_BYTES = 64 * 1024


def fetch_url(url: str, config: BootstrapConfig) -> str:
    """GET a text of at most 1 MiB. Raises OSError or UsageError.

    Proxies of the environment are used. Redirections never lead from https to http, nor to other schemes.
    """
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(context=ssl.create_default_context()),
        request.HTTPDefaultErrorHandler(),
        _Redirects(),
        request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    deadline_s = time.monotonic() + config.timeout_s
    headers = {"User-Agent": f"swarmnode/{__version__}", "Accept": "text/plain"}
    data = bytearray()
    try:
        with opener.open(request.Request(url, headers=headers), timeout=config.stall_timeout_s) as response:
            while chunk := response.read1(READ_BYTES):
                data += chunk
                if len(data) > MAX_LIST_BYTES:
                    raise UsageError("over 1 MiB")
                if time.monotonic() > deadline_s:
                    raise UsageError("too slow")
    except (HTTPException, ValueError) as error:  # ValueError: no URL
        raise UsageError(str(error) or type(error).__name__) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError("not UTF-8 text") from None


class _Redirects(request.HTTPRedirectHandler):
    """At most ten, as urllib has it."""

    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> request.Request | None:
        allowed = SCHEMES[:1] if req.full_url.startswith("https://") else SCHEMES
        if not newurl.startswith(allowed):
            raise URLError(f"sent on to {newurl[:100]}, which is not {' or '.join(allowed)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
