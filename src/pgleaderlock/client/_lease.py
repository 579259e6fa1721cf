"""What this process knows of one lease: until when it may count on it, and whether it has ended.

    HELD ── release() ──▶ RELEASED
      └──── the server says no, or the deadline passes ──▶ LOST

**The deadline is our own.** It is counted on the boot-time clock from the moment *before* the request that last
extended the lease was sent, so that the server's lease always outlives it; the server's wall-clock expiry is never
looked at. A renewal that is answered late, after the deadline, does not revive a lease that was given up.

What it does not promise: that nothing of yours is still on its way when the deadline passes. Hand the fencing token to
whatever must refuse a writer of the past.

Imports `errors`, `_clock` and the standard library. Must never wait or speak to a server.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pgleaderlock._clock import Clock
from pgleaderlock.client._wire import Granted
from pgleaderlock.errors import LeaseLost

__all__ = ["BaseLease", "LeaseState", "RenewTicket", "margin_s"]

# Two clocks may run at rates that differ by a hundredth; the rest is for the moments between looking and acting.
MARGIN_SHARE = 0.01
MARGIN_S_LEAST = 0.002


def margin_s(ttl_s: float) -> float:
    """How much sooner than the server we let a lease of this length end."""
    return min(ttl_s / 2, MARGIN_SHARE * ttl_s + MARGIN_S_LEAST)


class LeaseState(Enum):
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RenewTicket:
    """A renewal that is about to be sent: what it will mean if it is acknowledged."""

    ttl_s: float
    generation: int


_WHY = {
    "not_owner": "the server says that it has expired, or was broken",
    "deadline": "no renewal was acknowledged in time",
    "released": "it was released",
    "forked": "it belongs to the parent process",
}


class BaseLease:
    """A lease, without the way to wait for its loss: see `AsyncLease` and `Lease`. Safe to use from any thread."""

    def __init__(self, granted: Granted, ttl_s: float, counted_from: float, clock: Clock) -> None:
        self.lock_name = granted.lock_name
        self.owner_id = granted.owner_id
        self.lease_id = granted.lease_id
        self.fencing_token = granted.fencing_token
        """Higher than that of every lease of this lock before. Give it to whatever must refuse stale writers."""
        self._clock = clock
        self._ttl_s = ttl_s
        self._deadline = counted_from + ttl_s - margin_s(ttl_s)
        self._state = LeaseState.HELD
        self._why = ""
        self._trouble: BaseException | None = None
        self._generation = 0
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    @property
    def state(self) -> LeaseState:
        """`LOST` also when only the clock knows of it yet."""
        return LeaseState.LOST if self._state is LeaseState.HELD and not self.valid else self._state

    @property
    def forked(self) -> bool:
        """It is our parent process's, and not for us to end. Its mutex may be held by a thread that is not here."""
        return self._pid != os.getpid()

    @property
    def ttl_s(self) -> float:
        """What a renewal extends it by."""
        return self._ttl_s

    @property
    def deadline(self) -> float:
        """On the boot-time clock of this machine."""
        return self._deadline

    @property
    def remaining_s(self) -> float:
        """How long it may still be counted on; 0 when it has ended."""
        if self._state is not LeaseState.HELD or self.forked:
            return 0.0
        return max(0.0, self._deadline - self._clock.now())

    @property
    def valid(self) -> bool:
        """Decided by the clock now: a process that wakes from a long pause is told False before anything else runs."""
        return self.remaining_s > 0

    def raise_if_lost(self) -> None:
        """Raises `LeaseLost` unless the lease is valid."""
        if not self.valid:
            raise self.loss()

    def loss(self) -> LeaseLost:
        """Why the lease is not valid, as an exception."""
        if self._state is LeaseState.RELEASED:
            why = "released"
        elif self.forked:
            why = "forked"
        else:
            why = self._why or "deadline"
        error = LeaseLost(self.lock_name, why, f"the lease of {self.lock_name!r} has ended: {_WHY[why]}")
        error.__cause__ = self._trouble
        return error

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.lock_name!r} token={self.fencing_token} {self._state.value} "
            f"remaining_s={self.remaining_s:.3f}>"
        )

    # -- for the client alone -----------------------------------------------------------------------------------------

    def _about_to_renew(self, ttl_s: float, now: float) -> RenewTicket:
        """Before the send. A shorter lease may begin at any moment from now on, so it counts from now on."""
        with self._mutex:
            if ttl_s < self._ttl_s:
                # What was sent before with a longer one may reach the server before or after this: it counts no more.
                self._generation += 1
                self._deadline = min(self._deadline, now + ttl_s - margin_s(ttl_s))
            self._ttl_s = ttl_s
            return RenewTicket(ttl_s, self._generation)

    def _renewed(self, ticket: RenewTicket, sent_at: float) -> bool:
        """The server has acknowledged. False if that came too late: the lease had been given up before."""
        with self._mutex:
            if self._state is not LeaseState.HELD:
                return False
            if self._deadline <= self._clock.now():
                return False  # between deadline and now nobody vouched for it, and somebody may have looked
            self._trouble = None
            if ticket.generation == self._generation:
                self._deadline = max(self._deadline, sent_at + ticket.ttl_s - margin_s(ticket.ttl_s))
            return True

    def _not_renewed(self, trouble: BaseException) -> None:
        """A renewal had no answer: if no other one has, this is why the lease is lost."""
        self._trouble = trouble

    def _end(self, state: LeaseState, why: str = "") -> bool:
        """HELD → RELEASED or LOST; False if it had ended before, or is not ours. Whoever watches is told."""
        if self.forked:
            return False
        with self._mutex:
            if self._state is not LeaseState.HELD:
                return False
            self._state, self._why = state, why
            watchers, self._watchers = self._watchers, []
        self._ended()
        for tell in watchers:
            tell()
        return True

    def _watch(self, tell: Callable[[], None]) -> None:
        """`tell` is called once when the lease ends; at once if it has."""
        if not self.forked:
            with self._mutex:
                if self._state is LeaseState.HELD:
                    self._watchers.append(tell)
                    return
        tell()

    def _unwatch(self, tell: Callable[[], None]) -> None:
        if self.forked:
            return
        with self._mutex:
            if tell in self._watchers:
                self._watchers.remove(tell)

    def _ended(self) -> None:
        """For the two kinds of leases: sets their event."""
