"""Every exchange with the server, as a generator ("flow") that decides but does no I/O.

A flow yields `Send` or `Pause`. A client carries that out, blocking or awaiting, and sends the response into the flow
or throws `NoAnswer`. So both clients make the same decisions, and a test can play the network.

- **Every request may be repeated.** An acquire has an idempotency key, and a repeated renew or release changes nothing.
  So a request whose response was lost is sent again, to the next server if there is one, at most `tries` times.
- **A lease counts from the first send that may have caused it.** With an idempotent replay that is not the last send,
  unless the server says how much of the lease is left.
- A grant that is read after its deadline is not trusted until a renewal has confirmed it.

Must never contain `await`, a socket or a sleep.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union

from pgleaderlock._base.logging import get_logger
from pgleaderlock.client import _wire as wire
from pgleaderlock.client._core import Core, Endpoint, NoAnswer, Pause, Send, whole_number
from pgleaderlock.client._http1 import HttpRequest, HttpResponse
from pgleaderlock.client._lease import BaseLease, HeartbeatPlan, LeaseState, Renewal, RenewTicket, proof_of
from pgleaderlock.errors import (
    ConfigurationError,
    LeaseLost,
    LockHeld,
    LockServerError,
    LockServerRefused,
    LockServerUnreachable,
    PgLeaderLockError,
)
from pgleaderlock.retry import ExponentialBackoff

T = TypeVar("T")
L = TypeVar("L", bound=BaseLease)
Flow = Generator[Send | Pause, HttpResponse | None, T]
MakeLease = Callable[[wire.Granted, float, float], L]
"""Creates a lease from the grant, its ttl, and the moment from which it counts."""

TRIES_LEAST = 3
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.1
# The delay between two acquires if the server has not recommended one.
BACK_OFF = ExponentialBackoff(base_s=0.1, max_s=5.0)
WAIT_S_MAX = 86_400
# The longest wait of one request at the server; a longer wait takes several requests.
SLICE_S_MAX = 60.0
LEAST_WAIT_S = 0.01
RELEASE_S_LEAST = 0.2
CONFLICT, MANY_REQUESTS = 409, 429
_ONE_STORE = "give one client only servers that share a PostgreSQL store"

_log = get_logger("pgleaderlock")


def call(core: Core, make: Callable[[Endpoint], Send], *, tries: int | None = None) -> Flow[tuple[HttpResponse, Send]]:
    """One request. If there is no response, or an error of the server (5xx), it is sent to the next server."""
    left = tries or max(TRIES_LEAST, len(core.endpoints) + 1)
    asked = 0
    trouble = other_store = ""
    retry_after_s: float | None = None
    stale_seen: set[Endpoint] = set()
    while left > 0:
        if asked and asked % len(core.endpoints) == 0:
            yield Pause(core.random.uniform(PAUSE_S_MIN, PAUSE_S_MAX))
        endpoint = core.endpoint
        send = make(endpoint)
        if core.store is not None:
            # A server with another store then refuses at once, without doing anything.
            send.request = send.request.with_header(b"X-Lock-Store: %s\r\n" % core.store)
        try:
            response = yield send
        except NoAnswer as error:
            trouble = f"{endpoint}: {error}"
            if error.stale and endpoint not in stale_seen:
                # Only a kept-alive connection was closed: the server need not have failed.
                stale_seen.add(endpoint)
                continue
        else:
            assert response is not None
            if response.status < 500 and core.is_our_store(response.store):
                return response, send
            if response.status < 500:
                other_store = f"; {endpoint} has another store, so its leases mean nothing here: {_ONE_STORE}"
                if endpoint not in core.refused:  # log it once, not at every request while the other servers are down
                    core.refused.add(endpoint)
                    _log.error("another_store", server=str(endpoint), remedy=_ONE_STORE)
            retry_after_s = wire.retry_after_s(response)
            trouble = f"{endpoint}: HTTP {response.status}: {response.body[:200].decode('utf-8', 'replace')}"
        left -= 1
        asked += 1
        core.failed(endpoint)
    raise LockServerUnreachable(f"no lock server has answered ({trouble}{other_store})", retry_after_s=retry_after_s)


def _ask(
    core: Core, request: HttpRequest, timeout_s: float | None = None, *, fresh: bool = False
) -> Flow[tuple[HttpResponse, Send]]:
    timeout_s = core.request_timeout_s if timeout_s is None else timeout_s
    return call(core, lambda endpoint: Send(request, endpoint, timeout_s, fresh=fresh))


# --- Acquire


@dataclass(eq=False)
class AcquireAttempt:
    """One acquire: its idempotency key, and every send of it whose outcome is unknown."""

    core: Core
    lock_name: str
    ttl_ms: int
    ttl_s: float
    wait_s: float
    key: str
    open_sends: list[Send] = field(default_factory=list)
    granted: wire.Granted | None = None
    """A lease that the server has granted but the caller has not received yet."""

    @property
    def may_hold(self) -> bool:
        """Whether the server may have granted a lease that the caller has not received."""
        return self.granted is not None or any(send.sent_at is not None for send in self.open_sends)

    def counted_from(self, granted: wire.Granted) -> float:
        """A moment at or before the beginning of the lease."""
        sent = [send.sent_at for send in self.open_sends if send.sent_at is not None]
        return _counted_from(granted, self.ttl_s, min(sent), sent[-1])

    def settled(self) -> None:
        """The outcome is known: there is nothing to clean up."""
        self.granted = None
        self.open_sends.clear()

    def clean_up(self) -> Flow[None]:
        """Release the lease that a cancelled or unanswered acquire may have got.

        An acquire with the same key returns the lease that was granted, if there is one, or a new one if the lock is
        free. Either is released at once. The caller bounds the time; a lease that stays ends with its ttl.
        """
        if self.granted is None:
            request = wire.acquire_request(self.lock_name, self.core.owner_id, self.ttl_ms, 0, self.key)
            # On a new connection, so that the server reads it after the request that it cleans up. Otherwise it could
            # find the lock free, and the late request would take the lock afterwards.
            response, _ = yield from _ask(self.core, request, fresh=True)
            outcome = wire.outcome_of_acquire(response.status, wire.answer(response, conflict=True))
            if isinstance(outcome, LockHeld):
                return
            self.granted = outcome
        yield from _ask(self.core, wire.release_request(self.granted.proof))


def _counted_from(granted: wire.Granted, ttl_s: float, first: float, last: float) -> float:
    """A moment at or before the beginning of the lease. `last` is the send that was answered."""
    if not granted.replayed:
        return last + granted.waited_ms / 1000
    # The lease was granted to an earlier send; which one, and how long that one had waited, is unknown.
    if granted.remaining_ms is None:
        return first
    return last + granted.remaining_ms / 1000 - ttl_s  # remaining_ms was left when the last send had arrived


def new_attempt(core: Core, lock_name: str, ttl_s: float, wait_s: float) -> AcquireAttempt:
    ttl_ms = wire.ttl_ms(ttl_s)
    wire.milliseconds("wait_s", wait_s, least_ms=0, most_ms=1000 * WAIT_S_MAX)
    return AcquireAttempt(core, lock_name, ttl_ms, float(ttl_s), float(wait_s), core.unique())


def acquire(attempt: AcquireAttempt, make_lease: MakeLease[L], wait_s: float) -> Flow[L]:
    """A lease that is valid now, or `LockHeld`."""
    clock = attempt.core.clock
    until = clock.now() + wait_s
    while True:
        outcome = yield from _ask_for_lock(attempt, until)
        if not isinstance(outcome, LockHeld):
            break
        left_s = until - clock.now()
        if left_s < LEAST_WAIT_S:
            raise outcome
        # A slice of the wait is over, or the server is stopping and has refused its waiters.
        yield Pause(min(left_s, max(PAUSE_S_MIN, min(outcome.recommended_retry_s, PAUSE_S_MAX))))
    attempt.granted = outcome
    lease = make_lease(outcome, attempt.ttl_s, attempt.counted_from(outcome))
    if not lease.valid:
        lease = yield from _confirm(attempt, outcome, make_lease)
    attempt.settled()
    return lease


def _ask_for_lock(attempt: AcquireAttempt, until: float) -> Flow[wire.Granted | LockHeld]:
    core = attempt.core

    def make(endpoint: Endpoint) -> Send:
        left_s = min(SLICE_S_MAX, max(0.0, until - core.clock.now()))
        wait_ms = round(left_s * 1000)
        request = wire.acquire_request(attempt.lock_name, core.owner_id, attempt.ttl_ms, wait_ms, attempt.key)
        # The timeout is the server's wait plus the time for an answer: otherwise the client could miss a grant.
        send = Send(request, endpoint, left_s + core.request_timeout_s, waits=wait_ms > 0)
        attempt.open_sends.append(send)
        return send

    response, send = yield from call(core, make)
    if 400 <= response.status < 500 and response.status != CONFLICT:
        attempt.open_sends.remove(send)
        raise wire.refusal(response)
    outcome = wire.outcome_of_acquire(response.status, wire.answer(response, conflict=True))
    if isinstance(outcome, LockHeld):
        attempt.open_sends.remove(send)
    return outcome


def _confirm(attempt: AcquireAttempt, granted: wire.Granted, make_lease: MakeLease[L]) -> Flow[L]:
    """The response came too late: a renewal finds out whether the lease is still valid, and counts from its own
    send."""
    core = attempt.core
    request = wire.renew_request(granted.proof, attempt.ttl_ms)
    response, send = yield from _ask(core, request, _renew_timeout_s(core, attempt.ttl_s))
    renewed = wire.outcome_of_renew(wire.answer(response, conflict=True))
    assert send.sent_at is not None
    lease = make_lease(granted, attempt.ttl_s, send.sent_at)
    if not renewed:
        attempt.settled()
    if not renewed or not lease.valid:
        text = f"the lease of {granted.lock_name!r} had expired before its grant was read"
        raise LeaseLost(granted.lock_name, "deadline", text)
    return lease


@dataclass
class RetryPlan:
    """The delays of `acquire_with_retry`: at most `max_retries` more tries, all within `max_total_wait_s`."""

    core: Core
    max_retries: int
    max_total_wait_s: float
    began: float = 0.0
    retries: int = 0

    def __post_init__(self) -> None:
        whole_number("max_retries", self.max_retries, least=0)
        if not 0 <= self.max_total_wait_s < float("inf"):
            raise ConfigurationError(f"max_total_wait_s is {self.max_total_wait_s!r}: give seconds, 0 or more")
        self.began = self.core.clock.now()

    @property
    def left_s(self) -> float:
        return max(0.0, self.began + self.max_total_wait_s - self.core.clock.now())

    def next_delay_s(self, recommended_s: float | None) -> float | None:
        """The delay that the server recommends, or a back-off, within the client's bounds and with jitter; None to
        stop."""
        if self.retries >= self.max_retries:
            return None
        wanted_s = recommended_s or BACK_OFF.delay_s(self.retries + 1)
        delay_s = self.core.retries.delay_s(wanted_s, self.core.random)
        if delay_s >= self.left_s:
            return None
        self.retries += 1
        return delay_s


def acquire_with_retry(attempt: AcquireAttempt, make_lease: MakeLease[L], plan: RetryPlan) -> Flow[L]:
    """Try until the plan gives up, and then raise the last error.

    All tries have the same key, so a later one finds a lease that was granted late to an earlier one.
    """
    while True:
        error: LockHeld | LeaseLost | LockServerUnreachable | LockServerRefused
        recommended_s: float | None = None
        try:
            return (yield from acquire(attempt, make_lease, min(attempt.wait_s, plan.left_s)))
        except LockHeld as held:
            error, recommended_s = held, held.recommended_retry_s
        except LeaseLost as lost:
            error = lost
        except LockServerUnreachable as unreachable:
            error, recommended_s = unreachable, unreachable.retry_after_s
        except LockServerRefused as refused:
            if refused.status != MANY_REQUESTS:
                raise
            error, recommended_s = refused, refused.retry_after_s
        delay_s = plan.next_delay_s(recommended_s)
        if delay_s is None:
            raise error
        yield Pause(delay_s)


# --- Renew and release


def _renew_timeout_s(core: Core, ttl_s: float) -> float:
    """The timeout of a renewal: short enough to leave time for another try after a lost response."""
    return min(core.request_timeout_s, max(0.05, ttl_s / 3))


def renew(core: Core, lease: BaseLease, ttl_s: float | None) -> Flow[None]:
    """Renew a lease from now. Raises `LeaseLost` if it has ended."""
    if not lease.valid:
        lease._end(LeaseState.LOST, "deadline")  # noqa: SLF001 - tell its watchers as well
    lease.raise_if_lost()
    extend_ms = wire.ttl_ms(lease.ttl_s if ttl_s is None else ttl_s)
    ticket = lease._about_to_renew(extend_ms / 1000, core.clock.now())  # noqa: SLF001 - the lease is for us to keep
    request = wire.renew_request(proof_of(lease), extend_ms)
    response, send = yield from _ask(core, request, _renew_timeout_s(core, extend_ms / 1000))
    assert send.sent_at is not None
    _renewed(lease, ticket, wire.outcome_of_renew(wire.answer(response, conflict=True)), send.sent_at)
    lease.raise_if_lost()


def _renewed(lease: BaseLease, ticket: RenewTicket, renewed: bool, sent_at: float) -> bool:
    """Apply the server's answer to a renewal. False if the lease was not extended: it is lost then."""
    if renewed and lease._renewed(ticket, sent_at):  # noqa: SLF001
        return True
    lease._end(LeaseState.LOST, "deadline" if renewed else "not_owner")  # noqa: SLF001
    return False


