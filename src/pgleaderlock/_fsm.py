"""The life cycle of one lock, as data: the table is the specification, and nothing transitions outside it.

How to read it. A lock is in one of six states. Something happens (an `Input`), the first row that fits the
state, the input and the three rules below names the next state and what is to be done (`Action`s, in order).
The state changes first, the actions follow: inside `on_lost` the lock already says FOLLOWER. A state and an
input without a row are a mistake of the caller: `step` raises, and nothing has changed.

Three rules choose between rows, because what follows a loss or a release depends on them:

    auto_reacquire   compete again after a loss or a step-down, or stop
    grace            a lost session is first tried to be replaced quietly, for a short while
    stopping         somebody has asked for the end, so a release ends in STOPPED

Two kinds of actions. Some are carried out on the spot, by `_driver`: emit, log, choose the next delay. The
others (open, try, probe, reacquire, unlock) say what goes on for as long as the state lasts, and what comes
of it is the next input.

No I/O, no await, no clock. Imports `models` and the standard library only.
"""

import enum
from dataclasses import dataclass

from pgleaderlock.models import LockState

__all__ = ["TABLE", "Action", "IllegalTransition", "Input", "Row", "Rules", "Transition", "step"]


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
    """What is to be done on a transition."""

    EMIT_ACQUIRED = "on_acquired"
    EMIT_ACQUIRE_FAILED = "on_acquire_failed"
    EMIT_LOST = "on_lost"
    EMIT_RELEASED = "on_released"
    EMIT_ERROR = "on_error"
    EMIT_STOPPED = "on_stopped"

    OPEN = "open connection"
    CLOSE = "close connection"
    TRY_LOCK = "try the lock"
    PROBE = "probe the session"
    REACQUIRE = "reconnect and re-acquire"
    UNLOCK = "unlock"

    ATTEMPT_NOW = "attempt now"
    ATTEMPT_SOON = "attempt soon, jittered"  # a restarted database is not to be stormed
    BACK_OFF = "back off"
    BACK_OFF_JITTERED = "back off, jittered"
    RESET_RETRY = "reset retry state"
    START_GRACE = "start grace"
    LOG_LOSS = "log warning"
    LOG_RECOVERED = "log recovery"


@dataclass(frozen=True, slots=True)
class Rules:
    """What chooses between two rows of one cell."""

    auto_reacquire: bool = True
    grace: bool = False
    stopping: bool = False


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

    def fits(self, rules: Rules) -> bool:
        return (
            self.auto_reacquire in (None, rules.auto_reacquire)
            and self.grace in (None, rules.grace)
            and self.stopping in (None, rules.stopping)
        )


@dataclass(frozen=True, slots=True)
class Transition:
    source: LockState
    input: Input
    target: LockState
    actions: tuple[Action, ...]


class IllegalTransition(Exception):
    """The table has no row for this: a bug in this library, never the user's mistake."""


S, IN, A = LockState, Input, Action

# The ways into STOPPED end alike: the connection goes, and on_stopped is the last thing anybody hears.
_END = (A.CLOSE, A.EMIT_STOPPED)

TABLE: tuple[Row, ...] = (
    Row(S.STOPPED, IN.START, S.FOLLOWER, (A.RESET_RETRY, A.OPEN, A.ATTEMPT_NOW)),
    Row(S.STOPPED, IN.STOP_REQUESTED, S.STOPPED),
    Row(S.STOPPED, IN.RELEASE_REQUESTED, S.STOPPED),
    Row(S.FOLLOWER, IN.ACQUIRE_ATTEMPT, S.ACQUIRING, (A.TRY_LOCK,)),
    Row(S.FOLLOWER, IN.STOP_REQUESTED, S.STOPPED, _END),
    Row(S.FOLLOWER, IN.DB_ERROR, S.FOLLOWER, (A.EMIT_ERROR, A.CLOSE, A.BACK_OFF_JITTERED)),
    Row(S.FOLLOWER, IN.GAVE_UP, S.STOPPED, _END),
    Row(S.FOLLOWER, IN.START, S.FOLLOWER),
    Row(S.FOLLOWER, IN.RELEASE_REQUESTED, S.FOLLOWER),
    Row(S.ACQUIRING, IN.ACQUIRE_SUCCEEDED, S.LEADER, (A.EMIT_ACQUIRED, A.RESET_RETRY, A.PROBE)),
    Row(S.ACQUIRING, IN.ACQUIRE_FAILED, S.FOLLOWER, (A.EMIT_ACQUIRE_FAILED, A.BACK_OFF)),
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
            Row(S.LEADER, failure, S.RECONNECTING, (A.LOG_LOSS, A.CLOSE, A.START_GRACE, A.REACQUIRE), grace=True),
            Row(
                S.LEADER,
                failure,
                S.FOLLOWER,
                (A.LOG_LOSS, A.EMIT_LOST, A.EMIT_ERROR, A.CLOSE, A.ATTEMPT_SOON),
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
    Row(S.LEADER, IN.STOP_REQUESTED, S.RELEASING, (A.UNLOCK,)),
    Row(S.LEADER, IN.RELEASE_REQUESTED, S.RELEASING, (A.UNLOCK,)),
    Row(S.LEADER, IN.START, S.LEADER),
    Row(S.RECONNECTING, IN.REACQUIRE_SUCCEEDED, S.LEADER, (A.LOG_RECOVERED, A.RESET_RETRY, A.PROBE)),
    *(
        row
        for failure in (IN.REACQUIRE_FAILED, IN.GRACE_EXPIRED)
        for row in (
            Row(S.RECONNECTING, failure, S.FOLLOWER, (A.EMIT_LOST, A.ATTEMPT_SOON), auto_reacquire=True),
            Row(S.RECONNECTING, failure, S.STOPPED, (A.EMIT_LOST, *_END), auto_reacquire=False),
        )
    ),
    # A connect that fails is tried again until the grace is over: it could not outlast a server's restart otherwise.
    Row(S.RECONNECTING, IN.DB_ERROR, S.RECONNECTING, (A.CLOSE, A.BACK_OFF_JITTERED, A.REACQUIRE)),
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
            # One delay at least, so that somebody else can win what was just given away.
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


def step(state: LockState, input_: Input, rules: Rules) -> Transition:
    """What `input_` does to a lock in `state`; raises `IllegalTransition` where the table is silent."""
    for row in _CELLS.get((state, input_), ()):
        if row.fits(rules):
            return Transition(state, input_, row.target, row.actions)
    raise IllegalTransition(f"{input_.value} cannot happen in {state.name}")
