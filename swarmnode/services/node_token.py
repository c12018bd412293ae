"""The node's token: whoever can read this file of the node's owner may use the node-local HTTP routes."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from swarmnode.errors import StoreError
from swarmnode.state_file import create_small, read_private

TOKEN_BYTES = 32
MAX_TOKEN_FILE_BYTES = 4096
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,256}")


def load_or_create_token(path: Path) -> str:
    """The token in a file (one line, mode 0600), made at the first start.

    Raises StoreError, which names the file, if it cannot be read or written, holds something else or is readable by
    others.
    """
    try:
        if not path.exists():
            create_small(path, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode())
    except OSError as error:
        raise StoreError(f"cannot write the token {path}: {error.strerror}") from error
    return _read(path)


def _read(path: Path) -> str:
    try:
        data, is_private = read_private(path, MAX_TOKEN_FILE_BYTES)
    except OSError as error:
        raise StoreError(f"cannot read the token {path}: {error.strerror}") from error
    if not is_private:
        raise StoreError(f"the token {path} can be read by others; run: chmod 600 {path}")
    text = data.decode("ascii", "replace").strip()
    if _TOKEN.fullmatch(text) is None:
        raise StoreError(f"{path} holds no token; delete it and a new one is made")
    return text
