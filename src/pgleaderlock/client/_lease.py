"""This process's view of its leases: until when each is valid, whether it has ended, when to renew it.

    HELD ── release() ──▶ RELEASED
      └──── the server says no, or the deadline passes ──▶ LOST

**The deadline is the client's own.** It counts on the boot-time clock from *before* the request that last extended the
lease was sent, so the server's lease always outlives it. The server's wall-clock expiry is never used. A renewal that
is answered after the deadline does not revive a lease that was given up.

What it does not promise: that no write of yours is still under way when the deadline passes. Pass the fencing token to
the resource that must refuse a stale writer.

Must never wait or speak to a server, and never end a lease that was released.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock.client._core import Core, positive_s
from pgleaderlock.client._wire import BATCH_MAX, Granted, Proof
from pgleaderlock.errors import ConfigurationError, LeaseLost
from pgleaderlock.retry import ExponentialBackoff

__all__ = [
    "BaseHeartbeat",
    "BaseLease",
    "Due",
    "HeartbeatPlan",
    "LeaseState",
    "RenewTicket",
    "Renewal",
    "margin_s",
    "proof_of",
]

# The rates of two clocks may differ by 1 %; the rest of the margin is for the time between the check and the act.
MARGIN_SHARE = 0.01
MARGIN_S_LEAST = 0.002
# Renewed at a third of the ttl, so that two renewals in a row may fail.
INTERVAL_SHARE = 1 / 3
# Leases that are due within this share of their interval are renewed together with one that is due now.
TOGETHER_SHARE = 0.25
BACK_OFF = ExponentialBackoff(base_s=0.04, max_s=1.0)
TIMEOUT_S_LEAST = 0.02

_log = get_logger("pgleaderlock")


def margin_s(ttl_s: float) -> float:
    """How much earlier than at the server a lease of this length ends here."""
    return min(ttl_s / 2, MARGIN_SHARE * ttl_s + MARGIN_S_LEAST)


class LeaseState(Enum):
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RenewTicket:
    """A renewal that is about to be sent, and its effect if it is acknowledged."""

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
        """Higher than the token of every earlier lease of this lock. Pass it to the resource that must refuse stale
        writers."""
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
        """The state. It is `LOST` as soon as the deadline has passed, even before anything has reacted to that."""
        return LeaseState.LOST if self._state is LeaseState.HELD and not self.valid else self._state

    @property
    def forked(self) -> bool:
        """Does the lease belong to the parent process? Then its mutex may be held by a thread that does not exist
        here."""
        return self._pid != os.getpid()

    @property
    def ttl_s(self) -> float:
        """The duration that a renewal gives it."""
        return self._ttl_s

    @property
    def deadline(self) -> float:
        """The deadline on the boot-time clock of this machine."""
        return self._deadline

    @property
    def remaining_s(self) -> float:
        """How long the lease is still valid; 0 if it has ended."""
        if self._state is not LeaseState.HELD or self.forked:
            return 0.0
        return max(0.0, self._deadline - self._clock.now())

    @property
    def valid(self) -> bool:
        """Whether the lease is valid, by the clock at this moment: False at once in a process that wakes from a long
        pause."""
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

    # --- For the client only

    def _about_to_renew(self, ttl_s: float, now: float) -> RenewTicket:
        """Called before a renewal is sent. A shorter ttl may take effect from now on, so this shortens the deadline."""
        with self._mutex:
            if ttl_s < self._ttl_s:
                # A renewal with the longer ttl may reach the server before or after this one: ignore its answer.
                self._generation += 1
                self._deadline = min(self._deadline, now + ttl_s - margin_s(ttl_s))
            self._ttl_s = ttl_s
            return RenewTicket(ttl_s, self._generation)

    def _renewed(self, ticket: RenewTicket, sent_at: float) -> bool:
        """The server has acknowledged the renewal. False if that came too late, after the lease was given up."""
        with self._mutex:
            if self._state is not LeaseState.HELD:
                return False
            if self._deadline <= self._clock.now():
                return False  # the lease may have been reported as lost since its deadline
            self._trouble = None
            if ticket.generation == self._generation:
                self._deadline = max(self._deadline, sent_at + ticket.ttl_s - margin_s(ticket.ttl_s))
            return True

    def _not_renewed(self, trouble: BaseException) -> None:
        """A renewal got no answer. If none gets one, this is the reason for the loss."""
        self._trouble = trouble

    def _end(self, state: LeaseState, why: str = "") -> bool:
        """HELD → RELEASED or LOST, and call the watchers. False if it had ended before or belongs to the parent."""
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
        """Set the event of this kind of lease."""


def proof_of(lease: BaseLease) -> Proof:
    return Proof(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token)


L = TypeVar("L", bound=BaseLease)


class BaseHeartbeat(Generic[L]):
    """Renews one lease until it ends or `stop()` is called."""

    def __init__(self, lease: L, stop: Callable[[BaseLease], None]) -> None:
        self.lease = lease
        self._stop = stop

    def stop(self) -> None:
        """End the renewals. The lease stays until it is released or its deadline passes."""
        self._stop(self.lease)


@dataclass(eq=False)
class Renewal:
    """The schedule of one lease's next renewal."""

    lease: BaseLease
    interval_s: float
    due_at: float
    under_way: bool = False
    failures: int = 0


