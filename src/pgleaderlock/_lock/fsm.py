"""The life cycle of one lock, as data: the table is the specification, and nothing transitions outside it.

How to read it. A lock is in one of six states. When something happens (an `Input`), the first row that matches the
state, the input and the rules below gives the next state and the `Action`s that follow, in order. The state changes
first: inside `on_lost` the state is already FOLLOWER. A state and an input without a row are a bug of the caller:
`step` raises, and the state stays.

Four rules choose between the rows of a cell, because what follows a failure, a loss or a release depends on them:

    auto_reacquire   compete again after a loss or a step-down, or stop
    grace            try to replace a lost session for a short while before the loss is announced
    stopping         the application has asked for the end, so a release ends in STOPPED
    standby_wait     an attempt waits at the server, so the next one needs no delay

`driver` carries out each action once, except CLOSE: the connection belongs to the owner of the driver. What a lock does
while it is in a state (wait, try the lock, probe, reconnect, unlock) is that state's activity in `lifecycle`, and the
result of the activity is the next input.

No I/O, no await, no clock.
"""

import enum
from dataclasses import dataclass

from pgleaderlock.models import LockState

__all__ = ["TABLE", "Action", "IllegalTransition", "Input", "Row", "Rules", "step"]


class Input(enum.Enum):
    """What can happen to a lock."""

    START = "Start"
    STOP_REQUESTED = "StopRequested"
    ACQUIRE_ATTEMPT = "AcquireAttempt"
    ACQUIRE_SUCCEEDED = "AcquireSucceeded"
    ACQUIRE_FAILED = "AcquireFailed"
    DB_ERROR = "DbError"
    HEALTH_OK = "HealthOk"
    HEALTH_FAILED = "HealthFailed"
    REACQUIRE_SUCCEEDED = "ReacquireSucceeded"
    REACQUIRE_FAILED = "ReacquireFailed"
    GRACE_EXPIRED = "GraceExpired"
    RELEASE_REQUESTED = "ReleaseRequested"
    RELEASE_SUCCEEDED = "ReleaseSucceeded"
    RELEASE_FAILED = "ReleaseFailed"
    GAVE_UP = "GaveUp"


class Action(enum.Enum):
    """What is done on a transition."""

    EMIT_ACQUIRED = "on_acquired"
    EMIT_ACQUIRE_FAILED = "on_acquire_failed"
    EMIT_LOST = "on_lost"
    EMIT_RELEASED = "on_released"
    EMIT_ERROR = "on_error"
    EMIT_STOPPED = "on_stopped"

    CLOSE = "close connection"
    ATTEMPT_NOW = "attempt now"
    ATTEMPT_SOON = "attempt soon, jittered"
    BACK_OFF = "back off"
    BACK_OFF_JITTERED = "back off, jittered"
    COUNT_FAILURE = "attempt now, unless the strategy gives up"
    RESET_RETRY = "reset retry state"
    START_GRACE = "start grace"
    LOG_LOSS = "log warning"
    LOG_RECOVERED = "log recovery"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that choose between the rows of one cell."""

    auto_reacquire: bool = True
    grace: bool = False
    stopping: bool = False
    standby_wait: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. A condition of None means that the rule does not matter here."""

    source: LockState
    input: Input
    target: LockState
    actions: tuple[Action, ...] = ()
    auto_reacquire: bool | None = None
    grace: bool | None = None
    stopping: bool | None = None
    standby_wait: bool | None = None

    def fits(self, rules: Rules) -> bool:
        return (
            self.auto_reacquire in (None, rules.auto_reacquire)
            and self.grace in (None, rules.grace)
            and self.stopping in (None, rules.stopping)
            and self.standby_wait in (None, rules.standby_wait)
        )


class IllegalTransition(Exception):
    """The table has no row for this input in this state: a bug of this library, never a mistake of its user."""


S, IN, A = LockState, Input, Action

# Every way into STOPPED closes the connection first, and on_stopped is the last callback of a run.
_END = (A.CLOSE, A.EMIT_STOPPED)

