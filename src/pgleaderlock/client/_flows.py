"""Every conversation with the server, as a generator that decides and never waits.

A flow yields `Send` or `Pause`; whoever runs it does that, blocking or awaiting, and sends the `Reply` back in or
throws `NoAnswer`. So both clients make the same decisions, and a test can play the network.

- **Everything we send may be repeated.** An acquire carries an idempotency key, and a repeated renew or release changes
  nothing. So a reply that was lost is asked for again, on the next server when there is one. Bounded by `tries`.
- **A grant counts from the first send that may have caused it**: with an idempotent replay that is not the last one.
- A grant whose deadline has passed before it was read is not believed until a renewal has confirmed it.

Imports `_core`, `_lease`, `_wire`, `errors` and the standard library. Must never contain `await`, a socket or a sleep.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from pgleaderlock.client import _wire as wire
from pgleaderlock.client._core import Core, Endpoint, NoAnswer, Pause, Send, whole_number
from pgleaderlock.client._http1 import Reply, Request
from pgleaderlock.client._lease import BaseLease, LeaseState
from pgleaderlock.errors import (
    ConfigurationError,
    LeaseLost,
    LockHeld,
    LockServerError,
    LockServerRefused,
    LockServerUnreachable,
)

__all__ = [
    "AcquireAttempt",
    "Flow",
    "RetryPlan",
    "acquire",
    "acquire_with_retry",
    "break_lock",
    "call",
    "clean_up",
    "found_lost",
    "get",
    "list_page",
    "new_attempt",
    "release",
    "release_again",
    "renew",
]

T = TypeVar("T")
L = TypeVar("L", bound=BaseLease)
Flow = Generator[Send | Pause, Reply | None, T]

TRIES_LEAST = 3
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.1
WAIT_S_MAX = 86_400
SLICE_S_MAX = 60.0
"""What the server lets one request wait; a longer wait is asked for again."""
LEAST_WAIT_S = 0.01
RELEASE_S_LEAST = 0.2
MANY_REQUESTS = 429


def call(core: Core, make: Callable[[Endpoint], Send], *, tries: int | None = None) -> Flow[tuple[Reply, Send]]:
    """One question, asked again elsewhere when there is no answer or the server cannot serve (5xx)."""
    left = tries or max(TRIES_LEAST, len(core.endpoints) + 1)
    asked = 0
    trouble = ""
    retry_after_s: float | None = None
    stale_seen: set[Endpoint] = set()
    while left > 0:
        if asked and asked % len(core.endpoints) == 0:
            yield Pause(core.random.uniform(PAUSE_S_MIN, PAUSE_S_MAX))
        endpoint = core.endpoint
        send = make(endpoint)
        try:
            reply = yield send
        except NoAnswer as error:
            trouble = f"{endpoint}: {error}"
            if error.stale and endpoint not in stale_seen:
                # A kept connection that the server had closed says nothing about the server.
                stale_seen.add(endpoint)
                continue
        else:
            assert reply is not None
            if reply.status < 500:
                return reply, send
            retry_after_s = wire.retry_after_s(reply)
            trouble = f"{endpoint}: HTTP {reply.status}: {reply.body[:200].decode('utf-8', 'replace')}"
        left -= 1
        asked += 1
        core.failed(endpoint)
    raise LockServerUnreachable(f"no lock server has answered ({trouble})", retry_after_s=retry_after_s)


def _ask(
    core: Core, request: Request, timeout_s: float | None = None, *, fresh: bool = False
) -> Flow[tuple[Reply, Send]]:
    timeout_s = core.request_timeout_s if timeout_s is None else timeout_s
    return call(core, lambda endpoint: Send(request, endpoint, timeout_s, fresh=fresh))


# -- acquire ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class AcquireAttempt:
    """One wish for a lock: its key, and every send of it whose outcome is not known."""

    lock_name: str
    ttl_ms: int
    ttl_s: float
    wait_s: float
    key: str
    open_sends: list[Send] = field(default_factory=list)
    granted: wire.Granted | None = None
    """A lease that the server has given, and that nobody has received yet."""

    @property
    def may_hold(self) -> bool:
        """The server may have given us a lease that nobody here knows of."""
        return self.granted is not None or any(send.sent_at is not None for send in self.open_sends)

    def counted_from(self, granted: wire.Granted) -> float:
        """The moment from which the lease certainly ran, or an earlier one."""
        sent = [send.sent_at for send in self.open_sends if send.sent_at is not None]
        # A replay was granted to an earlier send; to which, and how long that one had waited, is not known.
        return min(sent) if granted.replayed else sent[-1] + granted.waited_ms / 1000


def new_attempt(core: Core, lock_name: str, ttl_s: float, wait_s: float) -> AcquireAttempt:
    ttl_ms = wire.ttl_ms(ttl_s)
    wire.milliseconds("wait_s", wait_s, least_ms=0, most_ms=1000 * WAIT_S_MAX)
    return AcquireAttempt(lock_name, ttl_ms, float(ttl_s), float(wait_s), core.unique())


def acquire(
    core: Core, attempt: AcquireAttempt, make_lease: Callable[[wire.Granted, float, float], L], wait_s: float
) -> Flow[L]:
    """A lease that is valid now, or `LockHeld`. `make_lease` gets the grant, its ttl, and the moment it counts from."""
    until = core.clock.now() + wait_s
    while True:
        outcome = yield from _ask_for_lock(core, attempt, until)
        if not isinstance(outcome, LockHeld):
            break
        left_s = until - core.clock.now()
        if left_s < LEAST_WAIT_S:
            raise outcome
        # A slice of the wait is over, or the server stops and has sent its waiters away.
        yield Pause(min(left_s, max(PAUSE_S_MIN, min(outcome.recommended_retry_s, PAUSE_S_MAX))))
    attempt.granted = outcome
    lease = make_lease(outcome, attempt.ttl_s, attempt.counted_from(outcome))
    if not lease.valid:
        lease = yield from _confirm(core, attempt, outcome, make_lease)
    attempt.granted = None
    attempt.open_sends.clear()
    return lease


def _ask_for_lock(core: Core, attempt: AcquireAttempt, until: float) -> Flow[wire.Granted | LockHeld]:
    def make(endpoint: Endpoint) -> Send:
        left_s = min(SLICE_S_MAX, max(0.0, until - core.clock.now()))
        wait_ms = round(left_s * 1000)
        request = wire.acquire_request(attempt.lock_name, core.owner_id, attempt.ttl_ms, wait_ms, attempt.key)
        # Longer than the server's own wait, by all the time that an answer may take: else we would hang up on a grant.
        send = Send(request, endpoint, left_s + core.request_timeout_s, waits=wait_ms > 0)
        attempt.open_sends.append(send)
        return send

    reply, send = yield from call(core, make)
    if 400 <= reply.status < 500 and reply.status != 409:
        attempt.open_sends.remove(send)
        raise wire.refusal(reply)
    outcome = wire.outcome_of_acquire(reply.status, wire.answer(reply, conflict=True))
    if isinstance(outcome, LockHeld):
        attempt.open_sends.remove(send)
    return outcome


def _confirm(
    core: Core,
    attempt: AcquireAttempt,
    granted: wire.Granted,
    make_lease: Callable[[wire.Granted, float, float], L],
) -> Flow[L]:
    """The grant was long on its way: is it still good? A renewal says so, and counts from now."""
    request = wire.renew_request(
        granted.lock_name, granted.owner_id, granted.lease_id, granted.fencing_token, attempt.ttl_ms
    )
    reply, send = yield from _ask(core, request, _renew_timeout_s(core, attempt.ttl_s))
    renewed = wire.outcome_of_renew(wire.answer(reply, conflict=True))
    assert send.sent_at is not None
    lease = make_lease(granted, attempt.ttl_s, send.sent_at)
    if not renewed:
        attempt.granted = None
        attempt.open_sends.clear()
    if not renewed or not lease.valid:
        text = f"the lease of {granted.lock_name!r} had expired before its grant was read"
        raise LeaseLost(granted.lock_name, "deadline", text)
    return lease


def clean_up(core: Core, attempt: AcquireAttempt) -> Flow[None]:
    """Gives back what an acquire may have got that was cancelled or had no answer.

    The same key brings the lease that was granted, if there is one; or, when the lock was free, a new one. Either is
    released at once. Bounded by whoever runs it; the ttl ends what stays.
    """
    granted = attempt.granted
    if granted is None:
        request = wire.acquire_request(attempt.lock_name, core.owner_id, attempt.ttl_ms, 0, attempt.key)
        # After what it cleans up: else it would find the lock free, and the one that comes late would keep it.
        reply, _ = yield from _ask(core, request, fresh=True)
        outcome = wire.outcome_of_acquire(reply.status, wire.answer(reply, conflict=True))
        if isinstance(outcome, LockHeld):
            return
        granted = attempt.granted = outcome
    request = wire.release_request(granted.lock_name, granted.owner_id, granted.lease_id, granted.fencing_token)
    yield from _ask(core, request)


@dataclass
class RetryPlan:
    """When to try again, and when to stop: at most `max_retries` more tries, all of it within `max_total_wait_s`."""

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
        """Never sooner than the server recommends, up to half as much later so that not all come back at once."""
        if self.retries >= self.max_retries:
            return None
        # Without a recommendation: 0.1 s, doubling, at most 5 s.
        base_s = recommended_s or min(5.0, 0.1 * 2 ** min(self.retries, 10))
        delay_s = base_s * self.core.random.uniform(1.0, 1.5)
        if delay_s >= self.left_s:
            return None
        self.retries += 1
        return delay_s


def acquire_with_retry(
    core: Core,
    attempt: AcquireAttempt,
    make_lease: Callable[[wire.Granted, float, float], L],
    plan: RetryPlan,
) -> Flow[L]:
    """Tries until the plan gives up, and then raises the last reason.

    One key for all of it: whatever is granted late to an earlier try is found by a later one.
    """
    while True:
        error: LockHeld | LeaseLost | LockServerUnreachable | LockServerRefused
        recommended_s: float | None = None
        try:
            return (yield from acquire(core, attempt, make_lease, min(attempt.wait_s, plan.left_s)))
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


# -- renew and release ------------------------------------------------------------------------------------------------


def _renew_timeout_s(core: Core, ttl_s: float) -> float:
    """Short enough that a lost reply leaves time for another try."""
    return min(core.request_timeout_s, max(0.05, ttl_s / 3))


def renew(core: Core, lease: BaseLease, ttl_s: float | None) -> Flow[None]:
    """Extends a lease from now. Raises `LeaseLost` when it is gone."""
    if not lease.valid:
        lease._end(LeaseState.LOST, "deadline")  # noqa: SLF001 - whoever watches it should know as well
    lease.raise_if_lost()
    extend_ms = wire.ttl_ms(lease.ttl_s if ttl_s is None else ttl_s)
    ticket = lease._about_to_renew(extend_ms / 1000, core.clock.now())  # noqa: SLF001 - the lease is for us to keep
    request = wire.renew_request(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token, extend_ms)
    reply, send = yield from _ask(core, request, _renew_timeout_s(core, extend_ms / 1000))
    assert send.sent_at is not None
    if not wire.outcome_of_renew(wire.answer(reply, conflict=True)):
        lease._end(LeaseState.LOST, "not_owner")  # noqa: SLF001
    elif not lease._renewed(ticket, send.sent_at):  # noqa: SLF001
        lease._end(LeaseState.LOST, "deadline")  # noqa: SLF001
    lease.raise_if_lost()


def release(core: Core, lease: BaseLease) -> Flow[bool]:
    """Gives a lease back. True if that ended it, False if it had ended before. Repeating it is no error."""
    ours = lease._end(LeaseState.RELEASED)  # noqa: SLF001 - from here on a refused renewal is no loss
    # One that was given up at its deadline may still be there: freeing it lets the next one in sooner.
    if not ours and (lease.state is LeaseState.RELEASED or lease.loss().reason != "deadline"):
        return False
    left_s = lease.deadline - core.clock.now()
    request = wire.release_request(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token)
    # Nobody has to wait longer for this than the lease itself would have lasted.
    timeout_s = min(core.request_timeout_s, max(RELEASE_S_LEAST, left_s))
    sends: list[Send] = []

    def make(endpoint: Endpoint) -> Send:
        sends.append(Send(request, endpoint, timeout_s))
        return sends[-1]

    reply, _ = yield from call(core, make)
    if wire.outcome_of_release(wire.answer(reply)):
        return True
    # An earlier send of this very release may have ended it, and its answer was lost. While the lease was ours by our
    # own clock, nothing else is likely.
    return left_s > 0 and sum(send.sent_at is not None for send in sends) > 1


def release_again(core: Core, lease: BaseLease) -> Flow[None]:
    """Sends a release once more whose answer nobody has waited for."""
    if lease.forked:
        return
    request = wire.release_request(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token)
    yield from _ask(core, request)


def found_lost(lease: BaseLease) -> LeaseLost:
    """A release has found that the lease was over, while we took it for good."""
    text = f"the lease of {lease.lock_name!r} had ended before it was released: broken, or the server lost it"
    return LeaseLost(lease.lock_name, "not_owner", text)


# -- looking ----------------------------------------------------------------------------------------------------------


def get(core: Core, lock_name: str) -> Flow[wire.LockInfo]:
    reply, _ = yield from _ask(core, wire.get_request(lock_name))
    return wire.lock_info(wire.answer(reply))


def list_page(core: Core, prefix: str, cursor: str | None, limit: int) -> Flow[wire.Page]:
    reply, _ = yield from _ask(core, wire.list_request(prefix, cursor, limit))
    page = wire.lock_page(wire.answer(reply))
    if page.next_cursor is not None and page.next_cursor == cursor:
        raise LockServerError("the server's list does not move on")
    return page


def break_lock(core: Core, lock_name: str) -> Flow[wire.LockInfo]:
    reply, _ = yield from _ask(core, wire.break_request(lock_name))
    return wire.broken(wire.answer(reply))
