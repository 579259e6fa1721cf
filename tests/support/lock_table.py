"""The transition table as the specification has it: every expected row is written here by hand, none is derived."""

import itertools
from dataclasses import dataclass, field

from pgleaderlock import LockState
from pgleaderlock._lock.fsm import Action, Rules

__all__ = [
    "ACQUIRING",
    "ALL_RULES",
    "FOLLOWER",
    "LEADER",
    "RECONNECTING",
    "RELEASING",
    "ROWS",
    "STOPPED",
    "Expected",
]

STOPPED, FOLLOWER, ACQUIRING = LockState.STOPPED, LockState.FOLLOWER, LockState.ACQUIRING
LEADER, RECONNECTING, RELEASING = LockState.LEADER, LockState.RECONNECTING, LockState.RELEASING

CLOSE, RESET = Action.CLOSE, Action.RESET_RETRY
NOW, SOON, BACK_OFF = Action.ATTEMPT_NOW, Action.ATTEMPT_SOON, Action.BACK_OFF
BACK_OFF_JITTERED, COUNT, GRACE = Action.BACK_OFF_JITTERED, Action.COUNT_FAILURE, Action.START_GRACE
LOG_LOSS, LOG_RECOVERED = Action.LOG_LOSS, Action.LOG_RECOVERED

ALL_RULES = [Rules(*values) for values in itertools.product((True, False), repeat=4)]


@dataclass(frozen=True)
class Expected:
    """One row of the specification: where it leads, whom it tells and what is done besides, each in order."""

    source: LockState
    input: str
    target: LockState
    emits: tuple[str, ...] = ()
    does: tuple[Action, ...] = ()
    when: dict[str, bool] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        rules = "".join(f", {'' if value else 'no '}{name}" for name, value in self.when.items())
        return f"{self.source.name} x {self.input}{rules}"

    def all_rules(self) -> list[Rules]:
        return [rules for rules in ALL_RULES if all(getattr(rules, name) is value for name, value in self.when.items())]


YES, NO = {"auto_reacquire": True}, {"auto_reacquire": False}
GRACE_ON = {"grace": True}
GRACE_OFF, GRACE_OFF_NO = {"grace": False, **YES}, {"grace": False, **NO}
STOPPING = {"stopping": True}
LOST = (LOG_LOSS, CLOSE, BACK_OFF_JITTERED)
STEPPED_DOWN, STEPPED_DOWN_NO = {"stopping": False, **YES}, {"stopping": False, **NO}