@dataclass(frozen=True)
class Due:
    """What to do now: renew these leases, with one call per batch; then ask the plan again at `wake_at`."""

    batches: list[list[Renewal]]
    wake_at: float | None
    """None: no lease is left to renew."""


class HeartbeatPlan:
    """Decides when to renew each lease of one client, which of them together, and which are lost.

    One plan serves a whole client, because leases that are renewed together cost one call: two calls for 1,000 leases.
    A task or a thread asks `due` what to do now, does it, and asks again at `wake_at` or when it is woken.

    - A lease is lost when the server says so, or when its own deadline passes, even while a renewal is under way.
    - A renewal without an answer is not a loss: it is sent again, to the next server, until the deadline.

    Safe to use from any thread: a renewal is answered on another thread than the one that calls `due`.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._mutex = threading.RLock()
        self._renewals: dict[BaseLease, Renewal] = {}

    def __len__(self) -> int:
        return len(self._renewals)

    def add(self, lease: BaseLease, interval_s: float | None) -> None:
        """Renew a lease from now on. A second call changes its interval."""
        interval_s = lease.ttl_s * INTERVAL_SHARE if interval_s is None else positive_s("interval_s", interval_s)
        if interval_s >= lease.ttl_s:
            raise ConfigurationError(
                f"interval_s is {interval_s:g} and the lease lasts {lease.ttl_s:g} s: renew it sooner than it ends"
            )
        due_at = self._core.clock.now() + min(interval_s, lease.remaining_s / 2)
        with self._mutex:
            known = self._renewals.setdefault(lease, Renewal(lease, interval_s, due_at))
            known.interval_s, known.due_at = interval_s, min(known.due_at, due_at)

    def discard(self, lease: BaseLease) -> None:
        with self._mutex:
            self._renewals.pop(lease, None)

    def due(self) -> Due:
        """End the leases whose deadline has passed, and return what is due."""
        with self._mutex:
            now = self._core.clock.now()
            for renewal in list(self._renewals.values()):
                if renewal.lease.state is not LeaseState.HELD:
                    self._lose(renewal, "deadline")  # does nothing to a lease that has ended before
            due: list[Renewal] = []
            idle = [renewal for renewal in self._renewals.values() if not renewal.under_way]
            if any(renewal.due_at <= now for renewal in idle):
                due = [each for each in idle if each.due_at - TOGETHER_SHARE * each.interval_s <= now]
                due.sort(key=lambda renewal: renewal.lease.deadline)
            for renewal in due:
                renewal.under_way = True
            batches = [due[start : start + BATCH_MAX] for start in range(0, len(due), BATCH_MAX)]
            return Due(batches, self._wake_at())

    def _wake_at(self) -> float | None:
        moments = (
            renewal.lease.deadline if renewal.under_way else min(renewal.due_at, renewal.lease.deadline)
            for renewal in self._renewals.values()
        )
        return min(moments, default=None)

    def timeout_s(self, renewals: Sequence[Renewal]) -> float:
        """The timeout of one call: half of the remaining time of the most urgent lease, to leave time for a retry."""
        left_s = min(renewal.lease.remaining_s for renewal in renewals)
        return max(TIMEOUT_S_LEAST, min(self._core.request_timeout_s, left_s / 2))

    def renewed(self, renewal: Renewal, ticket: RenewTicket, sent_at: float) -> None:
        renewal.under_way, renewal.failures = False, 0
        renewal.due_at = sent_at + min(renewal.interval_s, ticket.ttl_s * INTERVAL_SHARE * 2)
        if not renewal.lease._renewed(ticket, sent_at):  # noqa: SLF001 - the plan keeps the lease
            self._lose(renewal, "deadline")

    def refused(self, renewal: Renewal) -> None:
        self._lose(renewal, "not_owner")

    def failed(self, renewals: Sequence[Renewal], error: Exception) -> None:
        """There was no usable answer: try again soon, with a growing delay."""
        now = self._core.clock.now()
        for renewal in renewals:
            renewal.under_way = False
            renewal.lease._not_renewed(error)  # noqa: SLF001
            renewal.failures += 1
            delay_s = BACK_OFF.delay_s(renewal.failures)
            renewal.due_at = now + min(delay_s, renewal.interval_s / 4) * self._core.random.uniform(0.5, 1.0)
        if renewals and renewals[0].failures == 1:
            _log.warning("renewal_failed", lock=renewals[0].lease.lock_name, leases=len(renewals), error=error)

    def _lose(self, renewal: Renewal, why: str) -> None:
        self.discard(renewal.lease)
        if renewal.lease._end(LeaseState.LOST, why):  # noqa: SLF001
            _log.warning("lease_lost", lock=renewal.lease.lock_name, token=renewal.lease.fencing_token, reason=why)
