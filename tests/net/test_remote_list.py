"""Lists on the web and in DNS, from servers on loopback: bounds, redirections, copies."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request

import dns.message
import dns.resolver
import dns.rrset
import pytest

from swarmnode.config import BootstrapConfig
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.download import _Redirects, fetch_url
from swarmnode.net.remote_list import fetch_dns, fetch_lists, is_remote

CONFIG = BootstrapConfig(timeout_s=2.0, stall_timeout_s=1.0)
ADDRESS = PeerAddress(NodeKey.from_seed(bytes(32)).node_id, "host", 1)


class _Site(BaseHTTPRequestHandler):
    """A list, and everything that may be wrong with one."""

    release = threading.Event()
    """Ends the answers that never come."""

    def do_GET(self) -> None:
        bodies = {
            "/list": f"{ADDRESS}\n".encode(),
            "/large": b"#" * (1024 * 1024 + 1),
            "/binary": b"\xff\xfe",
        }
        moves = {"/moved": "/list", "/loop": "/loop", "/file": "file:///etc/passwd"}
        path = self.path.partition("?")[0]
        if path in bodies:
            self._answer(bodies[path])
        elif path in moves:
            self._redirect(moves[path])
        elif path == "/silent":
            self.release.wait()
        elif path == "/slow":
            self._drip()
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Not to standard error."""

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def _redirect(self, place: str) -> None:
        self.send_response(302)
        self.send_header("Location", place)
        self.end_headers()

    def _drip(self) -> None:
        """A byte at a time, each in time, for ever."""
        self.send_response(200)
        self.end_headers()
        while not self.release.wait(0.1):
            self.wfile.write(b"#")


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what these tests are about."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with _Quiet(("127.0.0.1", 0), _Site) as server:
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        _Site.release.set()
        server.shutdown()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("path", ["/list", "/moved"])
def test_a_list_is_fetched(site: str, path: str) -> None:
    assert fetch_url(site + path, CONFIG) == f"{ADDRESS}\n"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/missing", "404"),
        ("/large", "over 1 MiB"),
        ("/binary", "not UTF-8"),
        ("/silent", "timed out"),
        ("/slow", "too slow"),
        ("/loop", "infinite loop"),
        ("/file", "is not allowed"),
    ],
)
def test_what_is_no_list_is_refused_in_bounded_time(site: str, path: str, reason: str) -> None:
    """Whoever is silent or slow would go on for ever: that it ends, and why, is the bound."""
    with pytest.raises((OSError, UsageError), match=reason):
        fetch_url(site + path, CONFIG)


def test_a_redirection_never_leaves_tls() -> None:
    headers = HTTPMessage()
    for old, new, is_fine in (
        ("https://a/x", "https://b/y", True),
        ("http://a/x", "https://b/y", True),
        ("http://a/x", "http://b/y", True),
        ("https://a/x", "http://b/y", False),
        ("http://a/x", "ftp://b/y", False),
    ):
        expectation = contextlib.nullcontext() if is_fine else pytest.raises(URLError, match="sent on to")
        with expectation:
            request = _Redirects().redirect_request(Request(old), io.BytesIO(), 302, "", headers, new)
            assert request is not None
            assert request.full_url == new


@pytest.mark.parametrize("url", ["http://", "http://[", "https://127.0.0.1:1/x", "http://127.0.0.1:x/"])
def test_urls_that_lead_nowhere(url: str) -> None:
    with pytest.raises((OSError, UsageError)):
        fetch_url(url, CONFIG)


def test_all_are_fetched_at_once(tmp_path: Path) -> None:
    sources = [f"http://host/{number}" for number in range(20)]
    everybody = threading.Barrier(len(sources))

    def fetch(source: str, config: BootstrapConfig) -> str:
        everybody.wait()  # for ever, if one comes after the other
        if source.endswith("19"):
            return str(ADDRESS)
        raise OSError("nothing there")

    found = fetch_lists(sources, tmp_path, replace(CONFIG, timeout_s=60.0), fetch)
    assert [item.source for item in found] == sources
    assert found[-1].peers == (ADDRESS,)
    assert not any(item.is_usable for item in found[:-1])


def test_one_that_never_ends_is_left_behind(tmp_path: Path) -> None:
    hang = threading.Event()

    def fetch(source: str, config: BootstrapConfig) -> str:
        hang.wait()
        raise OSError("too late")

    (found,) = fetch_lists(["https://x"], tmp_path, BootstrapConfig(timeout_s=0.05), fetch)
    hang.set()
    assert found.problem == "no answer within 0.05 s"


def test_a_cache_folder_that_cannot_be_written_is_no_obstacle(site: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = fetch_lists([f"{site}/list"], tmp_path / "file", CONFIG)
    assert found.peers == (ADDRESS,)


def test_what_is_remote() -> None:
    assert all(is_remote(source) for source in ("https://x/y", "http://x", "dns:example.org"))
    assert not any(is_remote(source) for source in ("swarm://x", "list.txt", "dns.txt", "ftp://x"))


class _NameServer:
    """Answers TXT queries of one name on loopback."""

    def __init__(self, records: list[str]) -> None:
        self._records = records
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.resolver = dns.resolver.Resolver(configure=False)
        self.resolver.nameservers = ["127.0.0.1"]
        self.resolver.port = self._socket.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                data, source = self._socket.recvfrom(4096)
            except OSError:
                return
            query = dns.message.from_wire(data)
            reply = dns.message.make_response(query)
            name = query.question[0].name
            if str(name) == "_swarmnode.example.org." and self._records:
                quoted = [f'"{record[:60]}" "{record[60:]}"' for record in self._records]
                reply.answer.append(dns.rrset.from_text(name, 60, "IN", "TXT", *quoted))
            self._socket.sendto(reply.to_wire(), source)


def test_addresses_in_txt_records() -> None:
    server = _NameServer([str(ADDRESS)])
    try:
        assert fetch_dns("example.org", CONFIG, server.resolver) == str(ADDRESS)
        with pytest.raises(UsageError, match="does not contain an answer"):
            fetch_dns("example.com", CONFIG, server.resolver)
        for name in ("", "a..b", "a" * 300):
            with pytest.raises(UsageError):
                fetch_dns(name, CONFIG, server.resolver)
    finally:
        server.close()
