"""Keys of the HTTP API: who holds one may use it from elsewhere. The file has their hashes only.

A key is 32 random bytes, so one round of SHA-256 hides it: nobody guesses among 2^256, however fast they hash. (Slow
hashes are for passwords, which people choose.)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmnode.errors import StoreError, UsageError
from swarmnode.state_file import read_small, replace_small
from swarmnode.weights.file_lock import wait_lock

PREFIX = "sk-swarm-"
KEY_BYTES = 32
MAX_KEYS = 1024
MAX_FILE_BYTES = 1 << 20
MAX_CONCURRENT = 1024
MAX_PER_MINUTE = 10_000
MAX_CREATED_S = 1 << 33
"""Year 2242: later ones some calendars cannot show."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_SHOWN = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{4}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ApiKey:
    """One key as the file has it. `shown`: its beginning, by which people tell keys apart; `hash`: SHA-256, hex."""

    name: str
    shown: str
    hash: str
    created_s: int
    max_concurrent: int | None = None
    """Answers at a time; None: as many as the API takes."""
    per_minute: int | None = None
    """Answers that begin within any minute."""

    def check(self) -> None:
        """Raises ValueError, which says what is expected, unless all fields are as `new_key` makes them: people change
        the file, and what is in it is printed.
        """
        for what, form, value in (
            ("name", _NAME, self.name),
            ("beginning", _SHOWN, self.shown),
            ("hash", _HASH, self.hash),
        ):
            if not isinstance(value, str) or form.fullmatch(value) is None:
                raise ValueError(f"{value!r:.80} is no {what} of a key")
        if type(self.created_s) is not int or not 0 <= self.created_s < MAX_CREATED_S:
            raise ValueError(f"created_s {self.created_s!r:.80} is no time in seconds since 1970")
        for what, limit, most in (
            ("max_concurrent", self.max_concurrent, MAX_CONCURRENT),
            ("per_minute", self.per_minute, MAX_PER_MINUTE),
        ):
            if limit is not None and (type(limit) is not int or not 1 <= limit <= most):
                raise ValueError(f"{what} {limit!r:.80} is no limit of 1 to {most}")


def read_keys(path: Path) -> list[ApiKey]:
    """All keys; none if there is no such file. StoreError, which names it, if it cannot be read or is another."""
    try:
        data = read_small(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read the API keys {path}: {error.strerror}") from error
    try:
        keys = [ApiKey(**entry) for entry in json.loads(data)["keys"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise StoreError(f"{path} holds no API keys; delete it and make new ones") from None
    try:
        for key in keys:
            key.check()
    except ValueError as error:
        raise StoreError(f"{path}: {error}; correct it, or delete the file and make new keys") from None
    return keys


def check_name(name: str) -> None:
    """UsageError if no key can have that name."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is no name of a key: use letters, digits, _, -, . and @, 64 at most")


def new_key(
    path: Path,
    name: str,
    now_s: int | None = None,
    *,
    max_concurrent: int | None = None,
    per_minute: int | None = None,
) -> str:
    """Make a key and keep its hash; the key itself is returned, and nowhere else. Raises UsageError or StoreError."""
    check_name(name)
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    created_s = int(time.time()) if now_s is None else now_s
    entry = ApiKey(name, key[: len(PREFIX) + 4], _hash(key), created_s, max_concurrent, per_minute)
    try:
        entry.check()
    except ValueError as error:
        raise UsageError(
            f"a key may have 1 to {MAX_CONCURRENT} answers at a time and 1 to {MAX_PER_MINUTE} a minute"
        ) from error
    with _changing(path):
        keys = read_keys(path)
        if any(key.name == name for key in keys):
            raise UsageError(f"there is a key named {name} already: give another --name, or revoke it first")
        if len(keys) >= MAX_KEYS:
            raise UsageError(f"there are {MAX_KEYS} keys already: revoke some")
        _write(path, [*keys, entry])
    return key


def revoke_key(path: Path, name: str) -> None:
    """It is good for nothing from now on. Raises UsageError if there is none of that name, StoreError."""
    with _changing(path):
        keys = read_keys(path)
        kept = [key for key in keys if key.name != name]
        if len(kept) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise UsageError(f"there is no key named {name}; there are: {known}")
        _write(path, kept)


class KeyRing:
    """The keys in a file that other processes change: a key is good, or no longer, without a restart."""

    def __init__(self, path: Path, on_error: Callable[[StoreError], None] = lambda error: None) -> None:
        """Raises what `read_keys` raises. `on_error`: a file that has become unreadable, and holds no key then."""
        self._path = path
        self._on_error = on_error
        self._stamp = _stamp(path)
        self._keys = _by_hash(path)

    def __len__(self) -> int:
        self._refresh()
        return len(self._keys)

    def admits(self, key: str) -> bool:
        """Whether it is one of them."""
        return self.entry(key) is not None

    def entry(self, key: str) -> ApiKey | None:
        """What the file has of it. What is compared are hashes, of which no timing tells a useful part."""
        self._refresh()
        return self._keys.get(_hash(key))

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _by_hash(self._path)
        except StoreError as error:
            self._keys = {}
            self._on_error(error)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Another one when the file was replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_ino, found.st_size


def _by_hash(path: Path) -> dict[str, ApiKey]:
    return {key.hash: key for key in read_keys(path)}


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Who changes the file reads and writes it alone: of two at once, one would write what the other has not seen.

    Blocks while another process does. StoreError.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(f"cannot write the API keys {path}: {error.strerror}") from error
    try:
        try:
            wait_lock(descriptor)
        except OSError as error:
            raise StoreError(f"cannot lock the API keys, {lock}: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, keys: list[ApiKey]) -> None:
    entries = [{name: value for name, value in asdict(key).items() if value is not None} for key in keys]
    data = json.dumps({"keys": entries}, indent=1).encode() + b"\n"
    try:
        replace_small(path, data)
    except OSError as error:
        raise StoreError(f"cannot write the API keys {path}: {error.strerror}") from error
