"""`swarmnode generate`: what it says when something else, or nothing any more, answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from swarmnode.cli import main

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """HOST:PORT where a request is answered so, and the connection then closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = listener.accept()[0]
            with connection:
                request = b""
                while not request.endswith(b"}"):
                    request += connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "does not answer as a backbone's API does"),  # as a backbone's swarm port does
        (b"\x00\x01swarm", "does not answer as a backbone's API does"),
        (HEAD % b"text/html" + b"0\r\n\r\n", "does not answer as a backbone's API does"),
        (HEAD % b"text/event-stream", "the answer broke off: the backbone was stopped"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404, but not as a backbone does"),
    ],
)
def test_something_else_answers(answer: bytes, says: str) -> None:
    with answering(answer) as api:
        result = CliRunner().invoke(main, ["generate", "The door", "--api", api])
    assert result.exit_code == 1
    assert says in result.output
    assert len(result.output.splitlines()) == 1
