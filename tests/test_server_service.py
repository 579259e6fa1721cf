"""Between wire and store: what becomes of a store that is busy, broken or full of waiters, and of a client that leaves.

A real store is rarely busy when a test wants it to be: this one does as it is told. It is no fake of a store's rules.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pgleaderlock._http.answers import Answer, Refusal
from pgleaderlock._http.bodies import ClientGone, Waits, read_body
from pgleaderlock._http.hosts import HostCheck
from pgleaderlock._http.tokens import ANYONE, Caller
from pgleaderlock.server import wire
from pgleaderlock.server.app import LockApp
from pgleaderlock.server.metrics import Metrics
from pgleaderlock.server.service import Service, ServiceLimits
from pgleaderlock.server.store import (
    Acquire,
    Broken,
    Granted,
    Held,
    LockView,
    Operation,
    Outcome,
    Page,
    Release,
    Released,
    Renew,
    StoreBusy,
    StoreError,
    StoreFull,
    Sweep,
)

ACQUIRE = Acquire("job", "w", 1000)
GRANTED = Granted("job", "w", "lease", 1, 1000)
SECRET = "host=db password=s3cret"


class ObedientStore:
    """Raises `error` if it is set. `wait` returns what `answer` is given, and swallows a cancellation if told to."""

    submit = None

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.applied: list[Operation] = []
        self.parked = asyncio.Event()
        self.answer: asyncio.Future[Granted | Held | StoreFull] = asyncio.get_running_loop().create_future()
        self.granted_while_cancelled = False

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        self._fail()
        self.applied += operations
        return [GRANTED if isinstance(operation, Acquire) else Released() for operation in operations]

    async def wait(self, acquire: Acquire, wait_ms: int) -> Granted | Held | StoreFull:
        self._fail()
        self.parked.set()
        try:
            return await self.answer
        except asyncio.CancelledError:
            if self.granted_while_cancelled:
                return GRANTED
            raise

    async def get(self, lock_name: str) -> LockView:
        self._fail()
        return LockView(lock_name, False, None, None, 0, None, 0)

    async def list_locks(self, prefix: str, cursor: str | None, limit: int) -> Page:
        self._fail()
        return Page([], None)

    async def break_lock(self, lock_name: str, by: str) -> Broken:
        self._fail()
        return Broken(await self.get(lock_name))

    async def sweep(self) -> Sweep:
        self._fail()
        return Sweep(0, 0)

    async def check(self) -> None:
        self._fail()


async def never() -> None:
    await asyncio.Event().wait()


def made(error: BaseException | None = None, **limits: Any) -> tuple[Service, ObedientStore, Metrics]:
    store, metrics = ObedientStore(error), Metrics()
    return Service(store, metrics, ServiceLimits(**limits)), store, metrics


def value(metrics: Metrics, name: str) -> float:
    (found,) = [line for line in metrics.exposition().decode().splitlines() if line.startswith(f"{name} ")]
    return float(found.rsplit(" ", 1)[1])


async def refusal_of(call: Awaitable[Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await call
    return caught.value


# --- Busy and broken


async def test_a_busy_store_is_a_409_that_says_retry_and_is_counted() -> None:
    service, _, metrics = made(StoreBusy("locked"))
    for call in (service.one(ACQUIRE), service.acquire_waiting(ACQUIRE, 10, never)):
        answer = await call
        shown = json.loads(answer.body)
        assert (answer.status, shown["reason"], shown["acquired"]) == (409, "BUSY_RETRY", False)
        assert shown["recommended_retry_ms"] > 0
    assert value(metrics, 'lock_acquire_total{result="busy"}') == 2
    assert value(metrics, 'lock_db_busy_total{op="acquire"}') == 1
    assert value(metrics, 'lock_db_busy_total{op="acquire_wait"}') == 1


async def test_a_busy_store_is_a_503_with_retry_after_for_everything_else() -> None:
    service, _, metrics = made(StoreBusy("locked"))
    admin = Caller("root", admin=True)
    renew, release = Renew("job", "w", "l", 1, 1), Release("job", "w", "l", 1)
    items = [wire.BatchRelease("job", "w", "l", 1)] * 3
    for op, call in {
        "renew": service.one(renew),
        "release": service.one(release),
        "batch": service.batch(ANYONE, items),
        "get": service.get(ANYONE, "job"),
        "list": service.list_locks(ANYONE, "", None, 1),
        "break": service.break_lock(admin, "job"),
    }.items():
        refusal = await refusal_of(call)
        assert (refusal.status, dict(refusal.headers)[b"retry-after"]) == (503, b"1")
        assert value(metrics, f'lock_db_busy_total{{op="{op}"}}') == 1
    assert value(metrics, 'lock_renew_total{result="busy"}') == 1
    assert value(metrics, 'lock_release_total{result="busy"}') == 4


async def test_a_broken_store_is_a_503_that_keeps_its_reason_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service, _, metrics = made(StoreError(SECRET))
    for call in (
        service.one(ACQUIRE),
        service.acquire_waiting(ACQUIRE, 10, never),
        service.batch(ANYONE, [wire.BatchAcquire("job", "w", 1)]),
        service.get(ANYONE, "job"),
        service.check_ready(),
    ):
        refusal = await refusal_of(call)
        assert (refusal.status, dict(refusal.headers)[b"retry-after"]) == (503, b"1")
        assert SECRET not in refusal.error
    assert value(metrics, 'lock_acquire_total{result="fail"}') == 3
    assert [record.message.split()[0] for record in caplog.records] == ["store_failed"], "once, not for each request"


async def test_a_defect_is_a_503_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service, _, _ = made(ZeroDivisionError("odd words"))
    answer = await asked(service, "POST", "/v1/locks/job/acquire", b'{"owner_id": "w", "ttl_ms": 1}')
    assert answer[0] == 503
    assert b"odd words" not in answer[1]
    assert caplog.records[0].exc_info is not None


async def test_the_monitor_goes_on_after_a_failed_sweep() -> None:
    service, store, metrics = made(StoreError("disk full"), sweep_interval_s=0.001)
    swept = asyncio.Event()

    async def sweep() -> Sweep:
        if store.error is not None:
            error, store.error = store.error, None
            raise error
        swept.set()
        return Sweep(2, 3)

    store.sweep = sweep  # type: ignore[method-assign]
    monitor = asyncio.ensure_future(service.monitor())
    await swept.wait()
    await asyncio.sleep(0)
    monitor.cancel()
    assert metrics.locks_held == 3
    assert metrics.lock_expired >= 2


# --- Waiting


async def test_at_a_stop_who_waits_is_told_to_come_back() -> None:
    service, store, _ = made()
    waiting = asyncio.ensure_future(service.acquire_waiting(ACQUIRE, 60_000, never))
    await store.parked.wait()
    service.stop()
    refusal = await refusal_of(waiting)
    assert (refusal.status, dict(refusal.headers)[b"retry-after"]) == (503, b"1")
    assert store.answer.cancelled()
    assert (await refusal_of(service.acquire_waiting(ACQUIRE, 1, never))).status == 503


@pytest.mark.parametrize(("key", "given_back"), [(None, True), ("key-1", False)])
async def test_a_lease_granted_to_a_client_that_left_is_given_back_unless_it_may_ask_again(
    key: str | None, given_back: bool
) -> None:
    service, store, _ = made()
    store.granted_while_cancelled = True
    leave = asyncio.Event()

    async def gone() -> None:
        await leave.wait()

    waiting = asyncio.ensure_future(service.acquire_waiting(Acquire("job", "w", 1000, key), 60_000, gone))
    await store.parked.wait()
    leave.set()
    with pytest.raises(ClientGone):
        await waiting
    assert store.applied == ([Release("job", "w", "lease", 1)] if given_back else [])


async def test_a_grant_at_the_moment_of_a_stop_is_answered() -> None:
    service, store, _ = made()
    store.granted_while_cancelled = True
    waiting = asyncio.ensure_future(service.acquire_waiting(ACQUIRE, 60_000, never))
    await store.parked.wait()
    service.stop()
    assert (await waiting).status == 200


async def test_a_waiter_frees_its_place_for_the_next_one() -> None:
    service, store, _ = made(waiters_max=1)
    waiting = asyncio.ensure_future(service.acquire_waiting(ACQUIRE, 60_000, never))
    await store.parked.wait()
    assert (await refusal_of(service.acquire_waiting(ACQUIRE, 1, never))).status == 429
    store.answer.set_result(GRANTED)
    assert (await waiting).status == 200
    assert (await service.acquire_waiting(ACQUIRE, 1, never)).status == 200


# --- Bodies


def sender(*messages: dict[str, Any]) -> Callable[[], Awaitable[dict[str, Any]]]:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0) if left else await asyncio.Event().wait()  # type: ignore[return-value]

    return receive


def part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_comes_in_parts() -> None:
    receive = sender(part(b"ab", more=True), part(b"c", more=True), part(b"", more=False))
    assert await read_body(receive, Waits(10), 3) == b"abc"


async def test_a_body_is_not_read_beyond_its_limit() -> None:
    receive = sender(part(b"ab", more=True), part(b"cd", more=True), part(b"e", more=False))
    assert (await refusal_of(read_body(receive, Waits(10), 3))).status == 413


async def test_a_body_without_end_is_refused_before_its_end() -> None:
    async def receive() -> dict[str, Any]:
        return part(b" " * 65_536, more=True)

    assert (await refusal_of(read_body(receive, Waits(10), 3))).status == 413


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_not_answered() -> None:
    with pytest.raises(ClientGone):
        await read_body(sender(part(b"ab", more=True), {"type": "http.disconnect"}), Waits(10), 100)


async def test_a_cancellation_that_is_not_ours_is_passed_on() -> None:
    reading = asyncio.ensure_future(read_body(sender(), Waits(10), 100))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def asked(service: Service, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """One request through the application, without a socket."""
    app = LockApp(service, Metrics(), Waits(10), hosts=HostCheck([]), tokens=None, openapi=b"{}")
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({**scope, "query_string": b""}, sender(part(body, more=False)), send)
    return sent[0]["status"], sent[1]["body"]


async def test_an_answer_is_what_the_service_says() -> None:
    service, _, _ = made()
    status, body = await asked(service, "POST", "/v1/locks/job/acquire", b'{"owner_id": "w", "ttl_ms": 1}')
    answer: Answer = await service.one(ACQUIRE)
    assert (status, body) == (answer.status, answer.body)
