"""The values that the parts exchange: states, contexts, callback types. All are frozen, and have no behaviour."""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = [
    "LEAD_CANCELLED",
    "WORK_FAILED",
    "Callback",
    "ErrorCallback",
    "LeaderStateChanged",
    "LeaderToken",
    "LockState",
    "RetryContext",
    "StateChangeCallback",
]

WORK_FAILED = "its work has failed"
"""The detail of the ledger's event `drain_began`, from which `status` knows why no node leads a role."""
LEAD_CANCELLED = "its lead was cancelled"
"""The same event when the application has left `lead`."""


class LockState(enum.Enum):
    """The state of a lock's life cycle; the transitions are the table in `_lock/fsm.py`."""

    STOPPED = "stopped"
    """Not running: no task, no connection."""
    FOLLOWER = "follower"
    """Running, waiting for the next attempt."""
    ACQUIRING = "acquiring"
    """An attempt is under way."""
    LEADER = "leader"
    """The lock is held and the session is probed."""
    RECONNECTING = "reconnecting"
    """The session was lost, and with it the lock; during a short grace the loss is not announced."""
    RELEASING = "releasing"
    """The lock is being released on purpose."""


@dataclass(frozen=True, slots=True)
class RetryContext:
    """The information from which a retry strategy chooses the next delay."""

    attempt: int
    """1 for the first failure of this cycle."""
    elapsed_s: float
    """Time since the first attempt of this cycle."""
    last_error: Exception | None = None
    """Why the attempt failed; None if another session holds the lock."""


@dataclass(frozen=True, slots=True)
class LeaderToken:
    """Proof of one term: pass its `epoch` to the resource that must refuse an earlier leader."""

    role: str
    epoch: int
    holder_identity: str
    namespace: str = "pgleaderlock"


@dataclass(frozen=True, slots=True)
class LeaderStateChanged:
    """A role's leader, as this node sees it. `is_leader` is the state of the gate: may this node act?"""

    role: str
    is_leader: bool
    epoch: int | None
    holder: str | None


# A plain function or a coroutine function: the dispatcher awaits the result if it is awaitable.
Callback = Callable[[], Awaitable[None] | None]
StateChangeCallback = Callable[[LockState, LockState], Awaitable[None] | None]
ErrorCallback = Callable[[Exception], Awaitable[None] | None]