TABLE: tuple[Row, ...] = (
    Row(S.STOPPED, IN.START, S.FOLLOWER, (A.RESET_RETRY, A.ATTEMPT_NOW)),
    Row(S.STOPPED, IN.STOP_REQUESTED, S.STOPPED),
    Row(S.STOPPED, IN.RELEASE_REQUESTED, S.STOPPED),
    Row(S.FOLLOWER, IN.ACQUIRE_ATTEMPT, S.ACQUIRING),
    Row(S.FOLLOWER, IN.STOP_REQUESTED, S.STOPPED, _END),
    Row(S.FOLLOWER, IN.DB_ERROR, S.FOLLOWER, (A.EMIT_ERROR, A.CLOSE, A.BACK_OFF_JITTERED)),
    Row(S.FOLLOWER, IN.GAVE_UP, S.STOPPED, _END),
    Row(S.FOLLOWER, IN.START, S.FOLLOWER),
    Row(S.FOLLOWER, IN.RELEASE_REQUESTED, S.FOLLOWER),
    Row(S.ACQUIRING, IN.ACQUIRE_SUCCEEDED, S.LEADER, (A.EMIT_ACQUIRED, A.RESET_RETRY)),
    Row(S.ACQUIRING, IN.ACQUIRE_FAILED, S.FOLLOWER, (A.EMIT_ACQUIRE_FAILED, A.BACK_OFF), standby_wait=False),
    Row(S.ACQUIRING, IN.ACQUIRE_FAILED, S.FOLLOWER, (A.EMIT_ACQUIRE_FAILED, A.COUNT_FAILURE), standby_wait=True),
    Row(
        S.ACQUIRING,
        IN.DB_ERROR,
        S.FOLLOWER,
        (A.EMIT_LOST, A.EMIT_ERROR, A.CLOSE, A.BACK_OFF_JITTERED),
        auto_reacquire=True,
    ),
    Row(S.ACQUIRING, IN.DB_ERROR, S.STOPPED, (A.EMIT_LOST, A.EMIT_ERROR, *_END), auto_reacquire=False),
    Row(S.ACQUIRING, IN.STOP_REQUESTED, S.STOPPED, _END),
    Row(S.ACQUIRING, IN.START, S.ACQUIRING),
    Row(S.ACQUIRING, IN.RELEASE_REQUESTED, S.ACQUIRING),
    Row(S.LEADER, IN.HEALTH_OK, S.LEADER),
    *(
        row
        for failure in (IN.HEALTH_FAILED, IN.DB_ERROR)
        for row in (
            Row(S.LEADER, failure, S.RECONNECTING, (A.LOG_LOSS, A.CLOSE, A.START_GRACE), grace=True),
            Row(
                S.LEADER,
                failure,
                S.FOLLOWER,
                # Wait for one delay at least, as after a release: the lock is gone with the session; followers go
                # first.
                (A.LOG_LOSS, A.EMIT_LOST, A.EMIT_ERROR, A.CLOSE, A.BACK_OFF_JITTERED),
                grace=False,
                auto_reacquire=True,
            ),
            Row(
                S.LEADER,
                failure,
                S.STOPPED,
                (A.LOG_LOSS, A.EMIT_LOST, A.EMIT_ERROR, *_END),
                grace=False,
                auto_reacquire=False,
            ),
        )
    ),
    Row(S.LEADER, IN.STOP_REQUESTED, S.RELEASING),
    Row(S.LEADER, IN.RELEASE_REQUESTED, S.RELEASING),
    Row(S.LEADER, IN.START, S.LEADER),
    Row(S.RECONNECTING, IN.REACQUIRE_SUCCEEDED, S.LEADER, (A.LOG_RECOVERED, A.RESET_RETRY)),
    *(
        row
        for failure in (IN.REACQUIRE_FAILED, IN.GRACE_EXPIRED)
        for row in (
            Row(S.RECONNECTING, failure, S.FOLLOWER, (A.EMIT_LOST, A.ATTEMPT_SOON), auto_reacquire=True),
            Row(S.RECONNECTING, failure, S.STOPPED, (A.EMIT_LOST, *_END), auto_reacquire=False),
        )
    ),
    # A failed connect is repeated until the grace is over: otherwise the grace could not outlast a server's restart.
    Row(S.RECONNECTING, IN.DB_ERROR, S.RECONNECTING, (A.CLOSE, A.BACK_OFF_JITTERED)),
    Row(S.RECONNECTING, IN.GAVE_UP, S.STOPPED, (A.EMIT_LOST, *_END)),
    Row(S.RECONNECTING, IN.STOP_REQUESTED, S.STOPPED, _END),
    Row(S.RECONNECTING, IN.START, S.RECONNECTING),
    Row(S.RECONNECTING, IN.RELEASE_REQUESTED, S.RECONNECTING),
    *(
        row
        for outcome, event in (
            (IN.RELEASE_SUCCEEDED, A.EMIT_RELEASED),
            (IN.RELEASE_FAILED, A.EMIT_ERROR),
            (IN.DB_ERROR, A.EMIT_ERROR),
        )
        for row in (
            Row(S.RELEASING, outcome, S.STOPPED, (event, *_END), stopping=True),
            Row(S.RELEASING, outcome, S.STOPPED, (event, *_END), stopping=False, auto_reacquire=False),
            # Wait for one delay at least, so that another node can win the lock that was just released.
            Row(S.RELEASING, outcome, S.FOLLOWER, (event, A.CLOSE, A.BACK_OFF), stopping=False, auto_reacquire=True),
        )
    ),
    Row(S.RELEASING, IN.STOP_REQUESTED, S.RELEASING),
    Row(S.RELEASING, IN.START, S.RELEASING),
    Row(S.RELEASING, IN.RELEASE_REQUESTED, S.RELEASING),
)

_CELLS: dict[tuple[LockState, Input], tuple[Row, ...]] = {}
for _row in TABLE:
    _CELLS[_row.source, _row.input] = (*_CELLS.get((_row.source, _row.input), ()), _row)


def step(state: LockState, input_: Input, rules: Rules) -> Row:
    """The row that says what `input_` does to a lock in `state`; raises `IllegalTransition` if there is none."""
    for row in _CELLS.get((state, input_), ()):
        if row.fits(rules):
            return row
    raise IllegalTransition(f"{input_.value} cannot happen in {state.name}")
