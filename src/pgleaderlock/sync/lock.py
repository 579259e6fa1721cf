"""`LeaderLock` for threads: the lock of `pgleaderlock.lock`, driven on the background loop."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar, Unpack

from pgleaderlock import lock as aio
from pgleaderlock._config.durations import check_timeout
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock.errors import ConfigurationError, DatabaseError, LockError, LockNotAcquired
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.lock import LockOptions
from pgleaderlock.models import LockState
from pgleaderlock.sync import background
from pgleaderlock.sync.leading import Driven, Handover, lead_here

__all__ = ["LeaderLock"]

T = TypeVar("T")
CallbackT = TypeVar("CallbackT", bound=Callable[..., object])


class LeaderLock(Driven):
    """Competes for one advisory lock, and knows whether this process leads. Any thread may use it.

    The names, errors and settings are those of `pgleaderlock.LeaderLock`, whose docstrings say what they promise.
    """

    _aio = aio.LeaderLock

    def __init__(self, dsn: Dsn, key1: int, key2: int, **options: Unpack[LockOptions]) -> None:
        """Check the settings. Nothing is connected before `start`. Options: those of `pgleaderlock.LeaderLock`."""
        self._use(self._aio(dsn, key1, key2, **_checked(options)), f"{key1}/{key2}")

    def _use(self, lock: aio.LeaderLock, name: str) -> None:
        super().__init__(lock=name)
        self._lock, self._name = lock, name
        self._turn = os.getpid(), threading.Lock()

    @classmethod
    def for_name(
        cls, dsn: Dsn, name: str, *, namespace: str = DEFAULT_NAMESPACE, **options: Unpack[LockOptions]
    ) -> Self:
        """A lock with a name instead of a pair of keys."""
        lock = cls.__new__(cls)
        inner = cls._aio.for_name(dsn, name, namespace=namespace, **_checked(options))
        lock._use(inner, name)  # noqa: SLF001 - our own class
        return lock

    # --- Lifecycle

    def start(self) -> None:
        """Start to compete, in the background. Does nothing if the lock is running already.

        Called from `on_stopped`, it only makes the request: the lock starts again when the callback has returned.
        """
        background.close_at_exit(self._lock)
        self._end(self._lock.start)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Release the lock and close the connection. Called from a callback or a work, it only makes the request."""
        self._end(lambda: self._shutdown(timeout_s))

    async def _shutdown(self, timeout_s: float | None = None) -> None:
        try:
            await self._lock.shutdown(timeout_s)
        finally:
            if self._callbacks is not None and self.state is LockState.STOPPED:
                self._callbacks.stop()

    def step_down(self, timeout_s: float | None = None) -> None:
        """Give up leadership; compete again if `auto_reacquire` is set. Does not wait in a callback or a work."""
        self._end(lambda: self._lock.step_down(timeout_s))

    def wait_for_leadership(self, timeout_s: float | None = None) -> bool:
        """True as soon as this process leads; False once `timeout_s` is over or the lock has stopped."""
        return background.call(lambda: self._lock.wait_for_leadership(timeout_s))

    # --- Work

    def lead(self, work: Callable[[threading.Event], T], **options: Any) -> T | None:
        """Run `work(stop)` in this thread whenever this process leads; return what it returns.

        `stop` is set as soon as leadership is lost or about to be released; the release waits until `work` has
        returned. `work` is called again in the next term. The options are those of `pgleaderlock.LeaderLock.lead`.
        """
        return lead_here(self, lambda relay: self._lock.lead(relay, **options), work)

    @contextlib.contextmanager
    def held(self, timeout_s: float | None = None) -> Iterator[threading.Event]:
        """Hold the lock while the block runs: `with lock.held(timeout_s=10) as lost:`.

        Starts the lock if it is not running, and shuts it down afterwards. A lock that was running gives up leadership
        after the block, and does not compete until `held` or `lead` is called again. Raises `LockNotAcquired` if
        another session holds the lock for `timeout_s`, and `DatabaseError` if the database cannot be used. `lost` is
        set if leadership ends inside the block; the end of the block then raises `LockError`. The time to connect
        counts towards the timeout: for a single try, use `acquire_leadership`.

        If several threads share this object, only one at a time is inside the block.
        """
        check_timeout(timeout_s)
        if background.inside(self):
            raise LockError(
                f"this thread holds {self._name!r} already, or is in a callback of it: it would wait for itself"
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._one_at_a_time(timeout_s), self._held(deadline) as lost:
            yield lost

    @contextlib.contextmanager
    def _one_at_a_time(self, timeout_s: float | None) -> Iterator[None]:
        pid, turn = self._turn
        if pid != os.getpid():  # in a forked child: a thread of the parent may have held it
            pid, turn = self._turn = os.getpid(), threading.Lock()
        if not turn.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            raise LockNotAcquired(self._name)
        try:
            yield
        finally:
            turn.release()

    @contextlib.contextmanager
    def _held(self, deadline: float | None) -> Iterator[threading.Event]:
        started = self.state is LockState.STOPPED
        failed_before = self.last_error
        if started:
            self.start()
        handover: Handover[None] = Handover()
        leading = background.submit(lambda: self._lock.lead(handover.work))
        leading.answer.add_done_callback(handover.end)
        turn = None
        try:
            turn = handover.next(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if turn is None:
                error = self.last_error
                if error is not None and error is not failed_before:
                    raise DatabaseError(str(error)) from error
                raise LockNotAcquired(self._name)
            with background.marked(self):
                yield turn.stop
            if turn.stop.is_set():
                raise LockError(f"leadership of {self._name!r} ended inside the block: another process may have led")
        finally:
            leading.cancel(handover.close)
            if started:
                background.call(self._shutdown)
            elif turn is not None:
                background.call(self._lock.step_down)

    # --- State

    @property
    def state(self) -> LockState:
        """The state of the lock, as far as this process knows."""
        return self._lock.state

    @property
    def is_leader(self) -> bool:
        """Whether this process may act as the leader. Decided by the clock at the moment of the call."""
        return self._lock.is_leader

    @property
    def last_error(self) -> Exception | None:
        """Why the lock last failed, lost or stopped; None if nothing has gone wrong since `start`."""
        return self._lock.last_error

    @property
    def work_error(self) -> BaseException | None:
        """The exception of the work of `lead`, until the work is started again; None if it has not failed."""
        return self._lock.work_error

    # --- Event registration: plain functions, called in order on a separate thread

    def on_acquired(self, fn: CallbackT) -> CallbackT:
        """This process leads now."""
        return self._on(self._lock.on_acquired, fn)

    def on_released(self, fn: CallbackT) -> CallbackT:
        """Leadership was given up on purpose."""
        return self._on(self._lock.on_released, fn)

    def on_lost(self, fn: CallbackT) -> CallbackT:
        """Leadership was lost, or an attempt broke off with an error."""
        return self._on(self._lock.on_lost, fn)

    def on_acquire_failed(self, fn: CallbackT) -> CallbackT:
        """Another session holds the lock."""
        return self._on(self._lock.on_acquire_failed, fn)

    def on_state_change(self, fn: CallbackT) -> CallbackT:
        """The state has changed: `(from_state, to_state)`."""
        return self._on(self._lock.on_state_change, fn)

    def on_error(self, fn: CallbackT) -> CallbackT:
        """The database or a callback failed: `(error)`."""
        return self._on(self._lock.on_error, fn)

    def on_stopped(self, fn: CallbackT) -> CallbackT:
        """The lock has stopped. The last callback of a run."""
        return self._on(self._lock.on_stopped, fn)


def _checked(options: LockOptions) -> LockOptions:
    if options.get("shutdown_event") is not None:
        raise ConfigurationError("shutdown_event belongs to an event loop: call shutdown() from any thread instead")
    return options
