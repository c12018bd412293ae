"""The dashboard's routes on a real socket, served from a thread: for browsers, which do not run in our event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
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
START_TIMEOUT_S = 60.0


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
    """A thread that serves an application on loopback. `open_app`: opened and closed there, around the serving."""

    def __init__(self, open_app: Callable[[], AbstractAsyncContextManager[Starlette]], port: int = 0) -> None:
        self._open_app = open_app
        self._port = port
        self._is_ready = threading.Event()
        self._scope: trio.CancelScope | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def do(self, function: Callable[[], object]) -> None:
        """Call it on the server's trio thread, which owns all that is looked at."""
        assert self._token is not None
        trio.from_thread.run_sync(function, trio_token=self._token)

    def start(self) -> None:
        """Returns when it listens; TimeoutError if that takes too long."""
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
        with trio.CancelScope() as self._scope:
            async with self._open_app() as app:
                (listener,) = await trio.open_tcp_listeners(self._port, host="127.0.0.1")
                async with listener, trio.open_nursery() as nursery:
                    await nursery.start(partial(serve.run, app, listener))
                    self.port = listener.socket.getsockname()[1]
                    self._is_ready.set()
                    await trio.sleep_forever()


@contextmanager
def served(
    open_app: Callable[[], AbstractAsyncContextManager[Starlette]], port: int = 0
) -> Iterator[PageServer]:
    """Serve it while the context is open."""
    server = PageServer(open_app, port)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def served_page(app: Starlette, port: int = 0) -> Iterator[PageServer]:
    """Serve an application that needs nothing opened."""

    @asynccontextmanager
    async def as_it_is() -> AsyncIterator[Starlette]:
        yield app

    with served(as_it_is, port) as server:
        yield server
