"""The dashboard's routes on a real socket, served from a thread: for browsers, which do not run in our event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import trio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from swarmnode.api import serve
from swarmnode.api.access import Access, AccessGuard
from swarmnode.api.dashboard_routes import Dashboard, Invitation, dashboard_routes
from swarmnode.api.event_feed import EventFeed
from swarmnode.config import DashboardConfig
from swarmnode.services.dashboard_view import DashboardView
from swarmnode.services.runners import Runner, Threads

TOKEN = "t" * 43
LINK = "swarm://aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dyp3gfme@192.168.1.5:4790?network=swarmnode"
INVITATION = Invitation(
    LINK, f'swarmnode join --budget 300MB --bootstrap "{LINK}"', False, False, "network", 4790
)
START_TIMEOUT_S = 10.0


def page_app(
    view: DashboardView,
    config: DashboardConfig | None = None,
    *,
    threads: Runner | None = None,
    invitation: Callable[[], Invitation | None] = lambda: INVITATION,
    extra: tuple[Route, ...] = (),
) -> Starlette:
    """An application of the page's routes alone, behind the guard as a backbone's are."""
    config = config or DashboardConfig()
    feed = EventFeed(view.look, view.history, threads or Threads(2), config.interval_s)
    dashboard = Dashboard(feed, invitation, TOKEN, config)
    return Starlette(
        routes=[*dashboard_routes(dashboard), *extra],
        middleware=[Middleware(AccessGuard, access=Access())],
    )


class PageServer:
    """A thread that serves an application on a port of its own."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._is_ready = threading.Event()
        self._scope: trio.CancelScope | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True)
        self.url = ""

    def do(self, function: Callable[[], object]) -> None:
        """Call it on the server's trio thread, which owns all that is looked at."""
        assert self._token is not None
        trio.from_thread.run_sync(function, trio_token=self._token)

    def start(self) -> None:
        """Returns when it listens."""
        self._thread.start()
        if not self._is_ready.wait(START_TIMEOUT_S):
            raise TimeoutError("the page's server did not start")

    def stop(self) -> None:
        """Returns when all is closed."""
        scope = self._scope
        if scope is not None:
            self.do(scope.cancel)
        self._thread.join(START_TIMEOUT_S)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        with trio.CancelScope() as self._scope:
            async with listener, trio.open_nursery() as nursery:
                await nursery.start(partial(serve.run, self._app, listener))
                self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
                self._is_ready.set()
                await trio.sleep_forever()


@contextmanager
def served_page(app: Starlette) -> Iterator[PageServer]:
    """Serve it while the context is open."""
    server = PageServer(app)
    server.start()
    try:
        yield server
    finally:
        server.stop()
