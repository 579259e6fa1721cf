"""The values that pass between the parts: states, contexts, callback types. All frozen, none with behaviour."""

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
"""The detail of the ledger's event `drain_began`, by which `status` knows why a role is led by nobody."""
LEAD_CANCELLED = "its lead was cancelled"
"""The same event when the application has left `lead`."""


class LockState(enum.Enum):
    """Where a lock stands in its life cycle; the rules are the table in `_lock/fsm.py`."""

    STOPPED = "stopped"
    """Not running: no task, no connection."""
    FOLLOWER = "follower"
    """Running, waiting for the next attempt."""
    ACQUIRING = "acquiring"
    """An attempt is on its way to the database."""
    LEADER = "leader"
    """The lock is held and the session is probed."""
    RECONNECTING = "reconnecting"
    """The session was lost; for a short grace the loss is not announced. The lock is not held."""
    RELEASING = "releasing"
    """The lock is being given back on purpose."""


@dataclass(frozen=True, slots=True)
class RetryContext:
    """What a retry strategy is told before it chooses the next delay."""

    attempt: int
    """1 for the first failure of this cycle."""
    elapsed_s: float
    """Time since the first attempt of this cycle."""
    last_error: Exception | None = None
    """Why the attempt failed; None when the lock was simply held by someone else."""


@dataclass(frozen=True, slots=True)
class LeaderToken:
    """Proof of one term: hand its `epoch` to whatever must refuse a leader of the past."""

    role: str
    epoch: int
    holder_identity: str
    namespace: str = "pgleaderlock"


@dataclass(frozen=True, slots=True)
class LeaderStateChanged:
    """Who leads a role now, as this node sees it. `is_leader` follows the gate: may this node act?"""

    role: str
    is_leader: bool
    epoch: int | None
    holder: str | None


# A plain function or a coroutine function: the dispatcher awaits what comes back if it can be awaited.
Callback = Callable[[], Awaitable[None] | None]
StateChangeCallback = Callable[[LockState, LockState], Awaitable[None] | None]
ErrorCallback = Callable[[Exception], Awaitable[None] | None]
