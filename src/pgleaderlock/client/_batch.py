"""Many operations in one call and one transaction.

A batch is sent again when its reply is lost, with the same keys; what it then gives back counts from the first send.

Imports the client's flows, `errors` and the standard library. Must never wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from pgleaderlock.client import _wire as wire
from pgleaderlock.client._core import Core, Endpoint, Send
from pgleaderlock.client._flows import Flow, call
from pgleaderlock.client._lease import BaseLease, LeaseState, RenewTicket
from pgleaderlock.errors import ConfigurationError, LockHeld, LockServerRefused

__all__ = ["Acquire", "BatchAttempt", "Operation", "Outcome", "Release", "Renew", "batch", "clean_up"]

L = TypeVar("L", bound=BaseLease)


@dataclass(frozen=True)
class Acquire:
    """Ask for a lock. Does not wait."""

    lock_name: str
    ttl_s: float = 30.0


@dataclass(frozen=True)
class Renew:
    """Extend a lease from now by its ttl."""

    lease: BaseLease


@dataclass(frozen=True)
class Release:
    """Give a lease back."""

    lease: BaseLease


Operation = Acquire | Renew | Release
Outcome = Union[L, LockHeld, LockServerRefused, bool]  # noqa: UP007 - an alias with a variable needs the long form


class BatchAttempt:
    """The operations as they are sent, each acquire with its key, and every send of them."""

    def __init__(self, core: Core, operations: Sequence[Operation]) -> None:
        if not 1 <= len(operations) <= wire.BATCH_MAX:
            raise ConfigurationError(f"a batch has 1 to {wire.BATCH_MAX} operations, not {len(operations)}")
        self.operations = list(operations)
        for each in self.operations:
            if not isinstance(each, Acquire) and each.lease.forked:
                raise each.lease.loss()  # before anything has changed
        self.tickets: dict[int, RenewTicket] = {}
        self.encoded = [_encode(core, index, each, self.tickets) for index, each in enumerate(self.operations)]
        self.sends: list[Send] = []

    @property
    def acquires(self) -> list[dict[str, Any]]:
        return [fields for fields in self.encoded if fields["op"] == "acquire"]

    @property
    def may_hold(self) -> bool:
        return bool(self.acquires) and any(send.sent_at is not None for send in self.sends)


def batch(
    core: Core, attempt: BatchAttempt, make_lease: Callable[[wire.Granted, float, float], L]
) -> "Flow[list[Outcome[L]]]":
    """One outcome for each operation, in order."""
    operations, tickets = attempt.operations, attempt.tickets
    request = wire.batch_request(attempt.encoded)

    def make(endpoint: Endpoint) -> Send:
        attempt.sends.append(Send(request, endpoint, core.request_timeout_s))
        return attempt.sends[-1]

    reply, send = yield from call(core, make)
    results = wire.batch_results(wire.answer(reply), len(operations))
    assert send.sent_at is not None
    first = min(sent.sent_at for sent in attempt.sends if sent.sent_at is not None)
    outcomes: list[Outcome[L]] = []
    for index, (operation, (status, body)) in enumerate(zip(operations, results, strict=True)):
        if 400 <= status < 500 and status != 409:
            outcomes.append(LockServerRefused(status, f"the lock server refused (HTTP {status}): {body.get('error')}"))
        elif isinstance(operation, Acquire):
            granted = wire.outcome_of_acquire(status, body)
            if isinstance(granted, LockHeld):
                outcomes.append(granted)
            else:
                outcomes.append(make_lease(granted, operation.ttl_s, first if granted.replayed else send.sent_at))
        elif isinstance(operation, Renew):
            outcomes.append(_renewed(operation.lease, tickets[index], wire.outcome_of_renew(body), send.sent_at))
        else:
            outcomes.append(wire.outcome_of_release(body))
    return outcomes


def clean_up(core: Core, attempt: BatchAttempt) -> Flow[None]:
    """Gives back what a batch may have got that was cancelled or had no answer; as for a single acquire."""
    timeout_s = core.request_timeout_s
    request = wire.batch_request(attempt.acquires)
    reply, _ = yield from call(core, lambda endpoint: Send(request, endpoint, timeout_s, fresh=True))
    outcomes = wire.batch_results(wire.answer(reply), len(attempt.acquires))
    granted = [wire.outcome_of_acquire(status, body) for status, body in outcomes if status == 200]
    releases = [
        wire.release_operation(each.lock_name, each.owner_id, each.lease_id, each.fencing_token)
        for each in granted
        if isinstance(each, wire.Granted)
    ]
    if releases:
        request = wire.batch_request(releases)
        yield from call(core, lambda endpoint: Send(request, endpoint, timeout_s))


def _encode(core: Core, index: int, operation: Operation, tickets: dict[int, RenewTicket]) -> dict[str, Any]:
    if isinstance(operation, Acquire):
        ttl_ms = wire.ttl_ms(operation.ttl_s)
        return wire.acquire_operation(operation.lock_name, core.owner_id, ttl_ms, core.unique())
    lease = operation.lease
    proof = (lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token)
    if isinstance(operation, Renew):
        tickets[index] = lease._about_to_renew(lease.ttl_s, core.clock.now())  # noqa: SLF001 - the lease is for us to keep
        return wire.renew_operation(*proof, wire.ttl_ms(lease.ttl_s))
    lease._end(LeaseState.RELEASED)  # noqa: SLF001 - from here on a refused renewal is no loss
    return wire.release_operation(*proof)


def _renewed(lease: BaseLease, ticket: RenewTicket, renewed: bool, sent_at: float) -> bool:
    if renewed and lease._renewed(ticket, sent_at):  # noqa: SLF001
        return True
    lease._end(LeaseState.LOST, "deadline" if renewed else "not_owner")  # noqa: SLF001
    return False
