"""How many files and sockets the process may have open: a limit that most systems set low, and let be raised."""

from __future__ import annotations

import logging

try:
    import resource
except ImportError:  # Windows, which has no such limit for sockets
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

WANTED = 4096
"""512 peers on two connections each, the API, and the files of a model that is split, several times over."""


def raise_limit() -> None:
    """Ask for `WANTED`, or what the system allows at most; less is no error."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.info("the limit of open files stays at %d: %s", soft, error)


def most_descriptors() -> int:
    """The limit now; `WANTED` where there is none."""
    if resource is None:
        return WANTED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft
