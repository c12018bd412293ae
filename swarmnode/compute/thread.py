"""One OS thread of the process computes at a time; this is that thread, and the guard that holds everybody to it.

Why: the pool of a ggml built with OpenMP belongs to the thread that calls it, and a second calling thread
makes graphs 30-80 times slower; and graphs, buffers and the threadpool of one device are not locked at
all. So every `Graph.compute` asks `check_compute_thread()`, whichever way ggml was built. An idle ComputeThread may be
stood in for (`stand_in`), where ggml has a pool of its own.

A process without a `ComputeThread` (a benchmark, a test) computes on whichever thread came first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from swarmnode.errors import DeviceError

_guard = threading.Lock()
_owner: threading.Thread | None = None
_owner_ident = 0


def check_compute_thread() -> None:
    """DeviceError if another living OS thread of this process is the one that computes."""
    if threading.get_ident() != _owner_ident:
        _claim(threading.current_thread(), exclusive=False)


def _claim(thread: threading.Thread, *, exclusive: bool) -> None:
    """Make `thread` the owner. An exclusive claim (a ComputeThread) takes over from a thread that merely
    came first.
    """
    global _owner, _owner_ident
    with _guard:
        other = _owner if _owner is not None and _owner is not thread and _owner.is_alive() else None
        if other is not None and (not exclusive or isinstance(other, _Worker)):
            raise DeviceError(
                f"thread {thread.name!r} tried to compute, but {other.name!r} owns ggml in this process; "
                "send the work through its ComputeThread"
            )
        _owner, _owner_ident = thread, thread.ident or 0


def release_compute_thread() -> None:
    """Forget the thread that came first, so that another may compute; a ComputeThread gives up by
    `close()`.
    """
    global _owner, _owner_ident
    with _guard:
        if not isinstance(_owner, _Worker):
            _owner, _owner_ident = None, 0


def _lend(ident: int) -> None:
    """That thread computes now, though the owner stays what it is."""
    global _owner_ident
    with _guard:
        _owner_ident = ident


def _forget(thread: threading.Thread) -> None:
    global _owner, _owner_ident
    with _guard:
        if _owner is thread:
            _owner, _owner_ident = None, 0


class _Worker(threading.Thread):
    """The OS thread of one ComputeThread."""


Job = tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], None]]


class ComputeThread:
    """A dedicated OS thread that runs blocking compute one job after another, in the order of `submit`.

    The queue has no bound of its own: callers (services) bound what they have in flight. A job that
    raises ends itself only; its exception is the result handed to `on_done`.
    """

    def __init__(self, name: str = "swarmnode-compute") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._computing = threading.Lock()
        """Held while a job runs, here or in place of this thread."""
        self._closed = False
        self._claimed = threading.Event()
        self._failure: DeviceError | None = None
        self._worker = _Worker(target=self._run, name=name, daemon=True)
        self._worker.start()
        self._claimed.wait()
        if self._failure is not None:
            self._closed = True
            raise self._failure

    def submit(self, fn: Callable[..., Any], *args: Any, on_done: Callable[[Any], None]) -> None:
        """Run `fn(*args)` on the thread, then call `on_done(result)` or `on_done(exception)` there.

        `on_done` must be short and must not raise: it hands the result to the caller's world (for trio:
        `token.run_sync_soon`). DeviceError if the thread was closed.
        """
        with self._lock:
            if self._closed:
                raise DeviceError("the compute thread is closed")
            self._jobs.put((fn, args, on_done))

    @contextmanager
    def stand_in(self) -> Iterator[bool]:
        """Inside the block the calling thread computes in place of this one: True. False if that has something to do.

        Saves two hops between threads. Not with a ggml built with OpenMP, see above. Jobs submitted meanwhile wait.
        """
        if self._closed or not self._jobs.empty() or not self._computing.acquire(blocking=False):
            yield False
            return
        try:
            _lend(threading.get_ident())
            yield True
        finally:
            _lend(self._worker.ident or 0)
            self._computing.release()

    def close(self) -> None:
        """Finish the jobs already submitted, then end the thread. Calling it again does nothing."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                self._jobs.put(None)
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def _run(self) -> None:
        try:
            _claim(self._worker, exclusive=True)
        except DeviceError as failure:
            self._failure = failure
            return
        finally:
            self._claimed.set()
        try:
            while (job := self._jobs.get()) is not None:
                self._run_job(job)
                del job  # do not keep arrays alive while waiting for the next job
        finally:
            with self._computing:  # whoever stands in lends the right back first
                _forget(self._worker)

    def _run_job(self, job: Job) -> None:
        fn, args, on_done = job
        try:
            with self._computing:
                result = fn(*args)
        except BaseException as error:  # it travels: the caller raises it where it waits
            result = error
        on_done(result)  # who hears of it may stand in at once
