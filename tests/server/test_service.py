"""Between wire and store: what becomes of a store that is busy, broken or full of waiters, and of a client that leaves.

A real store is rarely busy when a test wants it to be: this one does as it is told. It is no fake of a store's rules.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pgleaderlock._http import server as http_server
from pgleaderlock._http.access import ANYONE, Caller, HostCheck
from pgleaderlock._http.answers import Answer, Refusal
from pgleaderlock._http.server import ClientGone, Waits, read_body
from pgleaderlock.server import wire
from pgleaderlock.server.app import LockApp
from pgleaderlock.server.metrics import Metrics
from pgleaderlock.server.service import BATCH_SLICE, Asked, Service, ServiceLimits
from pgleaderlock.server.store import (
    Acquire,
    Adopted,
    Broken,
    Found,
    Granted,
    Held,
    LockView,
    Operation,
    Outcome,
    Page,
    Release,
    Released,
    Renew,
    Reply,
    StoreBusy,
    StoreError,
    StoreFull,
    Sweep,
)

ACQUIRE = Acquire("job", "w", 1000)
GRANTED = Granted("job", "w", "lease", 1, 1000, 1000, 1000)
SECRET = "host=db password=s3cret"


class ObedientStore:
    """Fails with `error` if it is set. One who waits is given what `answer` is given, and a cancellation is swallowed
    if told so."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.found = Found("obedient")
        self.applied: list[Operation] = []
        self.parked = asyncio.Event()
        self.answer: asyncio.Future[Granted | Held | StoreFull] = asyncio.get_running_loop().create_future()
        self.granted_while_cancelled = False

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def open(self) -> None: ...

    async def examine(self) -> Found:
        return self.found

    async def close(self) -> None: ...

    def submit(self, operations: Sequence[Operation], wait_ms: int = 0) -> Reply:
        return asyncio.ensure_future(self._wait() if wait_ms else self._apply(operations))

    async def _apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        self._fail()
        self.applied += operations
        return [GRANTED if isinstance(operation, Acquire) else Released() for operation in operations]

    async def _wait(self) -> list[Outcome]:
        self._fail()
        self.parked.set()
        try:
            return [await self.answer]
        except asyncio.CancelledError:
            if self.granted_while_cancelled:
                return [GRANTED]
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

    async def adopt(self, locks: Sequence[Adopted]) -> int:
        return 0

    async def sweep(self) -> Sweep:
        self._fail()
        return Sweep(0, 0)

    async def check(self) -> None:
        self._fail()


