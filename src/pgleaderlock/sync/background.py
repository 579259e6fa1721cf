"""One event loop per process, in a background thread, for callers that have no loop.

The thread starts with the first call and ends with the interpreter. Locks and elections that still run on the loop then
are shut down first, so that a follower need not wait for a lease. A forked child gets its own loop on demand.

A call blocks the caller's thread. If it is interrupted there (Ctrl-C), its coroutine is cancelled and waited for, so
nothing goes on in the background.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from pgleaderlock._base.logging import get_logger
from pgleaderlock.errors import LockError, PgLeaderLockError

__all__ = ["Call", "CallbackThread", "Closeable", "call", "close_at_exit", "inside", "marked", "request", "submit"]

T = TypeVar("T")
# The time at the interpreter's end to shut down what still runs, and again to end the thread.
EXIT_S = 5.0

_log = get_logger("pgleaderlock")


class Closeable(Protocol):
    """An object that is shut down at the end of the interpreter."""

    async def shutdown(self, timeout_s: float | None = None) -> None: ...


class Call(Generic[T]):
    """A coroutine on the background loop, for a thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, main: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._loop = loop
        self._main = main
        self._pid = os.getpid()
        self._task: asyncio.Task[T] | None = None
        self.answer: Future[T] = Future()
        """The result or exception of the coroutine, set only when the coroutine has ended."""
        loop.call_soon_threadsafe(self._begin)

    def result(self) -> T:
        """Wait for the result. If the wait is interrupted, cancel the coroutine and wait for its end."""
        try:
            return self.answer.result()
        except BaseException:
            if not self.answer.done():
                self.cancel()
            raise

    @property
    def is_of_parent(self) -> bool:
        """Is this a forked child? The call never ends there."""
        return os.getpid() != self._pid

    def cancel(self, then: Callable[[], None] | None = None) -> None:
        """Cancel the coroutine, call `then`, and wait for the coroutine's end. Does nothing in a forked child, because
        the coroutine runs in the parent.
        """
        if self.is_of_parent:
            return
        self._loop.call_soon_threadsafe(self._cancel)
        if then is not None:
            then()
        self.answer.exception()

    def _begin(self) -> None:
        try:
            coroutine = self._main()
        except Exception as error:  # such as an unknown argument
            self.answer.set_exception(error)
            return
        self._task = task = self._loop.create_task(coroutine, name="pgleaderlock sync call")
        task.add_done_callback(self._pass_on)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _pass_on(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            self.answer.set_exception(LockError("the call was cancelled: the background loop has ended"))
        elif (error := task.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(task.result())


class _Background:
    """The loop and its thread."""

    def __init__(self) -> None:
        self._of_parents: list[object] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """The state in a new process, without loop and thread."""
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self.closeables: weakref.WeakSet[Closeable] = weakref.WeakSet()

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._ended:
                raise LockError("the program is ending: nothing can be begun any more")
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=loop.run_forever, name="pgleaderlock sync", daemon=True)
                self._thread.start()
            return self._loop

    def begin_anew_in_child(self) -> None:
        """In a forked child the thread does not exist, and the loop is the parent's: keep the copy, so that no
        finalizer closes it."""
        self._of_parents.append((self._loop, self._thread, self.closeables))
        self.begin_anew()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def end(self) -> None:
        with self._starting:
            self._ended = True
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(PgLeaderLockError, TimeoutError):
            Call(loop, self._close_all).answer.result(2 * EXIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(EXIT_S)
        if not thread.is_alive():
            loop.close()

    async def _close_all(self) -> None:
        ends = (closeable.shutdown(EXIT_S) for closeable in list(self.closeables))
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, Exception):
                _log.warning("not_closed_at_exit", error=outcome)


_background = _Background()
os.register_at_fork(after_in_child=_background.begin_anew_in_child)
atexit.register(_background.end)


def submit(main: Callable[[], Coroutine[Any, Any, T]]) -> Call[T]:
    """Start a coroutine on the background loop; returns a call that this thread can wait for."""
    if _background.is_own_thread():
        raise LockError("this would block the loop that serves it: call it from another thread")
    return Call(_background.loop(), main)


def call(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the background loop, and wait for it in this thread."""
    return submit(main).result()


def request(main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run a coroutine on the background loop without waiting for it. A failure is logged."""
    submit(main).answer.add_done_callback(_log_failure)


def _log_failure(answer: "Future[Any]") -> None:
    if (error := answer.exception()) is not None:
        _log.error("request_failed", error=error)


def close_at_exit(closeable: Closeable) -> None:
    """Shut the object down when the interpreter ends, if it still runs then."""
    _background.closeables.add(closeable)


# --- Threads that must not wait for themselves

_here = threading.local()
os.register_at_fork(after_in_child=lambda: vars(_here).clear())  # the marks of the forking thread


def inside(owner: object) -> bool:
    """Is this thread running a callback of the owner, or the work of its `lead`?"""
    return any(other is owner for other in getattr(_here, "owners", ()))


@contextlib.contextmanager
def marked(owner: object) -> Iterator[None]:
    """Mark this thread as running the owner's callback or work while the block runs."""
    before = getattr(_here, "owners", ())
    _here.owners = (*before, owner)
    try:
        yield
    finally:
        _here.owners = before


class CallbackThread:
    """Runs the callbacks of one owner in order on a thread, so that a slow one never blocks the background loop."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._calls: SimpleQueue[tuple[Callable[..., object], tuple[object, ...], Future[None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def stop(self) -> None:
        """Call it on the background loop. Callbacks queued before still run; later ones start a new thread."""
        self._calls.put(None)
        self._thread = None

    def wrap(self, fn: Callable[..., object]) -> Callable[..., Coroutine[Any, Any, None]]:
        """A coroutine function that has `fn` called on this thread."""

        async def on_thread(*args: object) -> None:
            self._ensure_running()
            ended: Future[None] = Future()
            self._calls.put((fn, args, ended))
            await asyncio.wrap_future(ended)

        on_thread.__qualname__ = getattr(fn, "__qualname__", repr(fn))
        return on_thread

    def _ensure_running(self) -> None:
        """Called on the background loop only, like `stop`: so the thread is never started twice, nor while it ends."""
        if self._thread is None or not self._thread.is_alive():  # in a forked child it is not alive
            self._calls = SimpleQueue()
            self._thread = threading.Thread(target=self._run, name="pgleaderlock callbacks", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        calls = self._calls
        while (call_ := calls.get()) is not None:
            fn, args, ended = call_
            if not ended.set_running_or_notify_cancel():
                continue
            try:
                with marked(self._owner):
                    fn(*args)
            except BaseException as error:
                ended.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                ended.set_result(None)
