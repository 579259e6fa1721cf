"""Between HTTP and the store: checks which locks a client may use, bounds the waiting requests, counts and logs.

Must never depend on how a store keeps locks, and never keep a lock in memory: the answer is what the store replied.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pgleaderlock._base.logging import Seldom, get_logger
from pgleaderlock._http.access import ANYONE, Caller
from pgleaderlock._http.answers import Answer, ErrorReply, Refusal, answer_of, defect
from pgleaderlock._http.server import Readiness, left, stopping
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.server import wire
from pgleaderlock.server.metrics import Metrics
from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    KeyReused,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Store,
    StoreBusy,
    StoreError,
    StoreFull,
)

__all__ = ["BATCH_SLICE", "Asked", "Service", "ServiceLimits"]

_READY_CHECK_TIMEOUT_S = 5.0
BATCH_SLICE = 50
"""How many operations of a batch are counted and logged before other callbacks of the event loop get their turn: 500
log lines in one callback would hold up every other request."""
_RETRY_SOON = (b"retry-after", b"1")
_RETRY_LATER = (b"retry-after", b"60")
_REFUSED = frozenset({Held, KeyReused, NotRenewed, NotReleased, StoreFull})
_FAILED = (Exception, KeyReused, StoreFull)
_OUTCOMES: dict[type[Outcome], str] = {
    Granted: "granted",
    Held: "held",
    KeyReused: "key_reused",
    Renewed: "renewed",
    NotRenewed: "not_renewed",
    Released: "released",
    NotReleased: "not_released",
    StoreFull: "full",
}
Share = tuple[str, str]
"""The two things whose share of waiting requests is bounded: the lock, and the token."""
_OPS: dict[type[Operation], str] = {Acquire: "acquire", Renew: "renew", Release: "release"}


@dataclass(frozen=True)
class ServiceLimits:
    waiters_max: int = 512
    """The most acquires with `wait_ms` that wait at the same time."""
    waiters_share: int | None = None
    """The most that may wait for one lock, and the most that may come with one token; None: three quarters of all."""
    wait_ms_max: int = wire.WAIT_MS_MAX
    """The longest wait: a request with a longer `wait_ms` is answered after this time."""
    sweep_interval_s: float = 1.0
    strict_names: bool = False
    """Grant no lock whose name looks like another's: see `wire.misleading`."""

    def __post_init__(self) -> None:
        if self.wait_ms_max > wire.WAIT_MS_MAX:
            longest_s = wire.WAIT_MS_MAX // 1000
            raise ConfigurationError(f"--max-wait is {longest_s}s at most: no client may ask for more")


