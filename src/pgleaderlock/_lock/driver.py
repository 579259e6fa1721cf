"""Runs the table of states for one role: feeds inputs to it, keeps the state, carries out the actions without I/O.

The driver handles callbacks, logs, delays and the grace deadline. Its owner handles the connection: a lock has one
driver and one connection, an election has one driver per role and one connection for all. Nothing here awaits.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock._lock.fsm import Action, Input, Row, Rules, step
from pgleaderlock.models import LockState, RetryContext
from pgleaderlock.retry import RetryStrategy, checked_delay_s, reconnect_jitter_s

__all__ = ["Driver"]

# The delay when a strategy raises or returns no usable delay: on_error is called, and the lock goes on competing.
FALLBACK_DELAY_S = 1.0


class Emitter(Protocol):
    """What passes events on to the callbacks: a dispatcher, or a wrapper of one."""

    def emit(self, event: str, *args: object) -> None: ...


class Driver:
    """The state of one role, and the actions on it that need no I/O."""

    def __init__(
        self,
        *,
        rules: Rules,
        grace_s: float | None,
        strategy: RetryStrategy,
        clock: Clock,
        rng: random.Random,
        log: StructuredLogger,
        dispatcher: Emitter,
        left_leader: Callable[[], None],
    ) -> None:
        self.state = LockState.STOPPED
        self.last_error: Exception | None = None
        self.due_at: float | None = 0.0
        """When the next attempt is due; None once the strategy has given up."""
        self.grace_until = 0.0
        self._rules = rules
        self._grace_s = grace_s
        self._strategy = strategy
        self._clock = clock
        self._rng = rng
        self._log = log
        self._dispatcher = dispatcher
        self._left_leader = left_leader
        self._attempt = 0
        self._answered = False
        """The last attempt failed because another session holds the lock, so the database had answered."""
        self._cycle_began = 0.0
        self._moved_at = 0.0
        self._next_change: asyncio.Future[None] | None = None
        self.term = 0
        """Counts the terms of this run, so that a request for one term never reaches the next."""
        self.last_input = Input.START

    @property
    def stopping(self) -> bool:
        return self._rules.stopping

    @property
    def first_attempt(self) -> bool:
        """No attempt has failed since the start or the last term."""
        return self._attempt == 0

    def request_stop(self) -> None:
        """From now on a release ends in STOPPED."""
        self._rules = replace(self._rules, stopping=True)
        self.nudge()

    def holds(self, term: int) -> bool:
        """Whether this term still lasts: the lock is held, or is being released."""
        return self.term == term and self.state in (LockState.LEADER, LockState.RELEASING)

    def feed(self, input_: Input, error: Exception | None = None) -> None:
        """Apply one input, for an owner that has no connection to close."""
        for action in self.move(input_, error).actions:
            if action is not Action.CLOSE:
                self.carry_out(action, error)

    def move(self, input_: Input, error: Exception | None) -> Row:
        """Change the state and announce it. The owner carries out the actions, in the order of the table."""
        row = step(self.state, input_, self._rules)
        self.state = row.target
        self.last_input = input_
        self._moved_at = self._clock.now()
        if error is not None:
            self.last_error = error
        if input_ is Input.START:
            self.last_error = None
        if row.source is not row.target:
            self._announce(row)
        if error is not None and Action.LOG_LOSS not in row.actions:  # logged once, not twice
            self._log.warning("database_error", error=error)
        return row

    def next_change(self) -> "asyncio.Future[None]":
        """A future that resolves at the next change of state or at a `nudge`. All waiters share it: shield it."""
        if self._next_change is None or self._next_change.done():
            self._next_change = asyncio.get_running_loop().create_future()
        return self._next_change

    def _announce(self, row: Row) -> None:
        again = not self.first_attempt and {row.source, row.target} == {LockState.FOLLOWER, LockState.ACQUIRING}
        log = self._log.debug if again else self._log.info  # a standby may try for days: only the first try is info
        log("state_change", from_=row.source.value, to=row.target.value)
        if row.target is LockState.LEADER:
            self.term += 1
        if row.source is LockState.LEADER:
            self._left_leader()
        self._dispatcher.emit("on_state_change", row.source, row.target)
        self.nudge()

    def nudge(self) -> None:
        """Wake the waiters of `next_change` without a change of state: a request has come, or trust has changed."""
        if self._next_change is not None and not self._next_change.done():
            self._next_change.set_result(None)

    def carry_out(self, action: Action, error: Exception | None) -> None:
        """Carry out one action of the table, except CLOSE. Delays count from the input, however long the owner
        takes."""
        match action:
            case Action.EMIT_ACQUIRED:
                self._log.info("lock_acquired", attempt=self._attempt + 1)
                self._dispatcher.emit("on_acquired")
            case Action.EMIT_LOST:
                self._log.warning("lock_lost")
                self._dispatcher.emit("on_lost")
            case Action.EMIT_ERROR:
                assert error is not None, "the table emits on_error only for inputs that carry an error"
                self._dispatcher.emit("on_error", error)
            case Action.EMIT_ACQUIRE_FAILED | Action.EMIT_RELEASED | Action.EMIT_STOPPED:
                self._dispatcher.emit(action.value)
            case Action.LOG_LOSS:
                self._log.warning("health_check_failed", error=error)
            case Action.LOG_RECOVERED:
                self._log.info("leadership_recovered")
            case _:
                self._schedule(action, error)

    def _schedule(self, action: Action, error: Exception | None) -> None:
        match action:
            case Action.RESET_RETRY:
                self._attempt = 0
            case Action.ATTEMPT_NOW:
                self.due_at = self._moved_at
            case Action.ATTEMPT_SOON:
                self.due_at = self._moved_at + reconnect_jitter_s(0.0, self._rng)
            case Action.START_GRACE:
                grace_s = self._grace_s or 0.0
                self.grace_until = self._moved_at + grace_s
                # The first try must come before the grace is over.
                self.due_at = self._moved_at + min(reconnect_jitter_s(0.0, self._rng), grace_s / 10)
            case Action.BACK_OFF | Action.BACK_OFF_JITTERED | Action.COUNT_FAILURE:
                self._back_off(action, error)
            case _:
                raise AssertionError(f"{action.value!r} is not for the driver: the connection belongs to its owner")

    def _back_off(self, action: Action, error: Exception | None) -> None:
        now = self._moved_at
        if error is not None and self._answered:
            self._attempt = 0  # the first error after standing by: begin a new back-off
        self._answered = error is None
        if self._attempt == 0:
            self._cycle_began = now
        self._attempt += 1
        delay_s = self._next_delay_s(RetryContext(self._attempt, now - self._cycle_began, error))
        if delay_s is None:
            self._log.warning("gave_up", attempt=self._attempt)
            self.due_at = None
            return
        if action is Action.COUNT_FAILURE:
            delay_s = 0.0
        elif action is Action.BACK_OFF_JITTERED:
            delay_s += reconnect_jitter_s(delay_s, self._rng)
        self._log.debug("back_off", attempt=self._attempt, delay_s=delay_s)
        self.due_at = now + delay_s

    def _next_delay_s(self, context: RetryContext) -> float | None:
        try:
            return checked_delay_s(self._strategy.next_delay_s(context))
        except Exception as error:
            self._log.error("retry_strategy_failed", exc_info=error, error=error)
            self._dispatcher.emit("on_error", error)
            return FALLBACK_DELAY_S
