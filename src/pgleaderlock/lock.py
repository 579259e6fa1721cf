"""`LeaderLock`: one role, no tables, one dedicated connection.

What it does not promise, first. A lock has no fencing token: a leader that is cut off from everything but the outside
world can still act there until it notices. `is_leader` narrows that to a trust window (health_interval_s +
health_timeout_s after the last good probe was sent); who must never act twice needs an epoch and a gate.

What it does: at most one session of one database holds the lock; a leader that falls silent loses it at the server
after `session_lease_s`; the loss of the session is noticed when the socket closes.

Imports `_lifecycle`, `_session`, `_conninfo`, `_callbacks`, `config`, `retry`, `keys`, `models`, `errors`, `_clock`,
`_jitter`, `_logging`.
"""

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypedDict, TypeVar, Unpack

from psycopg import AsyncConnection

from pgleaderlock._borrowed import BorrowedSession
from pgleaderlock._callbacks import CallbackRegistry
from pgleaderlock._clock import BOOT_CLOCK, Clock
from pgleaderlock._config_duration import positive_s
from pgleaderlock._conninfo import ConnectionSettings, Dsn, check_dsn, default_application_name
from pgleaderlock._fsm import Input
from pgleaderlock._jitter import JITTER
from pgleaderlock._lifecycle import Lifecycle, LifecycleSettings
from pgleaderlock._logging import get_logger
from pgleaderlock._session import DedicatedSession, Session
from pgleaderlock.errors import ConfigurationError, LockError, ShutdownError
from pgleaderlock.keys import DEFAULT_NAMESPACE, check_key_pair, key_pair
from pgleaderlock.models import Callback, ErrorCallback, LockState, StateChangeCallback
from pgleaderlock.retry import ExponentialBackoff, RetryStrategy

__all__ = ["LeaderLock"]

T = TypeVar("T")
CallbackT = TypeVar("CallbackT", bound=Callback)
StateChangeCallbackT = TypeVar("StateChangeCallbackT", bound=StateChangeCallback)
ErrorCallbackT = TypeVar("ErrorCallbackT", bound=ErrorCallback)

# PostgreSQL keeps its timeouts as 32-bit milliseconds.
LEASE_S_MAX = (2**31 - 1) / 1000
LEASE_INTERVALS = 3
# An exception that leaves the `async with` block must not be held up for ever by a callback that hangs.
EXIT_TIMEOUT_S = 10.0
# After the connection was cut, the task only has to fold up.
FORCED_END_S = 5.0


class LockOptions(TypedDict, total=False):
    """The constructor's keyword options, for those who pass them on."""

    retry_strategy: RetryStrategy | None
    health_interval_s: float
    health_timeout_s: float | None
    reconnect_grace_s: float | None
    session_lease_s: float | None
    standby_wait_s: float
    auto_reacquire: bool
    allow_pooler: bool
    shutdown_event: asyncio.Event | None
    connect_fn: Callable[[], Awaitable[AsyncConnection[Any]]] | None


