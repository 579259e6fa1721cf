"""`LeaderLock`: one role, no tables, one dedicated connection.

What it does not promise, first. A lock has no fencing token: a leader that is cut off from the database can still act
elsewhere until it notices. `is_leader` limits that to a trust window of health_interval_s + health_timeout_s after the
last successful probe was sent. If nothing may be done twice, use an election, with its epochs and gates.

What it promises: at most one session of a database holds the lock. A silent leader loses it at the server after
`session_lease_s`. This node notices the end of its session when the socket closes.
"""

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypedDict, TypeVar, Unpack

from psycopg import AsyncConnection

from pgleaderlock._base.aio import first_of, within
from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock._config.durations import check_timeout, positive_s
from pgleaderlock._config.timing import KEYWORDS, LockTiming, check_flags, combination_misfits, refuse
from pgleaderlock._lock.borrowed import BorrowedSession
from pgleaderlock._lock.callbacks import CallbackRegistry
from pgleaderlock._lock.fsm import Input
from pgleaderlock._lock.lifecycle import Lifecycle, LifecycleSettings
from pgleaderlock._lock.work import Failure, OnFailure, Restarts, error_of
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn, check_dsn, default_application_name
from pgleaderlock._pg.session import DedicatedSession, Session
from pgleaderlock.errors import ConfigurationError, LockError, ShutdownError
from pgleaderlock.keys import DEFAULT_NAMESPACE, check_key_pair, key_pair
from pgleaderlock.models import Callback, ErrorCallback, LockState, StateChangeCallback
from pgleaderlock.retry import JITTER, DefaultRetry, RetryStrategy

__all__ = ["LeaderLock", "check_timeout"]

T = TypeVar("T")
CallbackT = TypeVar("CallbackT", bound=Callback)
StateChangeCallbackT = TypeVar("StateChangeCallbackT", bound=StateChangeCallback)
ErrorCallbackT = TypeVar("ErrorCallbackT", bound=ErrorCallback)
ConnectFn = Callable[[], Awaitable[AsyncConnection[Any]] | AbstractAsyncContextManager[AsyncConnection[Any]]]

# How long an attempt waits at the server by default. Then the next attempt begins at once, with a try.
STANDBY_WAIT_S = 10.0
# A hanging callback must not delay an exception that leaves the `async with` block for longer than this.
EXIT_TIMEOUT_S = 10.0
# How long the task may take to end after the connection was cut.
FORCED_END_S = 5.0


class LockOptions(TypedDict, total=False):
    """The constructor's keyword options, for code that passes them on."""

    retry_strategy: RetryStrategy | None
    health_interval_s: float
    health_timeout_s: float | None
    reconnect_grace_s: float | None
    session_lease_s: float | None
    standby_wait_s: float | None
    auto_reacquire: bool
    allow_pooler: bool
    shutdown_event: asyncio.Event | None
    connect_fn: ConnectFn | None


