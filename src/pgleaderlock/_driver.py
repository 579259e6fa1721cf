"""Carries out the table for one role: feeds inputs to it, keeps the state, does what needs no I/O.

Callbacks, logs, delays and the grace deadline are dealt with here; what needs the database is left to the owner,
who sees it in the returned transition. A lock has one driver, an election one for each role. Nothing here awaits.

Imports `_fsm`, `_callbacks`, `retry`, `models`, `_clock`, `_logging` and the standard library only.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pgleaderlock._clock import Clock
from pgleaderlock._fsm import Action, Input, Rules, Transition, step
from pgleaderlock._logging import StructuredLogger
from pgleaderlock.models import LockState, RetryContext
from pgleaderlock.retry import RetryStrategy, checked_delay_s, reconnect_jitter_s

__all__ = ["Driver"]

# Used when a strategy raises or returns nonsense: the lock goes on, and on_error hears of it.
FALLBACK_DELAY_S = 1.0


class Emitter(Protocol):
    """Who tells the callbacks: a dispatcher, or somebody in front of one."""

    def emit(self, event: str, *args: object) -> None: ...


class Driver:
    """One role's place in the table, and what follows from it without I/O."""

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
        """When the next attempt is to be made; None once the strategy has given up."""
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
        self._cycle_began = 0.0
        self._next_change: asyncio.Future[None] | None = None
        self.term = 0
        """Counts the terms of this run, so that a late request can tell its own from the next one."""
        self.last_input = Input.START

    @property
    def stopping(self) -> bool:
        return self._rules.stopping

    def request_stop(self) -> None:
        """From now on a release ends in STOPPED."""
        self._rules = replace(self._rules, stopping=True)

    def feed(self, input_: Input, error: Exception | None = None) -> Transition:
        """Apply one input: the state changes first, then what needs no I/O is done, in the table's order."""
        transition = step(self.state, input_, self._rules)
        self.state = transition.target
        self.last_input = input_
        if error is not None:
            self.last_error = error
        if input_ is Input.START:
            self.last_error = None
        if transition.source is not transition.target:
            self._announce(transition)
        if error is not None and Action.LOG_LOSS not in transition.actions:  # said once, not twice
            self._log.warning("database_error", error=error)
        for action in transition.actions:
            self._carry_out(action, error)
        return transition

    def skip_delay(self) -> None:
        """Make the next attempt at once, unless the strategy has given up."""
        if self.due_at is not None:
            self.due_at = self._clock.now()

    def next_change(self) -> "asyncio.Future[None]":
        """Resolves at the next change of state, or when `nudge` is called. Shared by all who wait: shield it."""
        if self._next_change is None or self._next_change.done():
            self._next_change = asyncio.get_running_loop().create_future()
        return self._next_change

    def _announce(self, transition: Transition) -> None:
        self._log.info("state_change", from_=transition.source.value, to=transition.target.value)
        if transition.target is LockState.LEADER:
            self.term += 1
        if transition.source is LockState.LEADER:
            self._left_leader()
        self._dispatcher.emit("on_state_change", transition.source, transition.target)
        self.nudge()

    def nudge(self) -> None:
        """Whoever waits for a change should look again, though the state is the same."""
        if self._next_change is not None and not self._next_change.done():
            self._next_change.set_result(None)

    def _carry_out(self, action: Action, error: Exception | None) -> None:
        """Everything but what needs the database: open, close, try, probe, reacquire and unlock are the owner's."""
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
            case Action.ATTEMPT_NOW:
                self.due_at = self._clock.now()
            case Action.ATTEMPT_SOON:
                self.due_at = self._clock.now() + reconnect_jitter_s(0.0, self._rng)
            case Action.BACK_OFF:
                self._back_off(error, jittered=False)
            case Action.BACK_OFF_JITTERED:
                self._back_off(error, jittered=True)
            case Action.RESET_RETRY:
                self._attempt = 0
            case Action.START_GRACE:
                now = self._clock.now()
                self.grace_until = now + (self._grace_s or 0.0)
                # Never so late that the grace is over before the first try.
                self.due_at = now + min(reconnect_jitter_s(0.0, self._rng), (self._grace_s or 0.0) / 10)

    def _back_off(self, error: Exception | None, *, jittered: bool) -> None:
        now = self._clock.now()
        if self._attempt == 0:
            self._cycle_began = now
        self._attempt += 1
        delay_s = self._next_delay_s(RetryContext(self._attempt, now - self._cycle_began, error))
        if delay_s is None:
            self._log.warning("gave_up", attempt=self._attempt)
            self.due_at = None
            return
        if jittered:
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
