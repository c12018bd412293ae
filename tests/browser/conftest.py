"""One Chromium for all tests here, and pages of a swarm that does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from swarmnode.config import DashboardConfig
from swarmnode.errors import UsageError
from swarmnode.testing.chromium import open_chromium
from swarmnode.testing.many_nodes import ManyNodes
from swarmnode.testing.page_server import PageServer, page_app, served_page

FAST = replace(DashboardConfig(), interval_s=0.05)
"""Changes come at once."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    try:
        with open_chromium() as browser:
            yield browser
    except UsageError as error:
        pytest.fail(str(error))


@dataclass
class Opened:
    """A page, and what went wrong or out of it."""

    page: Any
    server: PageServer
    nodes: ManyNodes
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def goto(self) -> float:
        """Open the page and wait until all is there; milliseconds until the map was on the screen."""
        self.page.goto(f"{self.server.url}/")
        drawn_ms = float(self.page.locator("#map[data-drawn-ms]").get_attribute("data-drawn-ms"))
        self.page.locator("#join-link").wait_for()
        return drawn_ms

    def do(self, change: Any) -> None:
        """Change the swarm, on the server's thread."""
        self.server.do(change)

    @property
    def said(self) -> str:
        """What the map's live region says."""
        return str(self.page.locator("#map-live").text_content())


@contextmanager
def opened(
    chromium: Any, nodes: ManyNodes, config: DashboardConfig = FAST, **context: Any
) -> Iterator[Opened]:
    """A page of these nodes in a context of its own, which must end without a problem."""
    with (
        served_page(page_app(nodes.view, config)) as server,
        watched(chromium, server, nodes, **context) as found,
    ):
        yield found


@contextmanager
def watched(chromium: Any, server: PageServer, nodes: ManyNodes, **context: Any) -> Iterator[Opened]:
    """The same, of a server that runs already."""
    made = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    page = made.new_page()
    page.set_default_timeout(20_000)
    found = Opened(page, server, nodes)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("pageerror", lambda error: found.problems.append(str(error)))
    page.on("console", lambda message: _note(found, message))
    page.on("dialog", lambda dialog: found.problems.append(f"dialog {dialog.message}"))
    try:
        yield found
    finally:
        made.close()
    assert found.problems == []
    assert all(url.startswith(f"{server.url}/") for url in found.requests), found.requests


def _note(found: Opened, message: Any) -> None:
    if message.type in ("error", "warning"):
        found.problems.append(message.text)