class LeaderLock:
    """Competes for one advisory lock, and says who leads. See the module's first lines for what it does not promise."""

    _clock: Clock = BOOT_CLOCK
    _rng = JITTER

    def __init__(
        self,
        dsn: Dsn,
        key1: int,
        key2: int,
        *,
        retry_strategy: RetryStrategy | None = None,
        health_interval_s: float = 5.0,
        health_timeout_s: float | None = None,
        reconnect_grace_s: float | None = None,
        session_lease_s: float | None = None,
        standby_wait_s: float = 0.0,
        auto_reacquire: bool = True,
        allow_pooler: bool = False,
        shutdown_event: asyncio.Event | None = None,
        connect_fn: Callable[[], Awaitable[AsyncConnection[Any]]] | None = None,
    ) -> None:
        keys = check_key_pair(key1, key2)
        interval_s = positive_s("health_interval_s", health_interval_s)
        timeout_s = interval_s if health_timeout_s is None else positive_s("health_timeout_s", health_timeout_s)
        trust_s = interval_s + timeout_s
        lease_s = _lease_s(session_lease_s, interval_s, trust_s)
        if reconnect_grace_s is not None:
            positive_s("reconnect_grace_s", reconnect_grace_s)
        if standby_wait_s != 0:
            positive_s("standby_wait_s", standby_wait_s)
        for what, flag in (("auto_reacquire", auto_reacquire), ("allow_pooler", allow_pooler)):
            if not isinstance(flag, bool):
                raise ConfigurationError(f"{what} must be True or False, not {flag!r}")
        if retry_strategy is not None and (
            isinstance(retry_strategy, type) or not isinstance(retry_strategy, RetryStrategy)
        ):
            raise ConfigurationError("retry_strategy needs a method next_delay_s(ctx): see pgleaderlock.retry")
        if shutdown_event is not None and not isinstance(shutdown_event, asyncio.Event):
            raise ConfigurationError(f"shutdown_event must be an asyncio.Event, not {type(shutdown_event).__name__}")
        if standby_wait_s and allow_pooler:
            raise ConfigurationError("standby_wait_s cannot be used behind a pooler: drop it, or connect without one")
        if connect_fn is None:
            check_dsn(dsn)
        elif not callable(connect_fn):
            raise ConfigurationError(f"connect_fn must be an async function, not {type(connect_fn).__name__}")
        elif standby_wait_s:
            raise ConfigurationError("standby_wait_s needs our own connection: drop it or drop connect_fn")
        self._dsn = dsn
        self._connect_fn = connect_fn
        self._shutdown_event = shutdown_event
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._allow_pooler = allow_pooler
        self._label = f"{key1}/{key2}"
        self._settings = LifecycleSettings(
            keys=keys,
            strategy=_own_copy(retry_strategy or ExponentialBackoff()),
            health_interval_s=interval_s,
            trust_s=trust_s,
            reconnect_grace_s=reconnect_grace_s,
            standby_wait_s=standby_wait_s,
            auto_reacquire=auto_reacquire,
        )
        self._log = get_logger("pgleaderlock").bind(key1=key1, key2=key2)
        self._registry = CallbackRegistry()
        self._run: Lifecycle | None = None
        self._task: asyncio.Task[None] | None = None
        _locks.add(self)

    @classmethod
    def for_name(
        cls, dsn: Dsn, name: str, *, namespace: str = DEFAULT_NAMESPACE, **options: Unpack[LockOptions]
    ) -> Self:
        """A lock known by a name instead of a pair of keys; takes the same options as the constructor."""
        lock = cls(dsn, *key_pair(name, namespace), **options)
        lock._label = name
        lock._log = lock._log.bind(lock=name)
        return lock

    # --- Lifecycle

    async def start(self) -> None:
        """Begin to compete, in a task of its own. Does nothing if the lock is running already."""
        while self._task is not None and not self._task.done() and self.state is LockState.STOPPED:
            if self._run is not None and self._run.inside_work():
                break  # called from on_stopped: the old run only waits for this callback to return
            await asyncio.wait([self._task])
        if self.state is not LockState.STOPPED:
            return
        self._run = run = Lifecycle(
            self._settings, self._connect, self._registry, clock=self._clock, rng=self._rng, log=self._log
        )
        run.begin()
        self._task = asyncio.create_task(run.run(), name="pgleaderlock lifecycle")
        self._task.add_done_callback(lambda _: run.finish())
        if self._shutdown_event is not None:
            relay = asyncio.create_task(self._relay(self._shutdown_event, run), name="pgleaderlock shutdown_event")
            self._task.add_done_callback(lambda _: relay.cancel())

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Release the lock, close the connection and end the task. Does nothing if the lock is not running.

        If it takes longer than `timeout_s`, the connection is cut, which frees the lock, and `ShutdownError` is raised.
        Called from a callback or from inside `lead`'s work it only makes the request.
        """
        _check_timeout(timeout_s)
        run, task = self._run, self._task
        if run is None or task is None or task.done():
            return
        run.ask_stop()
        if run.inside_work():
            return
        await asyncio.wait([task], timeout=timeout_s)
        if task.done():
            return
        run.force()
        await asyncio.wait([task], timeout=FORCED_END_S)
        raise ShutdownError(
            f"the lock did not stop within {timeout_s:g} s: the connection was cut to free it; "
            "a callback or a work that does not end is the usual cause"
        )

    async def step_down(self, timeout_s: float | None = None) -> None:
        """Give leadership up on purpose; compete again afterwards if `auto_reacquire` is set.

        If it takes longer than `timeout_s`, the connection is cut, which frees the lock. Does nothing when not leading.
        Called from a callback or from inside `lead`'s work it only makes the request.
        """
        _check_timeout(timeout_s)
        run = self._run
        if run is None or run.driver.state not in (LockState.LEADER, LockState.RELEASING):
            return
        if run.driver.state is LockState.LEADER:
            run.ask_release()
        if run.inside_work():
            return
        term = run.driver.term
        ended = asyncio.ensure_future(self._term_ended(run, term))
        try:
            await asyncio.wait([ended], timeout=timeout_s)
            if not ended.done():
                run.force_release(term)
                await asyncio.wait([ended], timeout=FORCED_END_S)
        finally:
            ended.cancel()

    async def wait_for_leadership(self, timeout_s: float | None = None) -> bool:
        """True as soon as this node leads; False when `timeout_s` is over or the lock has stopped."""
        _check_timeout(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while self.state is not LockState.STOPPED:
                    if self.is_leader:
                        return True
                    assert self._run is not None
                    await asyncio.shield(self._run.driver.next_change())
        except TimeoutError:
            pass
        return False

    async def lead(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run `work` whenever this node leads; return what it returns.

        `work` is cancelled the moment leadership is lost or about to be released, the release waits for its end, and it
        is started again in the next term. What it raises makes this node step down, and is raised here. When it
        returns, leadership is kept until the lock stops. Returns None if the lock is stopped first, on request; raises
        `LockError` if it stopped by itself, because it gave up or lost leadership without `auto_reacquire`.
        """
        if not callable(work):
            raise ConfigurationError(f"lead takes an async function, not {type(work).__name__}: pass it uncalled")
        if self.state is LockState.STOPPED:
            raise LockError("the lock is not running: use `async with lock:` or `await lock.start()` first")
        while await self.wait_for_leadership():
            assert self._run is not None
            if (task := await self._run.works.run(work)) is None:
                continue
            if task.cancelled() or task.exception() is not None:
                await self.step_down()
            return task.result()
        assert self._run is not None
        driver = self._run.driver
        if driver.stopping or driver.last_input is Input.RELEASE_SUCCEEDED:
            return None
        raise LockError(f"the lock has stopped by itself: {self.last_error or 'the retry strategy gave up'}")

    # --- Context manager

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        await self.shutdown(None if exc_type is None else EXIT_TIMEOUT_S)

    # --- State

    @property
    def state(self) -> LockState:
        """Where the lock stands. It follows the lock at the server as far as this node knows."""
        return self._run.driver.state if self._run is not None else LockState.STOPPED

    @property
    def is_leader(self) -> bool:
        """Does this node lead, as far as it may still believe so? Decided by the clock at the moment it is asked."""
        run = self._run
        return run is not None and run.driver.state is LockState.LEADER and self._clock.now() < run.trusted_until

    @property
    def last_error(self) -> Exception | None:
        """Why the lock last failed, lost or stopped; None if nothing has gone wrong since `start`."""
        return self._run.driver.last_error if self._run is not None else None

    # --- Event registration: each returns the function unchanged, so that all of them serve as decorators

    def on_acquired(self, fn: CallbackT) -> CallbackT:
        """This node leads now."""
        self._registry.add("on_acquired", fn)
        return fn

    def on_released(self, fn: CallbackT) -> CallbackT:
        """Leadership was given up on purpose."""
        self._registry.add("on_released", fn)
        return fn

    def on_lost(self, fn: CallbackT) -> CallbackT:
        """Leadership was lost, or an attempt broke off with an error."""
        self._registry.add("on_lost", fn)
        return fn

    def on_acquire_failed(self, fn: CallbackT) -> CallbackT:
        """Somebody else holds the lock."""
        self._registry.add("on_acquire_failed", fn)
        return fn

    def on_state_change(self, fn: StateChangeCallbackT) -> StateChangeCallbackT:
        """The state has changed: `(from_state, to_state)`."""
        self._registry.add("on_state_change", fn)
        return fn

    def on_error(self, fn: ErrorCallbackT) -> ErrorCallbackT:
        """The database failed, or a callback did: `(error)`."""
        self._registry.add("on_error", fn)
        return fn

    def on_stopped(self, fn: CallbackT) -> CallbackT:
        """The lock has stopped. The last callback of a run."""
        self._registry.add("on_stopped", fn)
        return fn

    # --- Inside

    def _begin_anew_in_child(self) -> None:
        """In a forked child: the parent's run goes on in the parent alone, and this process may begin one of its own.

        The copies are kept: their finalizers would run clean-up of the parent's in the child.
        """
        _of_parents.append((self._task, self._run))
        self._task = self._run = None

    async def _connect(self) -> Session:
        if self._connect_fn is not None:
            return await BorrowedSession.open(self._connect_fn, self._timeout_s)
        settings = ConnectionSettings(
            application_name=default_application_name(self._label),
            statement_timeout_s=self._timeout_s,
            lease_s=self._lease_s,
            allow_pooler=self._allow_pooler,
        )
        return await DedicatedSession.open(self._dsn, settings)

    async def _relay(self, event: asyncio.Event, run: Lifecycle) -> None:
        try:
            await event.wait()
        except RuntimeError as error:  # somebody has waited for it on another loop: nobody can on this one
            self._log.error("shutdown_event_unusable", error=error)
            run.driver.last_error = ConfigurationError(f"shutdown_event cannot be waited for: {error}")
        run.ask_stop()

    async def _term_ended(self, run: Lifecycle, term: int) -> None:
        while run.driver.term == term and run.driver.state in (LockState.LEADER, LockState.RELEASING):
            await asyncio.shield(run.driver.next_change())


