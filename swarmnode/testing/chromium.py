"""A headless Chromium through playwright, kept from every other host: for tests and benchmarks of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swarmnode.errors import UsageError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO_GET = (
    "no Chromium was found. Debian: apt-get install chromium; Fedora: dnf install chromium; macOS: brew install --cask "
    "chromium; elsewhere: python -m playwright install chromium. One at another place: CHROMIUM=/path make test-browser"
)
ARGUMENTS = [
    "--no-sandbox",  # it has to run as root in containers, and opens nothing but our own page
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def find_chromium() -> str | None:
    """Its program: what CHROMIUM names, else one on the PATH; None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_chromium() -> Iterator[Any]:
    """A playwright Browser (its synchronous API). UsageError, with what to do, if there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise UsageError("playwright is not installed: pip install '.[browser]'") from None
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        except Error as error:
            reason = HOW_TO_GET if find_chromium() is None else f"{find_chromium()} does not start"
            raise UsageError(f"{reason} ({str(error).splitlines()[0]})") from error
        yield browser
        browser.close()