class LeaderLock:
    """Competes for one advisory lock, and knows whether this node leads.

    It has no fencing token: a leader that is cut off may act for up to a trust window after it has lost the lock.
    """

    _clock: Clock = BOOT_CLOCK
    _rng = JITTER

    def __init__(
        self,
        dsn: Dsn | None,
        key1: int,
        key2: int,
        *,
        retry_strategy: RetryStrategy | None = None,
        health_interval_s: float = 5.0,
        health_timeout_s: float | None = None,
        reconnect_grace_s: float | None = None,
        session_lease_s: float | None = None,
        standby_wait_s: float | None = None,
        auto_reacquire: bool = True,
        allow_pooler: bool = False,
        shutdown_event: asyncio.Event | None = None,
        connect_fn: ConnectFn | None = None,
    ) -> None:
        """Check the settings. Nothing is connected before `start`.

        Args:
            dsn: How to connect to PostgreSQL: a connection string, or a function that returns one. None: connect_fn.
            key1: The first key of the advisory lock, a signed 32-bit integer.
            key2: The second key of the advisory lock, a signed 32-bit integer.
            retry_strategy: How long to wait between two attempts. Default: `retry.DefaultRetry()`, once a second while
                another session holds the lock, and `ExponentialBackoff()` while the database fails.
            health_interval_s: The time between two probes of a leader's session, in seconds. Default: 5.
            health_timeout_s: The longest time for the answer to any statement, in seconds. Default: None, for
                health_interval_s.
            reconnect_grace_s: How long to try to replace a lost session before `on_lost` is called, in seconds.
                Default: None, for no grace.
            session_lease_s: How long the server keeps the lock of a silent leader, in seconds. It must be longer
                than health_interval_s + health_timeout_s. Default: None, for three times health_interval_s.
            standby_wait_s: How long an attempt after the first waits at the server for the lock, in seconds; 0 only
                tries. Default: None, for 10, and for 0 with allow_pooler or connect_fn, which exclude it.
            auto_reacquire: Whether to compete again after a loss or a step-down. Default: True.
            allow_pooler: Whether a pooler in session mode may be on the way to the server. Default: False.
            shutdown_event: When it is set, the lock shuts down. Default: None.
            connect_fn: An async function that opens the connection, in autocommit, instead of dsn; or one that returns
                an async context manager of it, such as `pool.connection`, which is left at the end. Default: None.

        Raises:
            ConfigurationError: A setting, or the relation between two, cannot be used.
        """
        keys = check_key_pair(key1, key2)
        timing = LockTiming.checked(health_interval_s, health_timeout_s, session_lease_s)
        if reconnect_grace_s is not None:
            positive_s("reconnect_grace_s", reconnect_grace_s)
        if standby_wait_s is None:
            standby_wait_s = STANDBY_WAIT_S if connect_fn is None and not allow_pooler else 0.0
        elif standby_wait_s != 0:
            positive_s("standby_wait_s", standby_wait_s)
        check_flags(auto_reacquire=auto_reacquire, allow_pooler=allow_pooler)
        if retry_strategy is not None and (
            isinstance(retry_strategy, type) or not isinstance(retry_strategy, RetryStrategy)
        ):
            raise ConfigurationError("retry_strategy needs a method next_delay_s(ctx): see pgleaderlock.retry")
        if shutdown_event is not None and not isinstance(shutdown_event, asyncio.Event):
            raise ConfigurationError(f"shutdown_event must be an asyncio.Event, not {type(shutdown_event).__name__}")
        refuse(combination_misfits(KEYWORDS, standby_wait_s=standby_wait_s, allow_pooler=allow_pooler))
        if connect_fn is None and dsn is None:
            raise ConfigurationError("dsn is missing: give one, or connect_fn")
        if connect_fn is None:
            check_dsn(dsn)
        elif not callable(connect_fn):
            raise ConfigurationError(f"connect_fn must be an async function, not {type(connect_fn).__name__}")
        elif standby_wait_s:
            raise ConfigurationError("standby_wait_s needs our own connection: drop it or drop connect_fn")
        self._dsn = dsn
        self._connect_fn = connect_fn
        self._shutdown_event = shutdown_event
        self._timing = timing
        self._allow_pooler = allow_pooler
        self._label = f"{key1}/{key2}"
        self._settings = LifecycleSettings(
            keys=keys,
            strategy=_own_copy(retry_strategy or DefaultRetry()),
            health_interval_s=timing.health_interval_s,
            trust_s=timing.trust_s,
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
        cls, dsn: Dsn | None, name: str, *, namespace: str = DEFAULT_NAMESPACE, **options: Unpack[LockOptions]
    ) -> Self:
        """A lock with a name instead of a pair of keys; the options are those of the constructor."""
        lock = cls(dsn, *key_pair(name, namespace), **options)
        lock._label = name
        lock._log = lock._log.bind(lock=name)
        return lock

    # --- Lifecycle

    async def start(self) -> None:
        """Start to compete, in a task. Does nothing if the lock is running already.

        Raises `ConfigurationError` if `shutdown_event` belongs to another event loop.
        """
        await self._outlive_loop()
        while self._task is not None and not self._task.done() and self.state is LockState.STOPPED:
            if self._run is not None and self._run.inside_work():
                break  # called from on_stopped: the old run only waits for this callback to return
            await asyncio.wait([self._task])
        if self.state is not LockState.STOPPED:
            return
        if self._shutdown_event is not None:
            _check_loop(self._shutdown_event)
        self._run = run = Lifecycle(
            self._settings, self._connect, self._registry, clock=self._clock, rng=self._rng, log=self._log
        )
        self._task = asyncio.create_task(run.begin(), name="pgleaderlock lifecycle")
        self._task.add_done_callback(lambda _: run.finish())
        if self._shutdown_event is not None:
            relay = asyncio.create_task(self._relay(self._shutdown_event, run), name="pgleaderlock shutdown_event")
            self._task.add_done_callback(lambda _: relay.cancel())

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Release the lock, close the connection and end the task. Does nothing if the lock is not running.

        If it takes longer than `timeout_s`, the connection is cut, which frees the lock, and `ShutdownError` is raised.
        Called from a callback or from the work of `lead`, it only makes the request.
        """
        check_timeout(timeout_s)
        await self._outlive_loop()
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
        """Give up leadership; compete again afterwards if `auto_reacquire` is set.

        If it takes longer than `timeout_s`, the connection is cut, which frees the lock. Does nothing when not leading.
        Called from a callback or from the work of `lead`, it only makes the request.
        """
        check_timeout(timeout_s)
        run = self._run
        if run is None or run.driver.state not in (LockState.LEADER, LockState.RELEASING):
            return
        if run.driver.state is LockState.LEADER:
            run.ask_release()
        if run.inside_work():
            return
        term = run.driver.term
        await within(timeout_s, _term_ended(run, term))
        run.force_release(term)
        await within(FORCED_END_S, _term_ended(run, term))

    async def wait_for_leadership(self, timeout_s: float | None = None) -> bool:
        """True as soon as this node leads; False once `timeout_s` is over or the lock has stopped."""
        check_timeout(timeout_s)
        if (run := self._run) is None:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                return await self._won(run)
        except TimeoutError:
            return False

    async def lead(self, work: Callable[[], Coroutine[Any, Any, T]], *, on_failure: OnFailure = "raise") -> T | None:
        """Run `work` whenever this node leads; return what it returns.

        `work` is cancelled as soon as leadership is lost or about to be released; the release waits until it has ended,
        and it is started again in the next term. When it returns, leadership is kept until the lock stops. Returns None
        if the lock is stopped on request first; raises `LockError` if it stopped by itself, because it gave up or lost
        leadership without `auto_reacquire`.

        on_failure: what to do when `work` raises; the failure is logged as an error in any case. "raise" gives up
        leadership, does not compete until `lead` is called again, and raises the exception here. "restart" starts the
        work again after a delay of 0.2 s that doubles up to 30 s; while the delay is longer than 1 s, leadership is
        given up. "step_down" gives up leadership for the same delay, each time. Without `auto_reacquire` the lock stops
        when it gives up leadership, and the exception is raised here.

        Cancelling the caller cancels the work, and waits until it has ended. If no other `lead` is running, the lock
        then gives up leadership and does not compete until `lead` is called again.
        """
        if not callable(work):
            raise ConfigurationError(f"lead takes an async function, not {type(work).__name__}: pass it uncalled")
        restarts = Restarts(on_failure, self._clock)
        if self._run is None or self.state is LockState.STOPPED:
            raise LockError("the lock is not running: call start() first, or use it as a context manager")
        run = self._run
        run.recover()
        with run.works.caller(lambda: self._left(run)):
            return await self._lead(run, work, restarts)

    # --- Context manager

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, _kind: object, leaving: BaseException | None, _trace: object) -> None:
        if leaving is None:
            await self.shutdown()
            return
        try:
            await self.shutdown(EXIT_TIMEOUT_S)
        except ShutdownError as error:
            self._log.failed_at_exit("shutdown_failed", error, leaving)

    # --- State

    @property
    def state(self) -> LockState:
        """The state of the lock, as far as this node knows."""
        return self._run.driver.state if self._run is not None else LockState.STOPPED

    @property
    def is_leader(self) -> bool:
        """Whether this node may act as the leader. Decided by the clock at the moment of the call."""
        return self._run is not None and self._leads(self._run)

    @property
    def last_error(self) -> Exception | None:
        """Why the lock last failed, lost or stopped; None if nothing has gone wrong since `start`."""
        return self._run.driver.last_error if self._run is not None else None

    @property
    def work_error(self) -> BaseException | None:
        """The exception of the work of `lead`, until the work is started again; None if it has not failed."""
        failure = self._run.works.failure if self._run is not None else None
        return None if failure is None else failure.error

    # --- Event registration: each method returns the function unchanged, so it can be used as a decorator

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
        """Another session holds the lock."""
        self._registry.add("on_acquire_failed", fn)
        return fn

    def on_state_change(self, fn: StateChangeCallbackT) -> StateChangeCallbackT:
        """The state has changed: `(from_state, to_state)`."""
        self._registry.add("on_state_change", fn)
        return fn

    def on_error(self, fn: ErrorCallbackT) -> ErrorCallbackT:
        """The database or a callback failed: `(error)`."""
        self._registry.add("on_error", fn)
        return fn

    def on_stopped(self, fn: CallbackT) -> CallbackT:
        """The lock has stopped. The last callback of a run."""
        self._registry.add("on_stopped", fn)
        return fn

    # --- Inside

    def _begin_anew(self) -> None:
        """Abandon the run, because this is a forked child or the loop is closed, and go back to the initial state.

        The old objects are kept alive: their finalizers would close what belongs to the parent process, or wait on a
        closed loop.
        """
        _left_behind.append((self._task, self._run))
        self._task = self._run = None

    async def _outlive_loop(self) -> None:
        """If the loop was closed while the task was running, the run cannot go on: free the lock from this loop."""
        if self._run is not None and self._task is not None and self._task.get_loop().is_closed():
            await self._run.abandon()
            self._begin_anew()

    async def _connect(self) -> Session:
        if self._connect_fn is not None:
            return await BorrowedSession.open(self._connect_fn, self._timing.health_timeout_s)
        settings = ConnectionSettings(
            application_name=default_application_name(self._label),
            statement_timeout_s=self._timing.health_timeout_s,
            lease_s=self._timing.lease_s,
            allow_pooler=self._allow_pooler,
        )
        assert self._dsn is not None, "the constructor wants a dsn or a connect_fn"
        return await DedicatedSession.open(self._dsn, settings)

    async def _lead(self, run: Lifecycle, work: Callable[[], Coroutine[Any, Any, T]], restarts: Restarts) -> T | None:
        gave_up: asyncio.Task[T] | None = None
        while await self._won(run):
            restarts.begin()
            gave_up = None
            if (task := await run.works.run(work)) is None:
                continue
            if (error := error_of(task)) is None:
                return task.result()
            failure = restarts.after(error)
            await self._after(failure, run)
            if failure.delay_s is None:
                return task.result()
            gave_up = task if failure.gives_up else None
        driver = run.driver
        if gave_up is not None and not driver.stopping:
            return gave_up.result()  # without auto_reacquire there is no next term to restart it in
        if driver.stopping or driver.last_input is Input.RELEASE_SUCCEEDED:
            return None
        raise LockError(f"the lock has stopped by itself: {self.last_error or 'the retry strategy gave up'}")

    async def _after(self, failure: Failure, run: Lifecycle) -> None:
        """A work has failed: report it, give up leadership if `on_failure` says so, and wait until the restart."""
        self._log.error("work_failed", exc_info=failure.error, term=run.driver.term, error=repr(failure.error))
        run.works.failed(failure)
        try:
            if failure.gives_up:
                run.driver.nudge()  # if the lock does not lead now, it must not be taken, either
                await self.step_down()
            if failure.delay_s is not None:
                await first_of(self._clock.sleep(failure.delay_s), _stopped(run))
        finally:
            if failure.delay_s is not None:
                run.recover(failure)

    def _leads(self, run: Lifecycle) -> bool:
        return run.driver.state is LockState.LEADER and self._clock.now() < run.trusted_until

    async def _won(self, run: Lifecycle) -> bool:
        """True as soon as this node leads; False once that run has stopped, even if another one has begun."""
        while run.driver.state is not LockState.STOPPED:
            if self._leads(run):
                return True
            await asyncio.shield(run.driver.next_change())
        return False

    def _left(self, run: Lifecycle) -> None:
        """The last caller of `lead` was cancelled."""
        self._log.info("lead_cancelled", detail="leadership is given up until lead is entered again")
        run.driver.nudge()

    async def _relay(self, event: asyncio.Event, run: Lifecycle) -> None:
        await event.wait()
        run.ask_stop()


async def _stopped(run: Lifecycle) -> None:
    while run.driver.state is not LockState.STOPPED:
        await asyncio.shield(run.driver.next_change())


async def _term_ended(run: Lifecycle, term: int) -> None:
    while run.driver.holds(term):
        await asyncio.shield(run.driver.next_change())


def _check_loop(event: asyncio.Event) -> None:
    """Raise if `event` belongs to another loop: an event can only be waited for on the first loop that has done so."""
    waiting = event.wait()
    try:
        waiting.send(None)
    except StopIteration:
        pass  # it is set already
    except RuntimeError as error:
        raise ConfigurationError(
            "shutdown_event belongs to another event loop: make one on the loop that starts the lock, and set it from "
            "elsewhere with loop.call_soon_threadsafe(event.set)"
        ) from error
    finally:
        waiting.close()


def _own_copy(strategy: RetryStrategy) -> RetryStrategy:
    """A copy of a strategy with memory, which must not be shared between locks. One without memory has no `copy`."""
    copy = getattr(strategy, "copy", None)
    return copy() if callable(copy) else strategy


_locks: "weakref.WeakSet[LeaderLock]" = weakref.WeakSet()
_left_behind: list[object] = []


def _let_locks_begin_anew() -> None:
    for lock in list(_locks):
        lock._begin_anew()  # noqa: SLF001 - our own class


os.register_at_fork(after_in_child=_let_locks_begin_anew)
