"""Why the system could not connect, in words for a person: what happened, and what to look at."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from urllib.error import HTTPError, URLError

_REFUSED = "refused: nothing listens at that port (does it run, and is this the port that it prints?)"
_UNREACHABLE = "cannot be reached from here: no network, or no way to that address"
_SILENT = "no answer: a firewall, a wrong address, or a machine that is off"
_UNKNOWN_NAME = "no such name: mistyped, or there is no network to look it up in"
_NO_LOOK_UP = "the name could not be looked up: no network, or its DNS server does not answer"

_BY_NUMBER = {
    errno.ECONNREFUSED: _REFUSED,
    errno.ENETUNREACH: _UNREACHABLE,
    errno.EHOSTUNREACH: _UNREACHABLE,
    errno.ENETDOWN: _UNREACHABLE,
    errno.EADDRNOTAVAIL: _UNREACHABLE,
    errno.ETIMEDOUT: _SILENT,
}
_UNKNOWN = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}


def reason_of(error: BaseException) -> str:
    """Of an OSError (urllib's and trio's wrap others), each reason once; what is none says itself."""
    return "; ".join(dict.fromkeys(_words(leaf) for leaf in _leaves(error)))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """What an attempt at several addresses, or a wrapper, is made of."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    elif isinstance(error, URLError) and isinstance(error.reason, BaseException):
        yield from _leaves(error.reason)
    elif (
        type(error) is OSError
        and error.errno is None
        and isinstance(error.__cause__, OSError | ExceptionGroup)
    ):
        yield from _leaves(error.__cause__)  # trio.open_tcp_stream: all attempts failed
    else:
        yield error


def _words(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return _UNKNOWN_NAME if error.errno in _UNKNOWN else _NO_LOOK_UP
    if isinstance(error, HTTPError):
        return f"status {error.code} ({error.reason})"
    if isinstance(error, URLError):
        return str(error.reason)
    if isinstance(error, OSError) and error.errno is not None:
        known = _BY_NUMBER.get(error.errno) or error.strerror or os.strerror(error.errno)
        return str(known)
    return str(error) or type(error).__name__