def _own_copy(strategy: RetryStrategy) -> RetryStrategy:
    """A strategy with memory must not be shared between locks; one without has no `copy`."""
    copy = getattr(strategy, "copy", None)
    return copy() if callable(copy) else strategy


def _check_timeout(timeout_s: object) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:  # NaN, too
        raise ConfigurationError(f"timeout_s={timeout_s!r} is not usable: give a number of seconds, or None to wait")


def _lease_s(given: float | None, interval_s: float, trust_s: float) -> float:
    default_s = min(LEASE_INTERVALS * interval_s, LEASE_S_MAX)
    lease_s = default_s if given is None else positive_s("session_lease_s", given)
    if lease_s > LEASE_S_MAX:
        raise ConfigurationError(f"session_lease_s={lease_s:g} is too long: PostgreSQL takes {LEASE_S_MAX:.0f} at most")
    if lease_s <= trust_s:
        raise ConfigurationError(
            f"session_lease_s={lease_s:g} must be longer than health_interval_s + health_timeout_s = {trust_s:g}, or "
            "the server drops a healthy leader: raise session_lease_s or lower the others"
        )
    return lease_s


_locks: "weakref.WeakSet[LeaderLock]" = weakref.WeakSet()
_of_parents: list[object] = []


def _let_locks_begin_anew() -> None:
    for lock in list(_locks):
        lock._begin_anew_in_child()  # noqa: SLF001 - it is our own


os.register_at_fork(after_in_child=_let_locks_begin_anew)
