"""What the system's errors become in words."""

from __future__ import annotations

import errno
import os
import socket
from email.message import Message
from urllib.error import HTTPError, URLError

import pytest

from swarmnode.net.reasons import reason_of


def failed(*parts: OSError) -> OSError:
    """As trio.open_tcp_stream raises it."""
    error = OSError("all attempts to connect to host:1 failed")
    error.__cause__ = ExceptionGroup("all attempts", parts)
    return error


def system(number: int) -> OSError:
    return OSError(number, f"Error connecting to ('192.0.2.1', 1): {os.strerror(number)}")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (failed(system(errno.ECONNREFUSED)), "refused: nothing listens"),
        (failed(system(errno.EHOSTUNREACH)), "cannot be reached"),
        (failed(system(errno.ETIMEDOUT)), "no answer"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "no such name"),
        (URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure")), "the name could not be looked up"),
        (URLError(system(errno.ECONNREFUSED)), "refused"),
        (URLError("sent on to ftp://x"), "sent on to ftp://x"),
        (HTTPError("http://x", 404, "Not Found", Message(), None), "status 404 (Not Found)"),
        (PermissionError(errno.EPERM, "Operation not permitted"), "Operation not permitted"),
        (TimeoutError("timed out"), "timed out"),
        (OSError(), "OSError"),
    ],
)
def test_each_error_has_words(error: Exception, says: str) -> None:
    reason = reason_of(error)
    assert reason.startswith(says)
    assert "Errno" not in reason
    assert "urlopen" not in reason


def test_each_reason_is_told_once() -> None:
    same = failed(system(errno.ECONNREFUSED), system(errno.ECONNREFUSED), system(errno.ENETUNREACH))
    refused, unreachable = reason_of(same).split("; ")
    assert refused.startswith("refused")
    assert unreachable.startswith("cannot be reached")