def renew_together(core: Core, plan: HeartbeatPlan, renewals: Sequence[Renewal]) -> Flow[None]:
    """Renew several leases in one call, sent once. The plan gets the outcome, and decides about a retry."""
    now = core.clock.now()
    timeout_s = plan.timeout_s(renewals)
    tickets = [renewal.lease._about_to_renew(renewal.lease.ttl_s, now) for renewal in renewals]  # noqa: SLF001
    extends = [
        (proof_of(renewal.lease), wire.ttl_ms(ticket.ttl_s)) for renewal, ticket in zip(renewals, tickets, strict=True)
    ]
    single = len(renewals) == 1
    if single:
        request = wire.renew_request(*extends[0])
    else:
        request = wire.batch_request([wire.renew_operation(*extend) for extend in extends])
    try:
        response, send = yield from call(core, lambda endpoint: Send(request, endpoint, timeout_s), tries=1)
        fields = wire.answer(response, conflict=single)
        answers = [(200, fields)] if single else wire.batch_results(fields, len(renewals))
        outcomes = [wire.outcome_of_renew(body) for _, body in answers]
    except PgLeaderLockError as error:
        plan.failed(renewals, error)
        return
    assert send.sent_at is not None
    for renewal, ticket, renewed in zip(renewals, tickets, outcomes, strict=True):
        if renewed:
            plan.renewed(renewal, ticket, send.sent_at)
        else:
            plan.refused(renewal)


