"""The heartbeat of all leases of one client: which are due, which go together, which are lost. No waiting.

One plan serves a whole client, because leases that are renewed together cost one call: 1,000 leases are two. Whoever
runs it (a task or a thread) asks `look` what to do now, does it, and comes back at `wake_at` or when told.

- A lease is lost when the server says so, or when its own deadline passes: while a renewal is on its way, too.
- A renewal without an answer is no loss: it is tried again, on the next server, for as long as the deadline allows.
- A lease that was released is none of our business any more, whatever a late answer says.

Imports `_core`, `_flows`, `_lease`, `_wire`, `errors`, `_logging` and the standard library. Must never wait, and never
end a lease that was released.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pgleaderlock._logging import get_logger
from pgleaderlock.client import _wire as wire
from pgleaderlock.client._core import Core, Endpoint, Send, positive_s
from pgleaderlock.client._flows import Flow, call
from pgleaderlock.client._lease import BaseLease, LeaseState, RenewTicket
from pgleaderlock.errors import ConfigurationError, PgLeaderLockError

__all__ = ["Beat", "HeartbeatPlan", "Look", "renew_together"]

# Renewed at a third of the ttl, so that two renewals in a row may fail.
INTERVAL_SHARE = 1 / 3
# Those that are due within this share of their interval go along with one that is due now.
TOGETHER_SHARE = 0.25
RETRY_S_MIN, RETRY_S_MAX = 0.02, 1.0
TIMEOUT_S_LEAST = 0.02

_log = get_logger("pgleaderlock")


@dataclass(eq=False)
class Beat:
    """The heartbeat of one lease."""

    lease: BaseLease
    interval_s: float
    due_at: float
    under_way: bool = False
    failures: int = 0


@dataclass(frozen=True)
class Look:
    """What is to be done now: these are to be renewed, one call each list; then look again at `wake_at`."""

    batches: list[list[Beat]]
    wake_at: float | None
    """None: nothing is left to do."""


class HeartbeatPlan:
    """Safe to use from any thread: a renewal is answered in another one than the plan is looked at."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._mutex = threading.RLock()
        self._beats: dict[BaseLease, Beat] = {}

    def __len__(self) -> int:
        return len(self._beats)

    def add(self, lease: BaseLease, interval_s: float | None) -> None:
        """Keeps a lease from now on. A second time: with another interval."""
        interval_s = lease.ttl_s * INTERVAL_SHARE if interval_s is None else positive_s("interval_s", interval_s)
        if interval_s >= lease.ttl_s:
            raise ConfigurationError(
                f"interval_s is {interval_s:g} and the lease lasts {lease.ttl_s:g} s: renew it sooner than it ends"
            )
        due_at = self._core.clock.now() + min(interval_s, lease.remaining_s / 2)
        with self._mutex:
            known = self._beats.get(lease)
            if known is None:
                self._beats[lease] = Beat(lease, interval_s, due_at)
            else:
                known.interval_s, known.due_at = interval_s, min(known.due_at, due_at)

    def discard(self, lease: BaseLease) -> None:
        with self._mutex:
            self._beats.pop(lease, None)

    def look(self) -> Look:
        """Ends what is over, and says what is due."""
        with self._mutex:
            return self._look(self._core.clock.now())

    def _look(self, now: float) -> Look:
        for beat in list(self._beats.values()):
            if beat.lease.state is not LeaseState.HELD:
                self._lose(beat, "deadline")  # unless it has been ended already, by whomever
        due: list[Beat] = []
        idle = [beat for beat in self._beats.values() if not beat.under_way]
        if any(beat.due_at <= now for beat in idle):
            due = [beat for beat in idle if beat.due_at - TOGETHER_SHARE * beat.interval_s <= now]
            due.sort(key=lambda beat: beat.lease.deadline)
        for beat in due:
            beat.under_way = True
        batches = [due[start : start + wire.BATCH_MAX] for start in range(0, len(due), wire.BATCH_MAX)]
        return Look(batches, self._wake_at())

    def _wake_at(self) -> float | None:
        moments = [
            beat.lease.deadline if beat.under_way else min(beat.due_at, beat.lease.deadline)
            for beat in self._beats.values()
        ]
        return min(moments, default=None)

    def renewed(self, beat: Beat, ticket: RenewTicket, sent_at: float) -> None:
        beat.under_way, beat.failures = False, 0
        beat.due_at = sent_at + min(beat.interval_s, ticket.ttl_s * INTERVAL_SHARE * 2)
        if not beat.lease._renewed(ticket, sent_at):  # noqa: SLF001 - the plan keeps the lease
            self._lose(beat, "deadline")

    def refused(self, beat: Beat) -> None:
        self._lose(beat, "not_owner")

    def failed(self, beats: Sequence[Beat], error: BaseException) -> None:
        """No answer, or none to go by: again soon, each time a little later."""
        now = self._core.clock.now()
        for beat in beats:
            beat.under_way = False
            beat.lease._not_renewed(error)  # noqa: SLF001
            beat.failures += 1
            delay_s = min(RETRY_S_MAX, beat.interval_s / 4, RETRY_S_MIN * 2.0 ** min(beat.failures, 10))
            beat.due_at = now + delay_s * self._core.random.uniform(0.5, 1.0)
        if beats and beats[0].failures == 1:
            _log.warning("renewal_failed", lock=beats[0].lease.lock_name, leases=len(beats), error=error)

    def _lose(self, beat: Beat, why: str) -> None:
        self.discard(beat.lease)
        if beat.lease._end(LeaseState.LOST, why):  # noqa: SLF001
            _log.warning("lease_lost", lock=beat.lease.lock_name, token=beat.lease.fencing_token, reason=why)

    def timeout_s(self, beats: Sequence[Beat]) -> float:
        """For one renewal: half of what the most urgent one has left, so that there is time for another try."""
        left_s = min(beat.lease.remaining_s for beat in beats)
        return max(TIMEOUT_S_LEAST, min(self._core.request_timeout_s, left_s / 2))


def renew_together(core: Core, plan: HeartbeatPlan, beats: Sequence[Beat], timeout_s: float) -> Flow[None]:
    """One call for all of them, one try: the plan has its own way of trying again, and is told what comes of it."""
    now = core.clock.now()
    proofs = [(b.lease.lock_name, b.lease.owner_id, b.lease.lease_id, b.lease.fencing_token) for b in beats]
    tickets = [beat.lease._about_to_renew(beat.lease.ttl_s, now) for beat in beats]  # noqa: SLF001
    extends = [wire.ttl_ms(ticket.ttl_s) for ticket in tickets]
    single = len(beats) == 1
    if single:
        request = wire.renew_request(*proofs[0], extends[0])
    else:
        pairs = zip(proofs, extends, strict=True)
        request = wire.batch_request([wire.renew_operation(*proof, extend) for proof, extend in pairs])

    def make(endpoint: Endpoint) -> Send:
        return Send(request, endpoint, timeout_s)

    try:
        reply, send = yield from call(core, make, tries=1)
        fields = wire.answer(reply, conflict=single)
        answers = [(200, fields)] if single else wire.batch_results(fields, len(beats))
        outcomes = [wire.outcome_of_renew(body) for _, body in answers]
    except PgLeaderLockError as error:
        plan.failed(beats, error)
        return
    assert send.sent_at is not None
    for beat, ticket, renewed in zip(beats, tickets, outcomes, strict=True):
        if renewed:
            plan.renewed(beat, ticket, send.sent_at)
        else:
            plan.refused(beat)
