"""The task of one `LeaderLock`: what goes on in each state, and what comes of it.

Each state has one activity. It does its I/O and returns the next input for the table; the table says where that
leads. Requests from outside (stop, release, force) interrupt the waits. The task owns the session: nobody else
opens, uses or closes it.

Imports `_driver`, `_session`, `_callbacks`, `_fsm`, `models`, `errors`, `keys`, `_clock` and the standard library.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pgleaderlock._callbacks import CallbackRegistry, Dispatcher
from pgleaderlock._clock import Clock
from pgleaderlock._driver import Driver
from pgleaderlock._fsm import Action, Input, Rules
from pgleaderlock._logging import StructuredLogger
from pgleaderlock._session import Session, SessionIdentity
from pgleaderlock._work import Works
from pgleaderlock.errors import ConnectionError, LockError, PgLeaderLockError
from pgleaderlock.keys import KeyPair
from pgleaderlock.models import LockState
from pgleaderlock.retry import RetryStrategy

__all__ = ["Lifecycle", "LifecycleSettings"]

T = TypeVar("T")
Outcome = tuple[Input, Exception | None]

# How long callbacks may still run when the task itself was cancelled or forced to end.
LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class LifecycleSettings:
    keys: KeyPair
    strategy: RetryStrategy
    health_interval_s: float
    trust_s: float
    """G: how long an answer is believed, counted from before its question was sent."""
    reconnect_grace_s: float | None
    standby_wait_s: float
    auto_reacquire: bool


class _Interrupted(Exception):
    """A request came before the work was done."""


class _Requests:
    """What was asked from outside, and a future that resolves when something new is asked."""

    def __init__(self) -> None:
        self.stop = False
        self.release = False
        self.force = False
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ask(self, *, stop: bool = False, release: bool = False, force: bool = False) -> None:
        self.stop |= stop
        self.release |= release
        self.force |= force
        if not self._news.done():
            self._news.set_result(None)

    def news(self) -> "asyncio.Future[None]":
        if self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news


class Lifecycle:
    """One run of a lock, from start to STOPPED."""

    def __init__(
        self,
        settings: LifecycleSettings,
        connect: Callable[[], Awaitable[Session]],
        registry: CallbackRegistry,
        *,
        clock: Clock,
        rng: random.Random,
        log: StructuredLogger,
    ) -> None:
        self._settings = settings
        self._connect = connect
        self._clock = clock
        self._log = log
        self._requests = _Requests()
        self._session: Session | None = None
        self._zombie: SessionIdentity | None = None
        self._probe_sent_at = 0.0
        self.trusted_until = float("-inf")
        self.works = Works()
        self.dispatcher = Dispatcher(registry, clock, log)
        self.driver = Driver(
            rules=Rules(auto_reacquire=settings.auto_reacquire, grace=settings.reconnect_grace_s is not None),
            grace_s=settings.reconnect_grace_s,
            strategy=settings.strategy,
            clock=clock,
            rng=rng,
            log=log,
            dispatcher=self.dispatcher,
            left_leader=self._leave_leader,
        )
        self._activities: dict[LockState, Callable[[], Coroutine[Any, Any, Outcome]]] = {
            LockState.FOLLOWER: self._follow,
            LockState.ACQUIRING: self._acquire,
            LockState.LEADER: self._lead,
            LockState.RECONNECTING: self._reconnect,
            LockState.RELEASING: self._release,
        }

    # --- From outside

    def ask_stop(self) -> None:
        self.driver.request_stop()
        self._requests.ask(stop=True)

    def ask_release(self) -> None:
        self._requests.ask(release=True)

    def force(self) -> None:
        """Wait for nobody any longer: cut the connection, which frees the lock."""
        self._requests.ask(force=True)

    def force_release(self, term: int) -> None:
        """The same for one term; nothing if that is over already."""
        if self.driver.term == term and self.driver.state in (LockState.LEADER, LockState.RELEASING):
            self.force()

    def inside_work(self) -> bool:
        """Is the caller a callback or a running work? It must not wait for an end that waits for it."""
        return self.dispatcher.inside() or self.works.inside()

    # --- The task

    def begin(self) -> None:
        """STOPPED becomes FOLLOWER before the task has had its first turn."""
        self.dispatcher.start()
        self.driver.feed(Input.START)

    async def run(self) -> None:
        try:
            while self.driver.state is not LockState.STOPPED:
                input_, error = await self._next_input()
                await self._apply(input_, error)
            await self._hear_out()
        except asyncio.CancelledError:
            await self._end_at_once()
            raise
        except Exception as error:  # a bug: the lock ends, and says why
            self.driver.last_error = error
            self._log.error("lifecycle_failed", exc_info=error, error=error)
            raise
        finally:
            await self._close_session()
            await self.dispatcher.close()

    def finish(self) -> None:
        """Called when the task has ended: one that was cancelled before its first turn has run nothing at all."""
        if self.driver.state is not LockState.STOPPED:
            self._walk_to_stopped()
            self.dispatcher.cancel()

    async def _next_input(self) -> Outcome:
        try:
            return await self._activities[self.driver.state]()
        except _Interrupted:
            return self._answer_requests()
        except PgLeaderLockError as error:
            return Input.DB_ERROR, error
        except Exception as error:
            # A bug, or a driver that fails in a way nobody has seen: the lock must go on competing all the same.
            self._log.error("unexpected_error", exc_info=error, error=error)
            return Input.DB_ERROR, error

    async def _apply(self, input_: Input, error: Exception | None) -> None:
        transition = self.driver.feed(input_, error)
        if Action.CLOSE in transition.actions:
            await self._close_session(remember=error is not None)
        if transition.source is LockState.RELEASING and transition.target is LockState.FOLLOWER:
            self._requests.force = False  # it was meant for the release that has just ended
        if input_ is Input.ACQUIRE_FAILED and self._settings.standby_wait_s > 0:
            self.driver.skip_delay()  # this attempt has done its waiting at the server

    def _answer_requests(self) -> Outcome:
        """The input that the open requests amount to. Only asked when there is one that matters here."""
        if self.driver.state is LockState.RELEASING:
            return Input.RELEASE_SUCCEEDED, None  # forced: without a connection the lock is free
        if self._requests.stop:
            return Input.STOP_REQUESTED, None
        return Input.RELEASE_REQUESTED, None

    async def _hear_out(self) -> None:
        """Let the callbacks finish, on_stopped last, unless somebody forces the end."""
        with contextlib.suppress(_Interrupted):
            await self._unless(self.dispatcher.drained(), lambda: self._requests.force)

    async def _end_at_once(self) -> None:
        """The task was cancelled, usually because the whole program ends: leave nothing held, and say so."""
        self._walk_to_stopped()  # the flag falls before the lock does
        await self._close_session()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.dispatcher.drained()

    def _walk_to_stopped(self) -> None:
        """By the table, from wherever we are; without a connection a release has succeeded."""
        self.driver.request_stop()
        if self.driver.state not in (LockState.RELEASING, LockState.STOPPED):
            self.driver.feed(Input.STOP_REQUESTED)
        if self.driver.state is LockState.RELEASING:
            self.driver.feed(Input.RELEASE_SUCCEEDED)

    # --- The activities, one for each state

    async def _follow(self) -> Outcome:
        if self._requests.stop:
            return Input.STOP_REQUESTED, None
        if self.driver.due_at is None:
            return Input.GAVE_UP, None
        if (loss := await self._wait_until(self.driver.due_at, self._stop_asked)) is not None:
            return Input.DB_ERROR, loss
        await self._unless(self._open(), self._stop_asked)
        return Input.ACQUIRE_ATTEMPT, None

    async def _acquire(self) -> Outcome:
        granted = await self._unless(self._take_or_wait(), self._stop_asked)
        return (Input.ACQUIRE_SUCCEEDED if granted else Input.ACQUIRE_FAILED), None

    async def _lead(self) -> Outcome:
        def asked() -> bool:
            return self._requests.stop or self._requests.release

        if asked():
            return self._answer_requests()
        if (loss := await self._wait_until(self._probe_due_at(), asked)) is not None:
            return Input.HEALTH_FAILED, loss
        try:
            await self._unless(self._probe(), lambda: self._requests.force)
        except ConnectionError as error:
            return Input.HEALTH_FAILED, error
        return Input.HEALTH_OK, None

    async def _reconnect(self) -> Outcome:
        if self._requests.stop:
            return Input.STOP_REQUESTED, None
        if self.driver.due_at is None:
            return Input.GAVE_UP, None
        left_s = self.driver.grace_until - self._clock.now()
        if left_s <= 0:
            return Input.GRACE_EXPIRED, self.driver.last_error
        reacquiring = asyncio.ensure_future(self._reacquire(self.driver.due_at))
        expiry = asyncio.ensure_future(self._clock.sleep(left_s))
        try:
            await self._unless(_first_of(reacquiring, expiry), self._stop_asked)
            if not reacquiring.done():
                return Input.GRACE_EXPIRED, self.driver.last_error
            return (Input.REACQUIRE_SUCCEEDED if reacquiring.result() else Input.REACQUIRE_FAILED), None
        finally:
            if reacquiring in await _cancelled(reacquiring, expiry):
                await self._close_session(remember=True)  # interrupted: what it was doing has an unknown end

    async def _release(self) -> Outcome:
        """Unlock once the work has stopped and the callbacks have heard of it; keep the session alive meanwhile."""
        try:
            await self._unless(self._unlock_when_quiet(), lambda: self._requests.force)
        except LockError as error:
            return Input.RELEASE_FAILED, error
        return Input.RELEASE_SUCCEEDED, None

    # --- What they are made of

    async def _open(self) -> None:
        if self._session is None:
            self._session = await self._connect()

    async def _take_or_wait(self) -> bool:
        """One attempt: try, end our own zombie if that is in the way, then wait at the server if so configured."""
        session = self._running_session()
        if await self._take(session) or (await self._end_zombie(session) and await self._take(session)):
            return True
        wait_until = self._clock.now() + self._settings.standby_wait_s
        while (left_s := wait_until - self._clock.now()) > 0:
            sent_at = self._clock.now()
            if await session.wait(self._settings.keys, left_s):
                self._trust(sent_at)
                return True
        return False

    async def _take(self, session: Session) -> bool:
        sent_at = self._clock.now()
        granted = await session.take(self._settings.keys)
        if granted:
            self._trust(sent_at)
        return granted

    async def _end_zombie(self, session: Session) -> bool:
        """After a cut the server may still hold our own old session, and the lock with it."""
        zombie, self._zombie = self._zombie, None
        if zombie is None or not await session.end_zombie(zombie):
            return False
        self._log.info("own_zombie_ended", pid=zombie.pid)
        return True

    async def _reacquire(self, due_at: float) -> bool:
        await self._clock.sleep(max(0.0, due_at - self._clock.now()))
        await self._open()
        session = self._running_session()
        return await self._take(session) or (await self._end_zombie(session) and await self._take(session))

    async def _probe(self) -> None:
        sent_at = self._clock.now()
        self._probe_sent_at = sent_at
        await self._running_session().probe(self._settings.keys)
        self._trust(sent_at)

    def _trust(self, sent_at: float) -> None:
        """Believe the answer, from before its question was sent. One that comes too late is no answer."""
        self._probe_sent_at = sent_at
        regained = self._clock.now() >= self.trusted_until
        self.trusted_until = sent_at + self._settings.trust_s
        if self._clock.now() >= self.trusted_until:
            raise ConnectionError(f"the answer came later than {self._settings.trust_s:g} s after its question")
        if regained:
            self.driver.nudge()  # `is_leader` has become True again without a change of state

    async def _unlock_when_quiet(self) -> None:
        quiet = asyncio.ensure_future(self._quiet())
        try:
            while not quiet.done():
                if (loss := await self._wait_until(self._probe_due_at(), lambda: False, quiet)) is not None:
                    raise loss
                if not quiet.done():
                    await self._probe()
        finally:
            await _cancelled(quiet)
        await self._running_session().unlock(self._settings.keys)

    async def _quiet(self) -> None:
        await self.works.ended()
        await self.dispatcher.drained()

    def _probe_due_at(self) -> float:
        if not self._running_session().identified:
            return self._clock.now()
        return self._probe_sent_at + self._settings.health_interval_s

    def _leave_leader(self) -> None:
        self._requests.release = False  # a step-down that was asked of this term must not end the next one
        self.works.interrupt()

    def _running_session(self) -> Session:
        if self._session is None:
            raise LockError("there is no session")  # unreachable by the table; a bug would surface as a DbError
        return self._session

    async def _close_session(self, *, remember: bool = False) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if remember:
            self._zombie = session.identity or self._zombie
        await session.close()

    # --- Waiting

    def _stop_asked(self) -> bool:
        return self._requests.stop

    async def _wait_until(
        self, due_at: float, enough: Callable[[], bool], also: "asyncio.Future[Any] | None" = None
    ) -> ConnectionError | None:
        """Wait for a moment; returns the loss if the session ends first, raises `_Interrupted` if `enough` says so."""
        left_s = due_at - self._clock.now()
        if left_s <= 0:
            return None  # what is due now has no time for a loss to be noticed: the next statement will tell
        session = self._session
        timer = asyncio.ensure_future(self._clock.sleep(left_s))
        loss = asyncio.ensure_future(session.lost()) if session is not None else None
        others = [future for future in (loss, also) if future is not None]
        try:
            await self._unless(_first_of(timer, *others), enough)
            return loss.result() if loss is not None and loss.done() else None
        finally:
            await _cancelled(*(future for future in (timer, loss) if future is not None))

    async def _unless(self, work: Awaitable[T], enough: Callable[[], bool]) -> T:
        """The result of `work`, or `_Interrupted` once a request makes `enough` true; the work is then cancelled."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                news = self._requests.news()
                if enough():
                    break
                either: list[asyncio.Future[Any]] = [task, news]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _Interrupted
        finally:
            await _cancelled(task)


async def _first_of(*futures: "asyncio.Future[Any]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _cancelled(*futures: "asyncio.Future[Any]") -> list["asyncio.Future[Any]"]:
    """Cancel what still runs and wait until it has ended, so that no task outlives the one that made it."""
    pending = [future for future in futures if not future.done()]
    for future in pending:
        future.cancel()
    if pending:
        await asyncio.wait(pending)
    for future in futures:
        if future.done() and not future.cancelled():
            future.exception()  # looked at, so that nobody is told it never was
    return pending