def release(core: Core, lease: BaseLease) -> Flow[bool]:
    """Release a lease. True if that ended it, False if it had ended before. It may be called repeatedly."""
    ours = lease._end(LeaseState.RELEASED)  # noqa: SLF001 - from here on a refused renewal is not a loss
    # A lease that was given up at its deadline may still exist at the server: release it for the next holder.
    if not ours and (lease.state is LeaseState.RELEASED or lease.loss().reason != "deadline"):
        return False
    left_s = lease.deadline - core.clock.now()
    request = wire.release_request(proof_of(lease))
    # Never wait longer for the answer than the lease itself would have lasted.
    timeout_s = min(core.request_timeout_s, max(RELEASE_S_LEAST, left_s))
    sends: list[Send] = []

    def make(endpoint: Endpoint) -> Send:
        sends.append(Send(request, endpoint, timeout_s))
        return sends[-1]

    response, _ = yield from call(core, make)
    if wire.outcome_of_release(wire.answer(response)):
        return True
    # An earlier send of this release may have ended the lease, and its response was lost. As long as the lease was
    # valid by our clock, anything else is unlikely.
    return left_s > 0 and sum(send.sent_at is not None for send in sends) > 1


def release_again(core: Core, lease: BaseLease) -> Flow[None]:
    """Send a release without waiting for its answer."""
    if not lease.forked:
        yield from _ask(core, wire.release_request(proof_of(lease)))


