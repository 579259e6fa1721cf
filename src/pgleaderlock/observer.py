"""What an election tells whoever measures it: override the methods that you need, and register with `observe`.

Imports `models` and the standard library only. Knows nothing of metrics: they are one observer among others.
"""

from typing import Literal

from pgleaderlock.models import LockState

__all__ = ["AttemptResult", "ElectionObserver", "LossReason"]

AttemptResult = Literal["won", "held", "busy", "error"]
LossReason = Literal["released", "lost", "superseded"]


class ElectionObserver:
    """Every method does nothing here.

    Called on the thread of the engine's loop, in order. Must be quick: the heartbeat waits for it. What it raises is
    logged and dropped.
    """

    def role_added(self, role: str) -> None:
        """The election has this role: from its beginning, or from now on."""

    def role_removed(self, role: str) -> None:
        """It has not, any more. Nothing else comes for this role after it."""

    def attempted(self, role: str, result: AttemptResult) -> None:
        """One try: `won`, `held` by somebody else, `busy` (won, but older fenced work is not over yet), or `error`."""

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        """A term of this node has begun, so long after the send of the try that won it.

        `from_other`: the term before was another node's and was lost or evicted, not given up. A failover.
        """

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        """A term of this node is over: `released` on purpose, `lost`, or `superseded` by an operator."""

    def state_changed(self, role: str, old: LockState, new: LockState) -> None:
        """Where this node stands with the role's lock."""

    def beaten(self, took_s: float) -> None:
        """A heartbeat of the session was acknowledged."""

    def session_lost(self, error: Exception) -> None:
        """The session has ended, and every term of it."""

    def drain_began(self, role: str) -> None:
        """The role is being given up on purpose: no new work is let in."""

    def drain_ended(self, role: str, clean: bool) -> None:
        """It was given up. Not clean: work was in flight, the wait for a predecessor was not over, or it was lost."""
