"""Peers remembered from earlier runs, for the day when the bootstrap nodes are gone.

The file is a bootstrap list as people write them (bootstrap/README.md), with two numbers behind each address:

    swarm://NODEID@host:port  # met 1796025600

`met` stands for a node that proved its key at that address, `heard` for one that others told of; the number is when, in
Unix seconds by this machine's clock. The clock only orders: a wrong one makes a worse choice, nothing else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from swarmnode.config import AddressBookConfig
from swarmnode.errors import StoreError, UsageError
from swarmnode.identity import NodeId
from swarmnode.net.address import PeerAddress
from swarmnode.net.list_file import read_kept
from swarmnode.services.runners import Runner
from swarmnode.state_file import replace_small

log = logging.getLogger(__name__)

_HEAD = "# Peers met in earlier runs. Written by swarmnode; usable as a bootstrap list.\n"
_ENTRY = re.compile(r"(?P<address>\S+)\s+# (?P<how>met|heard) (?P<wall_s>[0-9]{1,12})")


@dataclass
class _Entry:
    """What is remembered of one node."""

    addresses: list[PeerAddress] = field(default_factory=list)
    """The best one first."""
    is_met: bool = False
    seen_s: int = 0


class AddressBook:
    """Nodes and where they are; bounded. No I/O."""

    def __init__(self, config: AddressBookConfig) -> None:
        self.config = config
        self._entries: dict[NodeId, _Entry] = {}
        self.is_changed = False
        """Something is here that is not in the file."""

    def __len__(self) -> int:
        return len(self._entries)

    def met(self, address: PeerAddress, wall_s: float) -> None:
        """The node proved its key at this address."""
        entry = self._entry(address.node_id)
        is_news = not entry.is_met or entry.addresses[:1] != [address]
        if address in entry.addresses:
            entry.addresses.remove(address)
        entry.addresses.insert(0, address)
        self._seen(address.node_id, entry, wall_s, is_met=True, is_news=is_news)

    def heard(self, addresses: Iterable[PeerAddress], wall_s: float) -> None:
        """Others say that nodes are there. Never pushes out a node that was met, nor the address where it was."""
        for address in addresses:
            if address.node_id not in self._entries and not self._has_room_for_hearsay():
                continue
            entry = self._entry(address.node_id)
            is_news = address not in entry.addresses
            if is_news:
                entry.addresses.append(address)
                if len(entry.addresses) > self.config.max_addresses:
                    del entry.addresses[1 if entry.is_met else 0]
            self._seen(address.node_id, entry, wall_s, is_met=entry.is_met, is_news=is_news)

    def to_dial(self) -> tuple[PeerAddress, ...]:
        """Whom to try, met before heard of, the latest first; at most `dial_nodes` nodes, all their addresses."""
        ranked = sorted(self._entries.values(), key=_worth, reverse=True)
        return tuple(address for entry in ranked[: self.config.dial_nodes] for address in entry.addresses)

    def encode(self) -> str:
        """The text of the file."""
        lines = [_HEAD]
        for entry in sorted(self._entries.values(), key=_worth, reverse=True):
            how = "met" if entry.is_met else "heard"
            lines += (f"{address}  # {how} {entry.seen_s}\n" for address in entry.addresses)
        return "".join(lines)

    @classmethod
    def decode(cls, text: str, config: AddressBookConfig) -> AddressBook:
        """Read the text of a file. Raises UsageError naming the line."""
        book = cls(config)
        for number, line in enumerate(text.splitlines(), start=1):
            if line.startswith("#") or not line.strip():
                continue
            match = _ENTRY.fullmatch(line.strip())
            if match is None:
                raise UsageError(f"line {number} is none that swarmnode writes")
            try:
                address = PeerAddress.parse(match["address"])
            except UsageError as error:
                raise UsageError(f"line {number}: {error}") from None
            book._read(address, int(match["wall_s"]), match["how"] == "met")
        book.is_changed = False
        return book

    def _read(self, address: PeerAddress, wall_s: int, is_met: bool) -> None:
        entry = self._entry(address.node_id)
        if address not in entry.addresses and len(entry.addresses) < self.config.max_addresses:
            entry.addresses.append(address)
        self._seen(address.node_id, entry, wall_s, is_met=is_met or entry.is_met, is_news=True)

    def _entry(self, node_id: NodeId) -> _Entry:
        return self._entries.setdefault(node_id, _Entry())

    def _seen(self, node_id: NodeId, entry: _Entry, wall_s: float, *, is_met: bool, is_news: bool) -> None:
        del entry.addresses[self.config.max_addresses :]
        self.is_changed |= is_news or wall_s - entry.seen_s >= self.config.precision_s
        entry.is_met = is_met
        entry.seen_s = max(0, int(wall_s))
        while len(self._entries) > self.config.max_nodes:
            others = (node for node in self._entries if node != node_id)
            del self._entries[min(others, key=lambda node: _worth(self._entries[node]))]

    def _has_room_for_hearsay(self) -> bool:
        """Hearsay may fill free places and push out older hearsay."""
        if len(self._entries) < self.config.max_nodes:
            return True
        return any(not entry.is_met for entry in self._entries.values())


def _worth(entry: _Entry) -> tuple[bool, int]:
    return entry.is_met, entry.seen_s


def load_book(path: Path, config: AddressBookConfig) -> AddressBook:
    """The book in a file; an empty one if there is none, or, with a warning, if it cannot be read."""
    if not path.exists():
        return AddressBook(config)
    try:
        return AddressBook.decode(read_kept(path, "the address book"), config)
    except UsageError as error:
        log.warning("the peers met in earlier runs are forgotten: %s: %s", path, error)
        return AddressBook(config)


def save_book(path: Path, text: str) -> None:
    """Replace the file at once: whoever reads it, or crashes, sees the old or the new one. Raises StoreError."""
    try:
        replace_small(path, text.encode())
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


class AddressBookKeeper:
    """Writes a book to its file now and then, and once more at the end."""

    def __init__(self, book: AddressBook, path: Path, threads: Runner, wall: Callable[[], float]) -> None:
        """`wall`: Unix seconds, time.time."""
        self.book = book
        self._path = path
        self._threads = threads
        self._wall = wall
        self._is_writable = True

    def met(self, address: PeerAddress) -> None:
        """See AddressBook."""
        self.book.met(address, self._wall())

    def heard(self, addresses: Iterable[PeerAddress]) -> None:
        """See AddressBook."""
        self.book.heard(addresses, self._wall())

    async def run(self) -> None:
        """Save every `save_interval_s` until cancelled, then a last time. A disk that is full costs a warning."""
        try:
            while True:
                await trio.sleep(self.book.config.save_interval_s)
                await self.save()
        finally:
            with trio.CancelScope(shield=True):
                await self.save()

    async def save(self) -> None:
        """Write the file if the book has changed."""
        if not self.book.is_changed:
            return
        self.book.is_changed = False
        try:
            await self._threads.run(partial(save_book, self._path, self.book.encode()))
        except StoreError as error:
            if self._is_writable:
                log.warning("peers will not be remembered: %s", error)
            self._is_writable = False