class Service:
    """The operations. `begin` is for acquire, renew and release; the others return an `Answer` or raise `Refusal`."""

    def __init__(
        self, store: Store, metrics: Metrics, limits: ServiceLimits | None = None, *, log_operations: bool = False
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._limits = limits or ServiceLimits()
        self._log_operations = log_operations
        self._log = get_logger("pgleaderlock.server")
        most = self._limits.waiters_share
        self._waiters_share = -(-self._limits.waiters_max * 3 // 4) if most is None else most
        self._waiting: set[Asked] = set()
        self._waiting_in: Counter[Share] = Counter()
        self._stopping = False
        # With a broken disk, every request fails: log one line every few seconds.
        self._fail_seldom = Seldom(self._log.error)
        self._readiness = Readiness(self._not_ready)

    @property
    def store_id(self) -> str:
        return self._store.found.store_id

    def stop(self) -> None:
        """Answers every request that waits for a lock, and refuses to let others wait."""
        self._stopping = True
        for asked in list(self._waiting):
            asked.interrupt()

    # --- One lock

    def begin(
        self, operation: Operation, wait_ms: int, told: Callable[[Answer], None], caller: Caller = ANYONE
    ) -> "Asked":
        """Submits an acquire, a renewal or a release. `told` is called once with the answer, before this returns or
        later. No task is created: it would cost more than everything else here."""
        asked = Asked(self, operation, told, caller, "acquire_wait" if wait_ms else _OPS[type(operation)])
        if self._limits.strict_names and (refusal := _misleading(operation)) is not None:
            self._refuse(asked, refusal)
        elif not wait_ms:
            asked.follow(self._store.submit((operation,)))
        elif self._stopping:
            self._refuse(asked, stopping())
        elif (crowd := self._join(asked)) is not None:
            self._metrics.count("acquire", "fail")
            self._refuse(asked, Refusal(429, f"{crowd} already: come back later", _RETRY_SOON))
        else:
            asked.follow(self._store.submit((operation,), min(wait_ms, self._limits.wait_ms_max)))
        return asked

    def _refuse(self, asked: "Asked", refusal: Refusal) -> None:
        """Answers an operation that does not reach the store."""
        asked.told(answer_of(refusal))
        if self._log_operations:
            self._log_operation(asked.caller, asked.operation, refusal, asked.latency_ms())

    def _join(self, asked: "Asked") -> str | None:
        """Counts one more waiting request, or returns why there is no room: one lock, or one token, must not use up all
        places."""
        shares: tuple[Share, ...] = (("lock", asked.operation.lock_name),)
        if asked.caller is not ANYONE:
            shares += (("token", asked.caller.name),)
        if len(self._waiting) >= self._limits.waiters_max:
            return f"{len(self._waiting)} requests wait for locks"
        for share in shares:
            if self._waiting_in[share] >= self._waiters_share:
                return f"{self._waiting_in[share]} requests wait for this lock or with this token"
        self._waiting.add(asked)
        self._waiting_in.update(shares)
        asked.shares = shares
        return None

    def _leave(self, asked: "Asked") -> None:
        self._waiting.remove(asked)
        for share in asked.shares:
            self._waiting_in[share] -= 1
            if not self._waiting_in[share]:
                del self._waiting_in[share]

    def conclude(self, asked: "Asked", outcome: Outcome | Exception) -> None:
        """Sends the answer, and counts afterwards, so that the client does not wait for that."""
        if asked.shares:
            self._leave(asked)
        latency_ms = asked.latency_ms()
        try:
            asked.told(self._answer_to(asked.operation, outcome))
        finally:
            op = _OPS[type(asked.operation)]
            self._metrics.observe(asked.measured_as, latency_ms / 1000)
            if isinstance(outcome, StoreBusy):
                self._metrics.count(op, "busy")
                self._metrics.count_busy(asked.measured_as)
            else:
                self._count(op, outcome)
            if self._log_operations:
                self._log_operation(asked.caller, asked.operation, outcome, latency_ms)

    def _log_operation(
        self, caller: Caller, operation: Operation, outcome: Outcome | Exception, latency_ms: float
    ) -> None:
        """Logs caller, operation and outcome. Never a lease id: anyone who knows it can act as the holder."""
        lease = outcome if isinstance(outcome, Granted) else operation
        self._log.info(
            "operation",
            op=_OPS[type(operation)],
            lock=operation.lock_name,
            owner=operation.owner_id,
            by="-" if caller is ANYONE else caller.name,
            fencing_token="-" if isinstance(lease, Acquire) else lease.fencing_token,
            outcome=_outcome_word(outcome),
            latency_ms=latency_ms,
        )

    def _answer_to(self, operation: Operation, outcome: Outcome | Exception) -> Answer:
        """The answer to an outcome. Never raises, because then the client would get no answer."""
        try:
            if not isinstance(outcome, _FAILED):
                status, reply = wire.reply_of(outcome)
                return Answer(status, wire.encode(reply))
            if isinstance(outcome, StoreBusy) and isinstance(operation, Acquire):
                return Answer(409, wire.encode(wire.busy_reply(operation.lock_name)))
            return answer_of(self._refusal_of(outcome, operation))
        except Exception as error:
            return answer_of(self._refusal_of(error, operation))

    def _refusal_of(self, failure: Exception | KeyReused | StoreFull, operation: Operation) -> Refusal:
        match failure:
            case StoreFull():
                return Refusal(503, self._full(failure), _RETRY_LATER)
            case KeyReused():
                return Refusal(422, _key_reused(failure))
            case StoreBusy():
                return Refusal(503, "the store is busy: try again", _RETRY_SOON)
            case StoreError():
                return self._unavailable(failure)
            case Refusal():
                return failure
            case _:
                self._log.error("request_failed", failure, lock=operation.lock_name)
                return defect()

    def give_back(self, granted: Granted) -> None:
        """Releases a lease whose client has left before it got the answer."""
        release = Release(granted.lock_name, granted.owner_id, granted.lease_id, granted.fencing_token)
        # A failure is not reported: the lease expires anyway.
        self._store.submit((release,)).add_done_callback(lambda reply: reply.cancelled() or reply.exception())

    # --- Many at once

    async def batch(self, caller: Caller, items: Sequence[wire.BatchOperation]) -> Answer:
        """One transaction with the operations that are allowed to this caller. Each of the others gets its own
        refusal."""
        operations = [wire.operation_of(item) for item in items]
        refusals = [self._refusal_to(caller, operation) for operation in operations]
        allowed = [each for each, refusal in zip(operations, refusals, strict=True) if refusal is None]
        began = time.perf_counter()
        try:
            outcomes = await self._store.submit(allowed) if allowed else []
        except StoreBusy:
            for operation in allowed:
                self._metrics.count(_OPS[type(operation)], "busy")
            self._metrics.count_busy("batch")
            raise Refusal(503, "the store is busy: nothing was done, try again", _RETRY_SOON) from None
        except StoreError as error:
            for operation in allowed:
                self._metrics.count(_OPS[type(operation)], "fail")
            raise self._unavailable(error) from error
        finally:
            self._metrics.observe("batch", time.perf_counter() - began)
        results: list[wire.BatchResult] = []
        concluded = self._concluded(caller, operations, refusals, outcomes, (time.perf_counter() - began) * 1000)
        try:
            for result in concluded:
                results.append(result)
                if len(results) % BATCH_SLICE == 0:
                    await asyncio.sleep(0)
        finally:
            # A cancellation undoes no operation, so the rest are counted and logged as well.
            results.extend(concluded)
        return Answer(200, wire.encode(wire.BatchReply(results)))

    def _concluded(
        self,
        caller: Caller,
        operations: Sequence[Operation],
        refusals: Sequence[Refusal | None],
        outcomes: Sequence[Outcome],
        latency_ms: float,
    ) -> Iterator[wire.BatchResult]:
        """The result of each operation of a batch, which is counted and logged when its result is asked for."""
        in_order = iter(outcomes)
        for operation, refusal in zip(operations, refusals, strict=True):
            if refusal is not None:
                if self._log_operations:
                    self._log_operation(caller, operation, refusal, latency_ms)
                yield wire.BatchResult(refusal.status, ErrorReply(refusal.error))
                continue
            outcome = next(in_order)
            self._count(_OPS[type(operation)], outcome)
            if self._log_operations:
                self._log_operation(caller, operation, outcome, latency_ms)
            if isinstance(outcome, StoreFull):
                yield wire.BatchResult(503, ErrorReply(self._full(outcome)))
            elif isinstance(outcome, KeyReused):
                yield wire.BatchResult(422, ErrorReply(_key_reused(outcome)))
            else:
                yield wire.BatchResult(*wire.reply_of(outcome))

    # --- Reads, and break

    async def get(self, caller: Caller, lock_name: str) -> Answer:
        self.check_allowed(caller, lock_name)
        view = await self._timed("get", self._store.get(lock_name))
        return Answer(200, wire.encode(wire.lock_reply(view, show_lease_id=caller.admin)))

    async def list_locks(self, caller: Caller, prefix: str, cursor: str | None, limit: int) -> Answer:
        if not prefix.startswith(caller.prefix):
            raise Refusal(403, f"{_not_allowed(caller)}: ask with ?prefix=")
        page = await self._timed("list", self._store.list_locks(prefix, cursor, limit))
        locks = [wire.lock_reply(view, show_lease_id=caller.admin) for view in page.locks]
        return Answer(200, wire.encode(wire.ListReply(locks, page.next_cursor)))

    async def break_lock(self, caller: Caller, lock_name: str) -> Answer:
        if not caller.admin:
            raise Refusal(403, "to break a lock takes an admin token (admin = true in the token file)")
        self.check_allowed(caller, lock_name)
        broken = await self._timed("break", self._store.break_lock(lock_name, caller.name))
        self._log.warning(
            "lock_broken",
            lock=lock_name,
            by=caller.name,
            was_held=broken.was.held,
            owner=broken.was.owner_id,
            fencing_token=broken.was.fencing_token,
        )
        was = wire.lock_reply(broken.was, show_lease_id=True)
        return Answer(200, wire.encode(wire.BreakReply(broken.was.held, was)))

    async def _timed(self, op: str, question: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        try:
            return await question
        except StoreBusy:
            self._metrics.count_busy(op)
            raise Refusal(503, "the store is busy: try again", _RETRY_SOON) from None
        except StoreError as error:
            raise self._unavailable(error) from error
        finally:
            self._metrics.observe(op, time.perf_counter() - began)

    async def check_ready(self) -> None:
        """Raises `Refusal` 503 unless an acquire would work."""
        if self._stopping:
            raise stopping()
        await self._readiness.check()

    async def _not_ready(self) -> Refusal | None:
        try:
            async with asyncio.timeout(_READY_CHECK_TIMEOUT_S):
                await self._store.check()
        except (StoreError, TimeoutError) as error:
            return self._unavailable(error)
        return None

    def _refusal_to(self, caller: Caller, operation: Operation) -> Refusal | None:
        if not caller.may_use(operation.lock_name):
            return Refusal(403, _not_allowed(caller))
        return _misleading(operation) if self._limits.strict_names else None

    def check_allowed(self, caller: Caller, lock_name: str) -> None:
        if not caller.may_use(lock_name):
            raise Refusal(403, _not_allowed(caller))

    # --- The monitor

    async def monitor(self) -> None:
        """Sweeps at an interval, until cancelled. Expiry itself does not depend on it."""
        while True:
            began = time.perf_counter()
            try:
                seen = await self._store.sweep()
            except StoreError as error:
                self._log_store_failure(str(error) or type(error).__name__)
            else:
                self._metrics.locks_held = seen.held
                self._metrics.lock_expired += seen.expired
                say = self._log.info if seen.expired else self._log.debug
                latency_ms = (time.perf_counter() - began) * 1000
                say("sweep", expired=seen.expired, held=seen.held, latency_ms=latency_ms)
            await asyncio.sleep(self._limits.sweep_interval_s)

    # --- Metrics and status

    def _count(self, op: str, outcome: Outcome | Exception) -> None:
        failed = type(outcome) in _REFUSED or isinstance(outcome, Exception)
        self._metrics.count(op, "fail" if failed else "success")

    def _unavailable(self, error: Exception) -> Refusal:
        self._readiness.doubt()
        self._log_store_failure(str(error) or type(error).__name__)
        return Refusal(503, "the store cannot be used now: the server's log says why", _RETRY_SOON)

    def _full(self, outcome: StoreFull) -> str:
        text = f"the server stores {outcome.locks_max} locks already, which is its limit (--max-locks)"
        self._log_store_failure(text)
        return text

    def _log_store_failure(self, text: str) -> None:
        self._fail_seldom("store_failed", error=text)


class Asked:
    """One operation from its submission to its answer."""

    __slots__ = ("_client_left", "_reply", "_service", "began", "caller", "measured_as", "operation", "shares", "told")

    def __init__(
        self,
        service: Service,
        operation: Operation,
        told: Callable[[Answer], None],
        caller: Caller,
        measured_as: str,
    ) -> None:
        self._service = service
        self.operation = operation
        self.told = told
        self.caller = caller
        self.measured_as = measured_as
        self.began = time.perf_counter()
        self.shares: tuple[Share, ...] = ()
        """What its waiting counts for, if it waits for a lock."""
        self._reply: Reply | None = None
        self._client_left = False

    def latency_ms(self) -> float:
        return (time.perf_counter() - self.began) * 1000

    def follow(self, reply: Reply) -> None:
        if reply.done():
            self._conclude(reply)
        else:
            self._reply = reply
            reply.add_done_callback(self._conclude)

    def interrupt(self) -> None:
        """Called at a stop. If a lease has been granted by now, it is still the answer."""
        if self._reply is not None:
            self._reply.cancel()

    def client_left(self) -> None:
        """The client has left: gives up its place in the queue. An operation that does not wait is still carried
        out."""
        if self.measured_as == "acquire_wait":
            self._client_left = True
            self.interrupt()

    def _conclude(self, reply: Reply) -> None:
        self._service.conclude(self, self._outcome(reply))

    def _outcome(self, reply: Reply) -> Outcome | Exception:
        if reply.cancelled():
            return left() if self._client_left else stopping()
        error = reply.exception()
        if error is not None:
            return error if isinstance(error, Exception) else StoreError(repr(error))
        outcome = reply.result()[0]
        if not self._client_left:
            return outcome
        if isinstance(outcome, Granted) and not self._may_come_back:
            self._service.give_back(outcome)
        return left()

    @property
    def _may_come_back(self) -> bool:
        """Does the request have an idempotency key? Only then can the client ask for its lease again."""
        return isinstance(self.operation, Acquire) and self.operation.idempotency_key is not None


def _misleading(operation: Operation) -> Refusal | None:
    """The refusal of a misleading name. Only an acquire is refused: an existing lease can be renewed and released."""
    text = wire.misleading(operation.lock_name) if isinstance(operation, Acquire) else None
    return None if text is None else Refusal(400, text)


def _outcome_word(outcome: Outcome | Exception) -> str:
    if isinstance(outcome, Granted) and outcome.replayed:
        return "replayed"
    if isinstance(outcome, StoreBusy):
        return "busy"
    if isinstance(outcome, Refusal):
        return "refused"
    return "failed" if isinstance(outcome, Exception) else _OUTCOMES[type(outcome)]


def _key_reused(outcome: KeyReused) -> str:
    """The text of the refusal. It names no lock and no owner, which this client may not be allowed to know."""
    return (
        f"this Idempotency-Key belongs to a lease that was asked for with another {outcome.field}: "
        "a new request needs a new key"
    )


def _not_allowed(caller: Caller) -> str:
    return f"this token is limited to locks whose names begin with {caller.prefix!r}"