def give_back(core: Core, lease: BaseLease) -> Flow[LeaseLost | None]:
    """Release the lease at the end of a `lock` block; returns the loss if the lease had ended unnoticed."""
    if lease.state is LeaseState.RELEASED:
        return None  # the block has released it
    try:
        if (yield from release(core, lease)):
            return None
    except LockServerError as error:
        _log.warning("release_failed", lock=lease.lock_name, error=error)
        return None  # by our clock, the lease was valid until now
    text = f"the lease of {lease.lock_name!r} had ended before it was released: broken, or the server lost it"
    return LeaseLost(lease.lock_name, "not_owner", text)


# --- The other calls


def get(core: Core, lock_name: str) -> Flow[wire.LockInfo]:
    response, _ = yield from _ask(core, wire.get_request(lock_name))
    return wire.lock_info(wire.answer(response))


def list_page(core: Core, prefix: str, cursor: str | None, limit: int) -> Flow[wire.Page]:
    response, _ = yield from _ask(core, wire.list_request(prefix, cursor, limit))
    page = wire.lock_page(wire.answer(response))
    if page.next_cursor is not None and page.next_cursor == cursor:
        raise LockServerError("the server's list does not move on")
    return page


def break_lock(core: Core, lock_name: str) -> Flow[wire.LockInfo]:
    response, _ = yield from _ask(core, wire.break_request(lock_name))
    return wire.broken(wire.answer(response))


