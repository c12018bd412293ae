"""Bootstrap lists that are not on this machine: a text at an http(s) URL, or the TXT records of a DNS name.

A list that could be fetched and read is kept in the cache folder; when it cannot be fetched the next time, that copy is
used. Everything is fetched at once, in threads of its own, and waited for a bounded time: it is used before trio runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.config import BootstrapConfig
from swarmnode.errors import UsageError
from swarmnode.net.address import PeerAddress
from swarmnode.net.list_file import MAX_LIST_BYTES, parse_entries, read_kept
from swarmnode.state_file import replace_small

if TYPE_CHECKING:
    import dns.resolver

URL_SCHEMES = ("https://", "http://")
DNS_SCHEME = "dns:"
DNS_LABEL = "_swarmnode"

Fetch = Callable[[str, BootstrapConfig], str]
"""From a source to the text of a list; raises OSError or UsageError saying why not."""


def is_remote(source: str) -> bool:
    """Whether this names a list of this file's kinds."""
    return source.startswith((*URL_SCHEMES, DNS_SCHEME))


@dataclass(frozen=True)
class RemoteList:
    """What became of one source."""

    source: str
    peers: tuple[PeerAddress, ...] = ()
    problem: str = ""
    """Why it could not be fetched; "" if all went well."""
    is_usable: bool = True
    """False when there is no copy of an earlier time either."""


def fetch_lists(
    sources: Sequence[str], cache: Path, config: BootstrapConfig, fetch: Fetch | None = None
) -> list[RemoteList]:
    """All lists, in order. Takes at most `config.timeout_s`; never raises for what a source does."""
    fetch = fetch_text if fetch is None else fetch
    results: dict[str, RemoteList] = {}

    def work(source: str) -> None:
        results[source] = _fetch(source, cache, config, fetch)

    threads = [threading.Thread(target=work, args=(source,), daemon=True) for source in sources]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + config.timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    late = f"no answer within {config.timeout_s:g} s"
    return [results.get(source) or _from_cache(source, cache, late) for source in sources]


def fetch_text(source: str, config: BootstrapConfig) -> str:
    """The text behind a URL or `dns:` name. Raises OSError or UsageError."""
    if source.startswith(DNS_SCHEME):
        return fetch_dns(source.removeprefix(DNS_SCHEME), config)
    from swarmnode.net.download import fetch_url  # loads TLS, HTTP and e-mail: 5 MB that a phone may not need

    return fetch_url(source, config)


def fetch_dns(name: str, config: BootstrapConfig, resolver: dns.resolver.Resolver | None = None) -> str:
    """The TXT records of `_swarmnode.NAME`, a line each. Raises UsageError, also when the library is not there."""
    try:
        import dns.exception
        import dns.resolver
    except ImportError:
        raise UsageError('dns: needs the extra: pip install "swarmnode[dns]"') from None
    try:
        resolver = _system_resolver() if resolver is None else resolver
        answer = resolver.resolve(f"{DNS_LABEL}.{name}.", "TXT", lifetime=config.stall_timeout_s)
    except dns.exception.DNSException as error:
        raise UsageError(str(error) or type(error).__name__) from None
    text = "\n".join(b"".join(record.strings).decode("utf-8", "replace") for record in answer)
    if len(text) > MAX_LIST_BYTES:
        raise UsageError("over 1 MiB")
    return text


def _system_resolver() -> dns.resolver.Resolver:
    import dns.resolver

    termux = Path(os.environ.get("PREFIX", "/")) / "etc" / "resolv.conf"  # Android has no /etc/resolv.conf
    if os.name == "posix" and termux.is_file():
        return dns.resolver.Resolver(filename=str(termux))
    return dns.resolver.Resolver()


def _fetch(source: str, cache: Path, config: BootstrapConfig, fetch: Fetch) -> RemoteList:
    try:
        text = fetch(source, config)
        peers = _parse(text, source)
    except (OSError, UsageError) as error:
        return _from_cache(source, cache, str(error) or type(error).__name__)
    _keep(_copy_path(source, cache), text)
    return RemoteList(source, peers)


def _from_cache(source: str, cache: Path, problem: str) -> RemoteList:
    path = _copy_path(source, cache)
    try:
        peers = _parse(read_kept(path, "the copy"), source)
    except UsageError:
        return RemoteList(source, (), problem, is_usable=False)
    return RemoteList(source, peers, f"{problem}; its last good copy is used")


def _parse(text: str, source: str) -> tuple[PeerAddress, ...]:
    return tuple(dict.fromkeys(parse_entries(text, source, PeerAddress.parse)))


def _copy_path(source: str, cache: Path) -> Path:
    return cache / "bootstrap" / f"{hashlib.sha256(os.fsencode(source)).hexdigest()[:32]}.txt"


def _keep(path: Path, text: str) -> None:
    """Best effort: a cache folder that cannot be written is no reason not to start."""
    with contextlib.suppress(OSError):
        replace_small(path, text.encode(), sync=False)
