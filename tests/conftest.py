"""Async tests run under trio with a mock clock that jumps over every wait, so no test sleeps.

A test marked `real_time` (tests/process) runs on the real clock. Work in other OS threads is invisible to the mock
clock: tests in one process run blocking work inline (`swarmnode.services.runners.Inline`), not on threads.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import hypothesis
import pytest
import trio
import trio.testing

REAL_LIMIT_S = 600.0
VIRTUAL_LIMIT_S = 100_000.0
"""Longer than any test waits in virtual time, reached within seconds of real time."""


def pytest_configure(config: pytest.Config) -> None:
    # No test is bound to real time: on a busy machine hypothesis' 200 ms an example say nothing about the code.
    hypothesis.settings.register_profile("swarmnode", deadline=None)
    hypothesis.settings.load_profile("swarmnode")
    config.addinivalue_line("markers", "real_time: runs on the real clock")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts what runs in its background so, and processes of tests that are told to stop would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    real = pyfuncitem.get_closest_marker("real_time") is not None
    clock = None if real else trio.testing.MockClock(autojump_threshold=0)
    trio.run(_within, REAL_LIMIT_S if real else VIRTUAL_LIMIT_S, partial(test, **arguments), clock=clock)
    return True


async def _within(limit_s: float, test: Callable[[], Awaitable[None]]) -> None:
    """Run a test; TooSlowError when it waits for something that never comes while timers go on for ever."""
    with trio.fail_after(limit_s):
        await test()
