"""Between the wire and the store: who may do what to which lock, how many may wait, what is counted and what is logged.

Imports `wire`, `metrics`, `store` and what `_http` shares. Must never know how a store keeps locks, and never hold a
lock in memory: what a request is told is what the store said.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pgleaderlock._http.answers import Answer, ErrorReply, Refusal, answer_of, defect
from pgleaderlock._http.bodies import ClientGone, stopping
from pgleaderlock._http.tokens import Caller
from pgleaderlock._logging import get_logger
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.server import wire
from pgleaderlock.server.metrics import Metrics
from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Release,
    Renew,
    Store,
    StoreBusy,
    StoreError,
    StoreFull,
)

__all__ = ["Service", "ServiceLimits"]

_READY_CHECK_TIMEOUT_S = 5.0
_READY_REMEMBERED_S = 1.0
_STORE_ERROR_LOG_INTERVAL_S = 5.0
_RETRY_SOON = (b"retry-after", b"1")
_RETRY_LATER = (b"retry-after", b"60")
_FAILURES = frozenset({Held, NotRenewed, NotReleased, StoreFull})
_OPS: dict[type[Operation], str] = {Acquire: "acquire", Renew: "renew", Release: "release"}


@dataclass(frozen=True)
class ServiceLimits:
    waiters_max: int = 512
    """Acquires with `wait_ms` that wait at the same time."""
    wait_ms_max: int = wire.WAIT_MS_MAX
    """A request that would wait longer is answered after this."""
    sweep_interval_s: float = 1.0

    def __post_init__(self) -> None:
        if self.wait_ms_max > wire.WAIT_MS_MAX:
            longest_s = wire.WAIT_MS_MAX // 1000
            raise ConfigurationError(f"--max-wait is {longest_s}s at most: no client may ask for more")


class Service:
    """The operations. Each gives an `Answer`, or raises `Refusal` or `ClientGone`."""

    def __init__(self, store: Store, metrics: Metrics, limits: ServiceLimits | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._limits = limits or ServiceLimits()
        self._log = get_logger("pgleaderlock.server")
        self._waiters = 0
        self._stopping = asyncio.Event()
        self._store_error_logged_at = float("-inf")
        self._ready: tuple[float, Refusal | None] = (float("-inf"), None)

    def stop(self) -> None:
        """Answers everyone who waits for a lock, and nobody waits from now on."""
        self._stopping.set()

    # --- One lock

    async def one(self, operation: Operation) -> Answer:
        """An acquire that does not wait, a renewal, or a release."""
        began = time.perf_counter()
        outcome: Outcome | StoreError
        try:
            outcome = (await self._store.apply((operation,)))[0]
        except StoreError as error:
            outcome = error
        self.measured(operation, outcome, began)
        return self._answer_to(operation, outcome)

    @property
    def can_begin(self) -> bool:
        """Whether `begin` may be used: the store can do without a task."""
        return self._store.submit is not None

    def begin(self, operation: Operation, told: Callable[[Answer], None]) -> None:
        """The same without a task: `told` hears the answer, now or later. A task costs more than all else here."""
        assert self._store.submit is not None
        self._store.submit(_Asked(self, operation, told), (operation,))

    def answer_to(self, operation: Operation, outcome: Outcome | Exception) -> Answer:
        """As `one` does, for whoever cannot be raised at."""
        try:
            return self._answer_to(operation, outcome)
        except Refusal as refusal:
            return answer_of(refusal)
        except Exception as error:
            return answer_of(self._defect(error))

    def _answer_to(self, operation: Operation, outcome: Outcome | Exception) -> Answer:
        if not isinstance(outcome, Exception):
            return self._answer(outcome)
        if isinstance(outcome, StoreBusy):
            if type(operation) is Acquire:
                return Answer(409, wire.encode(wire.busy_reply(operation.lock_name)))
            raise Refusal(503, "the store is busy: try again", _RETRY_SOON)
        if isinstance(outcome, StoreError):
            raise self._unavailable(outcome) from outcome
        raise outcome

    def measured(self, operation: Operation, outcome: Outcome | Exception, began: float) -> None:
        op = _OPS[type(operation)]
        self._metrics.observe(op, (time.perf_counter() - began) * 1000)
        if not isinstance(outcome, Exception):
            self._count(op, outcome)
        elif isinstance(outcome, StoreBusy):
            self._count_busy(op, op)
        else:
            self._metrics.count(op, "fail")

    async def acquire_waiting(self, acquire: Acquire, wait_ms: int, gone: Callable[[], Awaitable[None]]) -> Answer:
        """`gone` returns when the client has left: then its place in the queue is given up."""
        if self._stopping.is_set():
            raise stopping()
        if self._waiters >= self._limits.waiters_max:
            self._metrics.count("acquire", "fail")
            raise Refusal(429, f"{self._waiters} requests wait for locks already: come back later", _RETRY_SOON)
        began = time.perf_counter()
        self._waiters += 1
        try:
            outcome = await self._parked(acquire, wait_ms, gone)
        except StoreBusy:
            self._count_busy("acquire", "acquire_wait")
            return Answer(409, wire.encode(wire.busy_reply(acquire.lock_name)))
        except StoreError as error:
            self._metrics.count("acquire", "fail")
            raise self._unavailable(error) from error
        except (ClientGone, Refusal):
            self._metrics.count("acquire", "fail")
            raise
        finally:
            self._waiters -= 1
            self._metrics.observe("acquire_wait", (time.perf_counter() - began) * 1000)
        self._count("acquire", outcome)
        return self._answer(outcome)

    async def _parked(self, acquire: Acquire, wait_ms: int, gone: Callable[[], Awaitable[None]]) -> Outcome:
        waiting = asyncio.ensure_future(self._store.wait(acquire, min(wait_ms, self._limits.wait_ms_max)))
        leaving = asyncio.ensure_future(_call(gone))
        ending = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({waiting, leaving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})
            if leaving.done():
                await self._give_back(acquire, waiting)
                raise ClientGone
            if waiting.cancelled():
                raise stopping()
            return waiting.result()
        finally:
            for task in (waiting, leaving, ending):
                task.cancel()

    async def _give_back(self, acquire: Acquire, waiting: "asyncio.Task[Granted | Held | StoreFull]") -> None:
        """A lease that was granted to a client that had just left. With a key it may come back for it; without, nobody
        knows the lease, and the lock would be taken for nothing."""
        if waiting.cancelled() or waiting.exception() is not None or acquire.idempotency_key is not None:
            return
        outcome = waiting.result()
        if isinstance(outcome, Granted):
            release = Release(outcome.lock_name, outcome.owner_id, outcome.lease_id, outcome.fencing_token)
            with contextlib.suppress(StoreError):  # it expires in any case
                await self._store.apply([release])

    def _answer(self, outcome: Outcome) -> Answer:
        if isinstance(outcome, StoreFull):
            raise Refusal(503, self._full(outcome), _RETRY_LATER)
        status, reply = wire.reply_of(outcome)
        return Answer(status, wire.encode(reply))

    # --- Many at once

    async def batch(self, caller: Caller, items: Sequence[wire.BatchOperation]) -> Answer:
        """One transaction of all that this caller may do; the others have a 403 of their own."""
        allowed = [item for item in items if caller.may_use(item.lock_name)]
        began = time.perf_counter()
        try:
            outcomes = await self._store.apply([wire.operation_of(item) for item in allowed]) if allowed else []
        except StoreBusy:
            for item in allowed:
                self._metrics.count(_op_of(item), "busy")
            self._metrics.count_busy("batch")
            raise Refusal(503, "the store is busy: nothing was done, try again", _RETRY_SOON) from None
        except StoreError as error:
            for item in allowed:
                self._metrics.count(_op_of(item), "fail")
            raise self._unavailable(error) from error
        finally:
            self._metrics.observe("batch", (time.perf_counter() - began) * 1000)
        results = []
        in_order = iter(outcomes)
        for item in items:
            if not caller.may_use(item.lock_name):
                results.append(wire.BatchResult(403, ErrorReply(_not_allowed(caller))))
                continue
            outcome = next(in_order)
            self._count(_op_of(item), outcome)
            if isinstance(outcome, StoreFull):
                results.append(wire.BatchResult(503, ErrorReply(self._full(outcome))))
            else:
                results.append(wire.BatchResult(*wire.reply_of(outcome)))
        return Answer(200, wire.encode(wire.BatchReply(results)))

    # --- To look, and to break

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
            self._metrics.observe(op, (time.perf_counter() - began) * 1000)

    async def check_ready(self) -> None:
        """Raises `Refusal` 503 unless an acquire would work. Everybody may ask, so the store is asked once a
        second at most."""
        if self._stopping.is_set():
            raise stopping()
        checked_at, refusal = self._ready
        if time.monotonic() - checked_at > _READY_REMEMBERED_S:
            refusal = None
            try:
                async with asyncio.timeout(_READY_CHECK_TIMEOUT_S):
                    await self._store.check()
            except (StoreError, TimeoutError) as error:
                refusal = self._unavailable(error)
            self._ready = (time.monotonic(), refusal)
        if refusal is not None:
            raise Refusal(refusal.status, refusal.error, *refusal.headers)

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

    # --- Counting and saying

    def _count(self, op: str, outcome: Outcome) -> None:
        self._metrics.count(op, "fail" if type(outcome) in _FAILURES else "success")

    def _count_busy(self, op: str, measured_as: str) -> None:
        self._metrics.count(op, "busy")
        self._metrics.count_busy(measured_as)

    def _defect(self, error: Exception) -> Refusal:
        self._log.error("request_failed", error)
        return defect()

    def _unavailable(self, error: Exception) -> Refusal:
        self._log_store_failure(str(error) or type(error).__name__)
        return Refusal(503, "the store cannot be used now: the server's log says why", _RETRY_SOON)

    def _full(self, outcome: StoreFull) -> str:
        text = f"the server stores {outcome.locks_max} locks already, which is its limit (--max-locks)"
        self._log_store_failure(text)
        return text

    def _log_store_failure(self, text: str) -> None:
        # A broken disk fails every request: one line every few seconds says as much as thousands.
        now = time.monotonic()
        if now - self._store_error_logged_at >= _STORE_ERROR_LOG_INTERVAL_S:
            self._store_error_logged_at = now
            self._log.error("store_failed", error=text)


class _Asked:
    """One operation on its way: what the store takes for a future."""

    __slots__ = ("_began", "_operation", "_service", "_told")

    def __init__(self, service: Service, operation: Operation, told: Callable[[Answer], None]) -> None:
        self._service = service
        self._operation = operation
        self._told = told
        self._began = time.perf_counter()

    def done(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def set_result(self, outcomes: Sequence[Outcome]) -> None:
        self._conclude(outcomes[0])

    def set_exception(self, error: Exception) -> None:
        self._conclude(error)

    def _conclude(self, outcome: Outcome | Exception) -> None:
        service, operation = self._service, self._operation
        try:
            self._told(service.answer_to(operation, outcome))
        finally:  # what is counted waits until it has been told
            service.measured(operation, outcome, self._began)


async def _call(gone: Callable[[], Awaitable[None]]) -> None:
    await gone()


def _op_of(item: wire.BatchOperation) -> str:
    if isinstance(item, wire.BatchAcquire):
        return "acquire"
    return "release" if isinstance(item, wire.BatchRelease) else "renew"


def _not_allowed(caller: Caller) -> str:
    return f"this token is limited to locks whose names begin with {caller.prefix!r}"