# The table of the specification, section 3.3, with its three footnotes as rows of their own.
SPECIFIED = [
    Expected(STOPPED, "Start", FOLLOWER, (), (RESET, NOW)),
    Expected(FOLLOWER, "AcquireAttempt", ACQUIRING),
    Expected(FOLLOWER, "StopRequested", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(ACQUIRING, "AcquireSucceeded", LEADER, ("on_acquired",), (RESET,)),
    Expected(ACQUIRING, "AcquireFailed", FOLLOWER, ("on_acquire_failed",), (BACK_OFF,), {"standby_wait": False}),
    Expected(ACQUIRING, "DbError", FOLLOWER, ("on_lost", "on_error"), (CLOSE, BACK_OFF_JITTERED), YES),
    Expected(ACQUIRING, "DbError", STOPPED, ("on_lost", "on_error", "on_stopped"), (CLOSE,), NO),
    Expected(ACQUIRING, "StopRequested", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(LEADER, "HealthOk", LEADER),
    Expected(LEADER, "HealthFailed", RECONNECTING, (), (LOG_LOSS, CLOSE, GRACE), GRACE_ON),
    Expected(LEADER, "HealthFailed", FOLLOWER, ("on_lost", "on_error"), LOST, GRACE_OFF),
    Expected(LEADER, "HealthFailed", STOPPED, ("on_lost", "on_error", "on_stopped"), (LOG_LOSS, CLOSE), GRACE_OFF_NO),
    Expected(LEADER, "DbError", RECONNECTING, (), (LOG_LOSS, CLOSE, GRACE), GRACE_ON),
    Expected(LEADER, "DbError", FOLLOWER, ("on_lost", "on_error"), LOST, GRACE_OFF),
    Expected(LEADER, "DbError", STOPPED, ("on_lost", "on_error", "on_stopped"), (LOG_LOSS, CLOSE), GRACE_OFF_NO),
    Expected(LEADER, "StopRequested", RELEASING),
    Expected(LEADER, "ReleaseRequested", RELEASING),
    Expected(RECONNECTING, "ReacquireSucceeded", LEADER, (), (LOG_RECOVERED, RESET)),
    Expected(RECONNECTING, "ReacquireFailed", FOLLOWER, ("on_lost",), (SOON,), YES),
    Expected(RECONNECTING, "ReacquireFailed", STOPPED, ("on_lost", "on_stopped"), (CLOSE,), NO),
    Expected(RECONNECTING, "GraceExpired", FOLLOWER, ("on_lost",), (SOON,), YES),
    Expected(RECONNECTING, "GraceExpired", STOPPED, ("on_lost", "on_stopped"), (CLOSE,), NO),
    Expected(RECONNECTING, "StopRequested", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(RELEASING, "ReleaseSucceeded", STOPPED, ("on_released", "on_stopped"), (CLOSE,), STOPPING),
    Expected(RELEASING, "ReleaseSucceeded", STOPPED, ("on_released", "on_stopped"), (CLOSE,), STEPPED_DOWN_NO),
    Expected(RELEASING, "ReleaseSucceeded", FOLLOWER, ("on_released",), (CLOSE, BACK_OFF), STEPPED_DOWN),
    Expected(RELEASING, "ReleaseFailed", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STOPPING),
    Expected(RELEASING, "ReleaseFailed", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STEPPED_DOWN_NO),
    Expected(RELEASING, "DbError", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STOPPING),
    Expected(RELEASING, "DbError", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STEPPED_DOWN_NO),
]

# What the design adds so that the table closes, and the two places where it departs from the specification.
ADDED = [
    Expected(FOLLOWER, "DbError", FOLLOWER, ("on_error",), (CLOSE, BACK_OFF_JITTERED)),
    Expected(FOLLOWER, "GaveUp", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(ACQUIRING, "AcquireFailed", FOLLOWER, ("on_acquire_failed",), (COUNT,), {"standby_wait": True}),
    Expected(RECONNECTING, "GaveUp", STOPPED, ("on_lost", "on_stopped"), (CLOSE,)),
    Expected(RELEASING, "StopRequested", RELEASING),
    Expected(STOPPED, "StopRequested", STOPPED),
    Expected(FOLLOWER, "Start", FOLLOWER),
    Expected(ACQUIRING, "Start", ACQUIRING),
    Expected(LEADER, "Start", LEADER),
    Expected(RECONNECTING, "Start", RECONNECTING),
    Expected(RELEASING, "Start", RELEASING),
    Expected(STOPPED, "ReleaseRequested", STOPPED),
    Expected(FOLLOWER, "ReleaseRequested", FOLLOWER),
    Expected(ACQUIRING, "ReleaseRequested", ACQUIRING),
    Expected(RECONNECTING, "ReleaseRequested", RECONNECTING),
    Expected(RELEASING, "ReleaseRequested", RELEASING),
    Expected(RECONNECTING, "DbError", RECONNECTING, (), (CLOSE, BACK_OFF_JITTERED)),
    Expected(RELEASING, "ReleaseFailed", FOLLOWER, ("on_error",), (CLOSE, BACK_OFF), STEPPED_DOWN),
    Expected(RELEASING, "DbError", FOLLOWER, ("on_error",), (CLOSE, BACK_OFF), STEPPED_DOWN),
]

ROWS = SPECIFIED + ADDED