# --- Many operations in one call and one transaction. A batch whose response was lost is sent again with the same keys.


@dataclass(frozen=True)
class Acquire:
    """Acquire a lock. Does not wait."""

    lock_name: str
    ttl_s: float = 30.0


@dataclass(frozen=True)
class Renew:
    """Renew a lease: from now, for its ttl."""

    lease: BaseLease


@dataclass(frozen=True)
class Release:
    """Release a lease."""

    lease: BaseLease


Operation = Acquire | Renew | Release
Outcome = Union[L, LockHeld, LockServerRefused, bool]  # noqa: UP007 - an alias with a variable needs the long form


class BatchAttempt:
    """The operations to send, each acquire with its own key, and every send of them."""

    def __init__(self, core: Core, operations: Sequence[Operation]) -> None:
        if not 1 <= len(operations) <= wire.BATCH_MAX:
            raise ConfigurationError(f"a batch has 1 to {wire.BATCH_MAX} operations, not {len(operations)}")
        self.core = core
        self.operations = list(operations)
        for each in self.operations:
            if not isinstance(each, Acquire) and each.lease.forked:
                raise each.lease.loss()  # before anything has changed
        self.tickets: dict[int, RenewTicket] = {}
        self.encoded = [self._encode(index, each) for index, each in enumerate(self.operations)]
        self.sends: list[Send] = []

    def _encode(self, index: int, operation: Operation) -> dict[str, Any]:
        if isinstance(operation, Acquire):
            ttl_ms = wire.ttl_ms(operation.ttl_s)
            return wire.acquire_operation(operation.lock_name, self.core.owner_id, ttl_ms, self.core.unique())
        lease = operation.lease
        if isinstance(operation, Renew):
            self.tickets[index] = lease._about_to_renew(lease.ttl_s, self.core.clock.now())  # noqa: SLF001
            return wire.renew_operation(proof_of(lease), wire.ttl_ms(lease.ttl_s))
        lease._end(LeaseState.RELEASED)  # noqa: SLF001 - from here on a refused renewal is not a loss
        return wire.release_operation(proof_of(lease))

    @property
    def acquires(self) -> list[dict[str, Any]]:
        return [fields for fields in self.encoded if fields["op"] == "acquire"]

    @property
    def may_hold(self) -> bool:
        return bool(self.acquires) and any(send.sent_at is not None for send in self.sends)

    def clean_up(self) -> Flow[None]:
        """Release the leases that the batch may have got, as for a single acquire."""
        response, _ = yield from _ask(self.core, wire.batch_request(self.acquires), fresh=True)
        results = wire.batch_results(wire.answer(response), len(self.acquires))
        outcomes = [wire.outcome_of_acquire(status, body) for status, body in results if status == 200]
        releases = [wire.release_operation(each.proof) for each in outcomes if isinstance(each, wire.Granted)]
        if releases:
            yield from _ask(self.core, wire.batch_request(releases))


Attempt = AcquireAttempt | BatchAttempt


def batch(attempt: BatchAttempt, make_lease: MakeLease[L]) -> "Flow[list[Outcome[L]]]":
    """One outcome per operation, in order."""
    request = wire.batch_request(attempt.encoded)

    def make(endpoint: Endpoint) -> Send:
        attempt.sends.append(Send(request, endpoint, attempt.core.request_timeout_s))
        return attempt.sends[-1]

    response, send = yield from call(attempt.core, make)
    results = wire.batch_results(wire.answer(response), len(attempt.operations))
    assert send.sent_at is not None
    first = min(sent.sent_at for sent in attempt.sends if sent.sent_at is not None)
    outcomes: list[Outcome[L]] = []
    for index, (operation, (status, body)) in enumerate(zip(attempt.operations, results, strict=True)):
        if 400 <= status < 500 and status != CONFLICT:
            outcomes.append(LockServerRefused(status, f"the lock server refused (HTTP {status}): {body.get('error')}"))
        elif isinstance(operation, Acquire):
            granted, ttl_s = wire.outcome_of_acquire(status, body), operation.ttl_s
            if isinstance(granted, LockHeld):
                outcomes.append(granted)
            else:
                outcomes.append(make_lease(granted, ttl_s, _counted_from(granted, ttl_s, first, send.sent_at)))
        elif isinstance(operation, Renew):
            renewed = wire.outcome_of_renew(body)
            outcomes.append(_renewed(operation.lease, attempt.tickets[index], renewed, send.sent_at))
        else:
            outcomes.append(wire.outcome_of_release(body))
    return outcomes
