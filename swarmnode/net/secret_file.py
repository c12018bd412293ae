"""The secret of a private network in a file: one line of text that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from swarmnode.errors import StoreError, UsageError
from swarmnode.wire.secret import NetworkSecret

MAX_SECRET_FILE_BYTES = 4096


def read_secret(path: Path) -> NetworkSecret:
    """The secret in a file. Raises UsageError naming the file; others must not be able to read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read the network secret {path}: {error.strerror}") from error
    if os.name == "posix" and mode & 0o077:
        raise UsageError(f"the network secret {path} can be read by others; run: chmod 600 {path}")
    try:
        return NetworkSecret.parse(data.decode("utf-8-sig").strip())
    except UnicodeDecodeError:
        raise UsageError(f"{path} holds no network secret") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def create_secret(path: Path) -> NetworkSecret:
    """Write a new secret to a new file. Raises StoreError; a file that is there already is left as it is."""
    secret = NetworkSecret.generate()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secret.text + "\n")
    except FileExistsError:
        raise StoreError(f"{path} is there already; a secret is never overwritten") from None
    except OSError as error:
        raise StoreError(f"cannot write the network secret {path}: {error.strerror}") from error
    return secret