def begun(service: Service, operation: Operation, wait_ms: int = 0) -> "tuple[Asked, asyncio.Future[Answer]]":
    """An operation that has begun, and its answer."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    return service.begin(operation, wait_ms, answer.set_result), answer


async def answer_to(service: Service, operation: Operation, wait_ms: int = 0) -> Answer:
    return await begun(service, operation, wait_ms)[1]


def retry_after(answer: Answer) -> tuple[int, bytes]:
    return answer.status, dict(answer.headers)[b"retry-after"]


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
    for wait_ms in (0, 10):
        answer = await answer_to(service, ACQUIRE, wait_ms)
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
    singles: dict[str, Operation] = {"renew": renew, "release": release}
    for op, operation in singles.items():
        assert retry_after(await answer_to(service, operation)) == (503, b"1")
        assert value(metrics, f'lock_db_busy_total{{op="{op}"}}') == 1
    for op, call in {
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


async def test_one_lock_or_one_token_leaves_room_for_others_that_wait() -> None:
    service, store, _ = made(waiters_max=4)
    team, other = Caller("team"), Caller("other")

    def waits(lock_name: str, caller: Caller) -> "asyncio.Future[Answer]":
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        service.begin(Acquire(lock_name, "w", 1000), 10, answer.set_result, caller)
        return answer

    waiting = [waits(name, team) for name in ("a", "b", "c")]
    assert not any(answer.done() for answer in waiting)
    assert (await waits("d", team)).status == 429, "this token has three of four"
    waiting.append(waits("d", other))
    assert not waiting[-1].done()
    assert (await waits("e", Caller("third"))).status == 429, "there are four"
    store.answer.set_result(GRANTED)
    assert [(await answer).status for answer in waiting] == [200] * 4
    store.answer = asyncio.get_running_loop().create_future()
    waiting = [waits("a", ANYONE) for _ in range(3)]
    assert (await waits("a", ANYONE)).status == 429, "this lock has three of four"
    assert not waits("b", ANYONE).done()
    store.answer.set_result(GRANTED)
    assert [(await answer).status for answer in waiting] == [200] * 3
    await asyncio.sleep(0)
    assert (service._waiting, service._waiting_in) == (set(), {})


async def test_a_broken_store_is_a_503_that_keeps_its_reason_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service, _, metrics = made(StoreError(SECRET))
    for wait_ms in (0, 10):
        answer = await answer_to(service, ACQUIRE, wait_ms)
        assert retry_after(answer) == (503, b"1")
        assert SECRET.encode() not in answer.body
    for call in (
        service.batch(ANYONE, [wire.BatchAcquire("job", "w", 1)]),
        service.get(ANYONE, "job"),
        service.check_ready(),
    ):
        refusal = await refusal_of(call)
        assert (refusal.status, dict(refusal.headers)[b"retry-after"]) == (503, b"1")
        assert SECRET not in refusal.error
    assert value(metrics, 'lock_acquire_total{result="fail"}') == 3
    assert [record.message.split()[0] for record in caplog.records] == ["store_failed"], "once, not for each request"


async def test_readiness_probes_that_come_together_ask_the_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service, store, _ = made()
    asked_store = 0

    async def check() -> None:
        nonlocal asked_store
        asked_store += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(store, "check", check)
    await asyncio.gather(*(service.check_ready() for _ in range(100)))
    assert asked_store == 1
    monkeypatch.setattr(http_server, "READY_REMEMBERED_S", -1.0)
    await service.check_ready()
    assert asked_store == 2, "which is not remembered for long"


async def test_readiness_is_found_out_anew_once_a_request_has_failed() -> None:
    service, store, _ = made()
    await service.check_ready()
    store.error = StoreError("the disk is full")
    await service.check_ready()  # nobody has noticed yet
    assert (await asked(service, "POST", "/v1/locks/job/acquire", b'{"owner_id": "w", "ttl_ms": 1}'))[0] == 503
    with pytest.raises(Refusal):
        await service.check_ready()


async def test_a_check_that_a_failure_has_overtaken_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    service, store, _ = made()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def check() -> None:
        begun.set()
        await go_on.wait()

    with monkeypatch.context() as patched:
        patched.setattr(store, "check", check)
        checking = asyncio.create_task(service.check_ready())
        await begun.wait()
        store.error = StoreError("the disk is full")
        await asked(service, "POST", "/v1/locks/job/acquire", b'{"owner_id": "w", "ttl_ms": 1}')
        go_on.set()
        await checking
    with pytest.raises(Refusal):
        await service.check_ready()


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
    _, waiting = begun(service, ACQUIRE, 60_000)
    await store.parked.wait()
    service.stop()
    assert retry_after(await waiting) == (503, b"1")
    assert store.answer.cancelled()
    assert (await answer_to(service, ACQUIRE, 1)).status == 503


@pytest.mark.parametrize(("key", "given_back"), [(None, True), ("key-1", False)])
async def test_a_lease_granted_to_a_client_that_left_is_given_back_unless_it_may_ask_again(
    key: str | None, given_back: bool
) -> None:
    service, store, _ = made()
    store.granted_while_cancelled = True
    asked, waiting = begun(service, Acquire("job", "w", 1000, key), 60_000)
    await store.parked.wait()
    asked.client_left()
    assert (await waiting).status == 400
    await asyncio.sleep(0)
    assert store.applied == ([Release("job", "w", "lease", 1)] if given_back else [])


async def test_a_lease_that_is_granted_a_moment_before_its_client_leaves_is_given_back() -> None:
    service, store, _ = made()
    reply: Reply = asyncio.get_running_loop().create_future()
    real = store.submit
    store.submit = lambda operations, wait_ms=0: reply if wait_ms else real(operations)  # type: ignore[method-assign]
    asked, waiting = begun(service, ACQUIRE, 60_000)
    reply.set_result([GRANTED])
    asked.client_left()
    assert (await waiting).status == 400
    await asyncio.sleep(0)
    assert store.applied == [Release("job", "w", "lease", 1)]


async def test_a_grant_at_the_moment_of_a_stop_is_answered() -> None:
    service, store, _ = made()
    store.granted_while_cancelled = True
    _, waiting = begun(service, ACQUIRE, 60_000)
    await store.parked.wait()
    service.stop()
    assert (await waiting).status == 200


async def test_a_waiter_frees_its_place_for_the_next_one() -> None:
    service, store, _ = made(waiters_max=1)
    _, waiting = begun(service, ACQUIRE, 60_000)
    await store.parked.wait()
    assert retry_after(await answer_to(service, ACQUIRE, 1)) == (429, b"1")
    store.answer.set_result(GRANTED)
    assert (await waiting).status == 200
    assert (await answer_to(service, ACQUIRE, 1)).status == 200


async def test_a_client_that_leaves_takes_back_no_operation_that_does_not_wait() -> None:
    service, store, _ = made()
    asked, answer = begun(service, Release("job", "w", "lease", 1))
    asked.client_left()
    assert (await answer).status == 200
    assert store.applied == [Release("job", "w", "lease", 1)]


# --- The log of operations


def logging_service(**limits: Any) -> tuple[Service, ObedientStore]:
    store = ObedientStore()
    return Service(store, Metrics(), ServiceLimits(**limits), log_operations=True), store


def operation_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.message.startswith("operation ")]


TEAM = Caller("team", prefix="team/")


async def test_each_operation_is_logged_with_the_name_of_its_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    service, _ = logging_service()
    for caller in (TEAM, Caller("anyone"), ANYONE):
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        service.begin(Acquire("team/job", "w", 1000), 0, answer.set_result, caller)
        await answer
    items = [wire.BatchRelease(name, "w", "l", 1) for name in ("team/job", "other")]
    await service.batch(TEAM, items)
    assert [(line.op, line.by, line.outcome) for line in operation_lines(caplog)] == [
        ("acquire", "team", "granted"),
        ("acquire", "anyone", "granted"),
        ("acquire", "-", "granted"),
        ("release", "team", "released"),
        ("release", "team", "refused"),
    ]


async def test_an_operation_that_is_refused_without_the_store_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    service, store = logging_service(waiters_max=1, strict_names=True)
    asked_for, waiting = begun(service, ACQUIRE, 60_000)
    await store.parked.wait()
    assert (await answer_to(service, Acquire("other", "w", 1000), 1)).status == 429
    assert (await answer_to(service, Acquire("job ", "w", 1000))).status == 400
    asked_for.client_left()
    await waiting
    service.stop()
    assert (await answer_to(service, ACQUIRE, 1)).status == 503
    assert [(line.lock, line.by, line.outcome) for line in operation_lines(caplog)] == [
        ("other", "-", "refused"),
        ("job ", "-", "refused"),
        ("job", "-", "refused"),
        ("job", "-", "refused"),
    ]
    assert all(line.latency_ms >= 0 for line in operation_lines(caplog))


BATCH = [wire.BatchRelease(f"job-{number}", "w", "l", 1) for number in range(500)]


async def test_a_batch_is_logged_in_slices_between_which_others_get_their_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    service, _ = logging_service()
    batch = asyncio.ensure_future(service.batch(ANYONE, BATCH))
    seen = [0]
    while not batch.done():
        await asyncio.sleep(0)
        seen.append(len(operation_lines(caplog)))
    assert max(later - earlier for earlier, later in itertools.pairwise(seen)) == BATCH_SLICE
    assert [line.lock for line in operation_lines(caplog)] == [item.lock_name for item in BATCH]
    results = json.loads((await batch).body)["results"]
    assert results == [{"status": 200, "body": {"released": True}}] * 500


async def test_a_batch_that_is_cancelled_between_two_slices_is_logged_and_counted_to_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    service, _ = logging_service()
    batch = asyncio.ensure_future(service.batch(ANYONE, BATCH))
    while not operation_lines(caplog):
        await asyncio.sleep(0)
    assert len(operation_lines(caplog)) == BATCH_SLICE
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert [line.lock for line in operation_lines(caplog)] == [item.lock_name for item in BATCH]
    assert value(service._metrics, 'lock_release_total{result="success"}') == 500


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


async def test_a_body_that_is_refused_by_one_of_its_parts_is_read_to_its_end_and_looked_at_no_more() -> None:
    seen: list[bytes] = []

    def look(body: bytes) -> None:
        seen.append(body)
        if len(seen) == 2:
            raise Refusal(400, "too expensive")

    parts = [part(b"ab", more=True), part(b"c", more=True), part(b"d", more=True), part(b"e", more=False)]
    refusal = await refusal_of(read_body(sender(*parts), Waits(10), 100, look))
    assert refusal.error == "too expensive"
    assert seen == [b"ab", b"c"]


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
    answer = await answer_to(service, ACQUIRE)
    assert (status, body) == (answer.status, answer.body)
