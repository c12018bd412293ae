"""`swarmnode generate`: what it says when something else, or nothing any more, answers."""

from __future__ import annotations

import socket
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("key", "says"),
    [("", "SWARMNODE_API_KEY, which is not set"), ("k", "the one in SWARMNODE_API_KEY was sent")],
)
def test_where_a_key_is_looked_for_is_said(key: str, says: str) -> None:
    body = b'{"error": {"message": "a key is needed"}}'
    head = b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with answering(head % len(body) + body) as api:
        arguments = ["generate", "The door", "--api", api]
        result = CliRunner().invoke(main, arguments, env={"SWARMNODE_API_KEY": key})
    assert result.exit_code == 1
    assert "swarmnode: a key is needed (" in result.output
    assert says in result.output


def test_closed_standard_streams_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `>&-` in a shell, which leaves None."""
    piece = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece)
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with answering(HEAD % b"text/event-stream" + body) as api:
        main(["generate", "The door", "--api", api], standalone_mode=False)
    streams = [sys.stdin, sys.stdout, sys.stderr]
    for stream in streams:
        stream.close()


def test_numbers_of_closed_streams_are_not_given_to_files() -> None:
    code = (
        "import os; from swarmnode.cli.closed_streams import open_closed_streams as run; run();"
        "run(); assert os.open(os.devnull, os.O_RDONLY) > 2; os.write(1, b'x'); os.write(2, b'x')"
    )
    with subprocess.Popen([sys.executable, "-c", f"import os; os.close(1); os.close(2); {code}"]) as process:
        assert process.wait() == 0
