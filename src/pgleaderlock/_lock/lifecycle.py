"""The task of one `LeaderLock`: the activity of each state.

Each state has one activity. It does its I/O and returns the next input for the table; the table gives the next state
and the actions. Requests from outside (stop, release, force) interrupt the waits. The task owns the session: nothing
else opens, uses or closes it.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pgleaderlock._base.aio import cancel_and_wait, first_of, within
from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock._lock.callbacks import CallbackRegistry, Dispatcher
from pgleaderlock._lock.driver import Driver
from pgleaderlock._lock.fsm import Action, Input, Rules
from pgleaderlock._lock.work import Failure, Works
from pgleaderlock._pg.session import Session, SessionIdentity
from pgleaderlock.errors import ConnectionError, LockError, PgLeaderLockError
from pgleaderlock.keys import KeyPair
from pgleaderlock.models import LockState
from pgleaderlock.retry import RetryStrategy

__all__ = ["Lifecycle", "LifecycleSettings"]

T = TypeVar("T")
Outcome = tuple[Input, Exception | None]

# How long the last callbacks may take when the task was cancelled or forced to end.
LAST_WORDS_S = 1.0
ANY_TERM = -1  # terms count from 1


@dataclass(frozen=True, slots=True)
class LifecycleSettings:
    keys: KeyPair
    strategy: RetryStrategy
    health_interval_s: float
    trust_s: float
    """G: how long an answer is trusted, counted from before its question was sent."""
    reconnect_grace_s: float | None
    standby_wait_s: float
    auto_reacquire: bool


class _Interrupted(Exception):
    """A request from outside has interrupted the activity."""


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
        self._release_term: int | None = None
        """The term that `step_down` asked to end. Later terms are not affected."""
        self._force_term: int | None = None
        """The term whose release no longer waits for anything."""
        self._session: Session | None = None
        self._zombie: SessionIdentity | None = None
        self._probe_sent_at = 0.0
        self.trusted_until = float("-inf")
        self.works = Works()
        self.dispatcher = Dispatcher(registry, clock, log)
        self.driver = Driver(
            rules=Rules(
                auto_reacquire=settings.auto_reacquire,
                grace=settings.reconnect_grace_s is not None,
                standby_wait=settings.standby_wait_s > 0,
            ),
            grace_s=settings.reconnect_grace_s,
            strategy=settings.strategy,
            clock=clock,
            rng=rng,
            log=log,
            dispatcher=self.dispatcher,
            left_leader=self.works.interrupt,
        )
        self._activities: dict[LockState, Callable[[], Coroutine[Any, Any, Outcome]]] = {
            LockState.FOLLOWER: self._follow,
            LockState.ACQUIRING: self._acquire,
            LockState.LEADER: self._lead,
            LockState.RECONNECTING: self._reconnect,
            LockState.RELEASING: self._release,
        }

    # --- Requests from outside

    def ask_stop(self) -> None:
        self.driver.request_stop()

    def ask_release(self) -> None:
        self._release_term = self.driver.term
        self.driver.nudge()

    def force(self) -> None:
        """Stop waiting for work and callbacks: cut the connection, which frees the lock."""
        self._force_term = ANY_TERM
        self.driver.nudge()

    def force_release(self, term: int) -> None:
        """The same for one term. Does nothing if that term is over already."""
        if self.driver.holds(term):
            self._force_term = term
            self.driver.nudge()

    def recover(self, failure: Failure | None = None) -> None:
        """A failed work is about to be restarted: compete again if the role was given up."""
        if self.works.recover(failure):
            self.driver.nudge()

    def inside_work(self) -> bool:
        """Whether the caller is a callback or a running work. It must not wait for the end of the lock, which waits for
        it."""
        return self.dispatcher.inside() or self.works.inside()

    # --- The task

    def begin(self) -> Coroutine[Any, Any, None]:
        """Go from STOPPED to FOLLOWER at once; returns the coroutine for the task. It cleans up even if the task is
        cancelled before its first step."""
        self.dispatcher.start()
        self.driver.feed(Input.START)
        running = self._run()
        running.send(None)  # enter its `try`: a task cancelled before its first step would skip the `finally`
        return running

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)
            while self.driver.state is not LockState.STOPPED:
                input_, error = await self._next_input()
                await self._apply(input_, error)
            await self._hear_out()
        except asyncio.CancelledError:
            await self._end_at_once()
            raise
        except Exception as error:  # a bug: the lock ends with this error
            self.driver.last_error = error
            self._log.error("lifecycle_failed", exc_info=error, error=error)
            raise
        finally:
            await self._close_session()
            await self.dispatcher.close()

    def finish(self) -> None:
        """Called when the task has ended: goes to STOPPED if a bug has ended it in another state."""
        if self.driver.state is not LockState.STOPPED:
            for input_ in self._way_to_stopped():
                self.driver.feed(input_)
            self.dispatcher.cancel()

    async def abandon(self) -> None:
        """The loop was closed while the task was running: free the lock, from another loop."""
        await self._close_session()

    async def _next_input(self) -> Outcome:
        try:
            return await self._activities[self.driver.state]()
        except _Interrupted:
            return self._answer_requests()
        except PgLeaderLockError as error:
            return Input.DB_ERROR, error
        except Exception as error:
            # A bug, or an unknown failure of the database driver: the lock must go on competing.
            self._log.error("unexpected_error", exc_info=error, error=error)
            return Input.DB_ERROR, error

    async def _apply(self, input_: Input, error: Exception | None = None) -> None:
        row = self.driver.move(input_, error)
        actions = deque(row.actions)
        try:
            while actions:
                if (action := actions.popleft()) is Action.CLOSE:
                    await self._close_session(remember=error is not None)
                else:
                    self.driver.carry_out(action, error)
        finally:
            for action in actions:  # cancelled while closing: the state has changed, so the callbacks must still run
                self.driver.carry_out(action, error)

    def _answer_requests(self) -> Outcome:
        """The input for the open request. Call it only when there is a request that matters in this state."""
        if self.driver.state is LockState.RELEASING:
            return Input.RELEASE_SUCCEEDED, None  # forced: without a connection the lock is free
        if self.driver.stopping:
            return Input.STOP_REQUESTED, None
        return Input.RELEASE_REQUESTED, None

    async def _hear_out(self) -> None:
        """Let the callbacks finish, on_stopped last."""
        try:
            await self._unless(self.dispatcher.drained, self._forced)
        except _Interrupted:
            await self._last_words()

    async def _end_at_once(self) -> None:
        """The task was cancelled, usually because the program ends: free the lock, and run the callbacks."""
        for input_ in self._way_to_stopped():  # the state changes before the lock is free
            await self._apply(input_)
        await self._close_session()
        await self._last_words()

    async def _last_words(self) -> None:
        await within(LAST_WORDS_S, self.dispatcher.drained())

    def _way_to_stopped(self) -> Iterator[Input]:
        """The inputs that lead from any state to STOPPED. Closing the connection counts as a successful release."""
        self.driver.request_stop()
        if self.driver.state not in (LockState.RELEASING, LockState.STOPPED):
            yield Input.STOP_REQUESTED
        if self.driver.state is LockState.RELEASING:
            yield Input.RELEASE_SUCCEEDED

    # --- The activities, one per state

    async def _follow(self) -> Outcome:
        if self.driver.stopping:
            return Input.STOP_REQUESTED, None
        if self.driver.due_at is None:
            return Input.GAVE_UP, None
        due_at = self.driver.due_at
        if (loss := await self._unless(lambda: self._loss_before(due_at), self._stop_asked)) is not None:
            return Input.DB_ERROR, loss
        if self.works.given_up:
            await self._unless(self._work_is_back, self._stop_asked)
        await self._unless(self._open, self._stop_asked)
        return Input.ACQUIRE_ATTEMPT, None

    async def _acquire(self) -> Outcome:
        granted = await self._unless(self._take_or_wait, self._stop_asked)
        return (Input.ACQUIRE_SUCCEEDED if granted else Input.ACQUIRE_FAILED), None

    async def _lead(self) -> Outcome:
        due_at = self._probe_due_at()
        if (loss := await self._unless(lambda: self._loss_before(due_at), self._end_asked)) is not None:
            return Input.HEALTH_FAILED, loss
        try:
            await self._unless(self._probe, self._forced)
        except ConnectionError as error:
            return Input.HEALTH_FAILED, error
        return Input.HEALTH_OK, None

    async def _reconnect(self) -> Outcome:
        if self.driver.stopping:
            return Input.STOP_REQUESTED, None
        if self.driver.due_at is None:
            return Input.GAVE_UP, None
        left_s = self.driver.grace_until - self._clock.now()
        if left_s <= 0:
            return Input.GRACE_EXPIRED, self.driver.last_error
        reacquiring = asyncio.ensure_future(self._reacquire(self.driver.due_at))
        try:
            await self._unless(lambda: first_of(reacquiring, self._clock.sleep(left_s)), self._stop_asked)
            if reacquiring.cancelled():
                return Input.GRACE_EXPIRED, self.driver.last_error
            return (Input.REACQUIRE_SUCCEEDED if reacquiring.result() else Input.REACQUIRE_FAILED), None
        finally:
            if reacquiring.cancelled():
                await self._close_session(remember=True)  # the outcome of its last statement is unknown

    async def _release(self) -> Outcome:
        """Unlock once the work has stopped and the callbacks have run; keep the session alive meanwhile."""
        try:
            await self._unless(self._unlock_when_quiet, self._forced)
        except LockError as error:
            return Input.RELEASE_FAILED, error
        return Input.RELEASE_SUCCEEDED, None

    # --- Steps of the activities

    async def _open(self) -> None:
        if self._session is None:
            self._session = await self._connect()

    async def _take_or_wait(self) -> bool:
        """One attempt: try, then wait at the server if so configured. The first attempt never waits, so that a failure
        is reported at once."""
        if await self._take_twice():
            return True
        if self.driver.first_attempt:
            return False
        session = self._running_session()
        wait_until = self._clock.now() + self._settings.standby_wait_s
        while (left_s := wait_until - self._clock.now()) > 0:
            sent_at = self._clock.now()
            if await session.wait(self._settings.keys, left_s):
                self._trust(sent_at)
                return True
        return False

    async def _take_twice(self) -> bool:
        """Try the lock. If our own old session held it, end that session and try again."""
        session = self._running_session()
        return await self._take(session) or (await self._end_zombie(session) and await self._take(session))

    async def _take(self, session: Session) -> bool:
        sent_at = self._clock.now()
        granted = await session.take(self._settings.keys)
        if granted:
            self._trust(sent_at)
        return granted

    async def _end_zombie(self, session: Session) -> bool:
        """End our own old session, if there is one: after a lost connection it may still hold the lock."""
        zombie, self._zombie = self._zombie, None
        if zombie is None or not await session.end_zombie(zombie):
            return False
        self._log.info("own_zombie_ended", pid=zombie.pid)
        return True

    async def _reacquire(self, due_at: float) -> bool:
        await self._clock.sleep(max(0.0, due_at - self._clock.now()))
        await self._open()
        return await self._take_twice()

    async def _probe(self) -> None:
        sent_at = self._clock.now()
        self._probe_sent_at = sent_at
        await self._running_session().probe(self._settings.keys)
        self._trust(sent_at)

    def _trust(self, sent_at: float) -> None:
        """Trust an answer for G from `sent_at`, when its question was sent. Raises if it comes later than that."""
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
                if (loss := await self._loss_before(self._probe_due_at(), asyncio.shield(quiet))) is not None:
                    raise loss
                if not quiet.done():
                    await self._probe()
        finally:
            await cancel_and_wait(quiet)
        await self._running_session().unlock(self._settings.keys)

    async def _quiet(self) -> None:
        await self.works.ended()
        await self.dispatcher.drained()

    def _probe_due_at(self) -> float:
        if not self._running_session().identified:
            return self._clock.now()
        return self._probe_sent_at + self._settings.health_interval_s

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
        return self.driver.stopping

    def _end_asked(self) -> bool:
        return self.driver.stopping or self._release_term == self.driver.term or self.works.given_up

    async def _work_is_back(self) -> None:
        while self.works.given_up:
            await asyncio.shield(self.driver.next_change())

    def _forced(self) -> bool:
        return self._force_term in (ANY_TERM, self.driver.term)

    async def _loss_before(self, due_at: float, *also: Awaitable[Any]) -> ConnectionError | None:
        """Wait until `due_at`, or until one of `also` has ended. Returns the loss if the session ends first."""
        left_s = due_at - self._clock.now()
        if left_s <= 0:
            return None  # do not check for a loss now: the statement that is due will find out
        lost = asyncio.Event().wait() if self._session is None else self._session.lost()
        loss, *_ = await first_of(lost, self._clock.sleep(left_s), *also)
        return None if loss.cancelled() else loss.result()

    async def _unless(self, work: Callable[[], Awaitable[T]], enough: Callable[[], bool]) -> T:
        """The result of `work`. If a request makes `enough` true first, cancels the work and raises `_Interrupted`."""

        async def asked() -> None:
            while not enough():
                await asyncio.shield(self.driver.next_change())

        if enough():
            raise _Interrupted
        task, interrupt = await first_of(work(), asked())
        if task.cancelled() and not interrupt.cancelled():
            raise _Interrupted
        result: T = task.result()
        return result
