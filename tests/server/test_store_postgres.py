"""The lock store in PostgreSQL: what only it can do, and what only it can suffer. The rest is conformance."""

import asyncio
import contextlib
import gc
import itertools
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import StartPooler, StartServer
from pgleaderlock._pg import session
from pgleaderlock._pg.statements import statement
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.migrate import migrate, sql
from pgleaderlock.server.postgres.store import PostgresStore
from pgleaderlock.server.postgres.waiting import Waiter
from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    KeyReused,
    NotRenewed,
    Operation,
    Outcome,
    Release,
    Released,
    Renewed,
    StoreBusy,
    StoreError,
    StoreFull,
)
from support import store_process
from support.counts import count
from support.fencing import database, plain_role
from support.proxy import Proxy
from support.servers import open_folder
from support.stores import PATIENCE_S, acquired, held, release_of, renew_of, until_waiting, waited

JUMP = 2**32
POLL_S = 0.005
OpenStore = Callable[..., Awaitable[PostgresStore]]


@pytest.fixture
def own(dsn: str) -> Iterator[str]:
    """An empty database of the test's own."""
    with database(dsn) as made:
        yield made


@pytest.fixture
async def open_store() -> AsyncIterator[OpenStore]:
    """Opens stores, and closes them at the end."""
    async with contextlib.AsyncExitStack() as stores:

        async def opened(dsn: str, **options: Any) -> PostgresStore:
            store = PostgresStore(dsn, **options)
            await store.open()
            stores.push_async_callback(store.close)
            return store

        yield opened


async def rows(dsn: str, text: str, *params: object) -> list[tuple[Any, ...]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        cursor = await conn.execute(text.encode(), params)
        return await cursor.fetchall() if cursor.description else []


async def until_row(dsn: str, text: str, *params: object) -> tuple[Any, ...]:
    """The first row of this query, as soon as there is one: nothing announces it."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await rows(dsn, text, *params)):
            await asyncio.sleep(POLL_S)
    return found[0]


async def granted(waiter: "asyncio.Task[Granted | Held | StoreFull]") -> Granted:
    async with asyncio.timeout(PATIENCE_S):
        outcome = await waiter
    assert isinstance(outcome, Granted), outcome
    return outcome


def waiting(
    store: PostgresStore, lock_name: str, owner_id: str, *, ttl_ms: int = 600_000, key: str | None = None
) -> "asyncio.Task[Granted | Held | StoreFull]":
    return asyncio.create_task(waited(store, Acquire(lock_name, owner_id, ttl_ms, key), 600_000))


async def until_acquired(store: PostgresStore, acquire: Acquire) -> Granted:
    """Asked until the database is there again, and whatever lease there was has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreError):
                (outcome,) = await store.submit([acquire])
                if isinstance(outcome, Granted):
                    return outcome
            await asyncio.sleep(POLL_S)


async def test_a_waiter_whose_key_gets_a_lease_while_its_own_answer_is_under_way_asks_again(
    own: str, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(own)
    store = await open_store(own)
    lease = await acquired(store, "job", "carol")
    first = waiting(store, "job", "alice", key="key-1")
    await until_waiting(store, "job", 1)
    room, pool = store._waiting, store._pool
    assert room is not None
    assert pool is not None
    real_ask, real_apply = room._entrance.ask, pool.apply
    granted_there, asked_there = asyncio.Event(), asyncio.Event()
    tell_first, tell_second = asyncio.Event(), asyncio.Event()

    async def late(asked: Awaitable[Any], done: asyncio.Event, go_on: asyncio.Event) -> Any:
        answer = await asked
        done.set()
        await go_on.wait()
        return answer

    def apply(sent: Any, **options: Any) -> Any:
        asked = real_apply(sent, **options)
        is_first = "read" not in options and "alice" in str(sent)
        return asyncio.ensure_future(late(asked, granted_there, tell_first)) if is_first else asked

    def ask(lock_name: str, sent: str) -> Any:
        # As when the statement looked for the key just before it got the lease.
        asked = real_ask(lock_name, sent.replace("key-1", "another"))
        return asyncio.ensure_future(late(asked, asked_there, tell_second))

    monkeypatch.setattr(pool, "apply", apply)
    async with asyncio.timeout(PATIENCE_S):
        await store.submit([release_of(lease)])
        await granted_there.wait()
        monkeypatch.setattr(room._entrance, "ask", ask)
        second = store.submit([Acquire("job", "bob", 600_000, "key-1")], 600_000)
        await asked_there.wait()
        tell_first.set()
        assert (await granted(first)).owner_id == "alice"
        tell_second.set()
        assert await second == [KeyReused("owner_id")]


# --- Many servers, one queue


@pytest.mark.long
async def test_two_hundred_waiters_of_two_stores_are_served_in_the_order_in_which_they_came(
    own: str, open_store: OpenStore
) -> None:
    stores = [await open_store(own), await open_store(own)]
    lease = await acquired(stores[0], "job")
    waiters = []
    for number in range(200):
        waiters.append(waiting(stores[number * 7 % 3 % 2], "job", f"waiter-{number}"))
        await until_waiting(stores[0], "job", number + 1)
    for number, waiter in enumerate(waiters):
        assert await stores[number % 2].submit([release_of(lease)]) == [Released()]
        lease = await granted(waiter)
        assert (lease.owner_id, lease.fencing_token) == (f"waiter-{number}", number + 2)


@contextlib.asynccontextmanager
async def another_process(dsn: str) -> AsyncIterator[asyncio.subprocess.Process]:
    program = str(Path(store_process.__file__))
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, dsn, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.long
async def test_the_waiters_of_a_killed_process_are_passed_over_and_the_others_keep_their_order(
    own: str, open_store: OpenStore
) -> None:
    stores = [await open_store(own), await open_store(own)]
    lease = await acquired(stores[0], "job", ttl_ms=600_000)
    waiters = {}
    async with another_process(own) as doomed:
        assert doomed.stdin is not None
        for number in range(200):
            if number % 3 == 0:
                doomed.stdin.write(f"wait job doomed-{number}\n".encode())
            else:
                waiters[number] = waiting(stores[number % 3 - 1], "job", f"waiter-{number}")
            await until_waiting(stores[0], "job", number + 1)
        doomed.send_signal(signal.SIGKILL)
        await doomed.wait()
        # Nobody is asked to release in time: the first one who lives comes next, whenever the dead are noticed.
        for number, waiter in waiters.items():
            assert await stores[0].submit([release_of(lease)]) == [Released()]
            lease = await granted(waiter)
            assert lease.owner_id == f"waiter-{number}"
    assert (await stores[0].get("job")).waiters == 0


async def test_a_break_on_one_server_serves_the_waiter_of_another(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own), await open_store(own)
    await acquired(here, "job")
    waiter = waiting(there, "job", "bob")
    await until_waiting(here, "job", 1)
    assert (await here.break_lock("job", "admin")).was.owner_id == "alice"
    assert (await granted(waiter)).fencing_token == 2
    assert await rows(own, "SELECT lock_name, broken_by, was_held, owner_id FROM pgleaderlock.lock_breaks") == [
        ("job", "admin", True, "alice")
    ]


async def test_a_lease_that_ends_by_itself_serves_the_waiter_of_another_server(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own), await open_store(own)
    await acquired(here, "job", ttl_ms=300)
    assert (await granted(waiting(there, "job", "bob"))).fencing_token == 2


async def test_nobody_overtakes_the_waiter_of_another_server(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own), await open_store(own)
    lease = await acquired(here, "job")
    waiter = waiting(there, "job", "bob")
    await until_waiting(here, "job", 1)
    released, refusal = await here.submit([release_of(lease), Acquire("job", "carol", 30_000)])
    assert released == Released()
    assert isinstance(refusal, Held)
    assert refusal.current_owner_id == "bob"
    assert (await granted(waiter)).fencing_token == 2


async def test_a_store_that_closes_takes_its_tickets_with_it(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own), await open_store(own)
    lease = await acquired(here, "job")
    first, second = waiting(there, "job", "bob"), waiting(here, "job", "carol")
    await until_waiting(here, "job", 2)
    await there.close()
    assert isinstance(await first, Held)
    assert await rows(own, "SELECT owner_id FROM pgleaderlock.lock_waiters") == [("carol",)]
    await here.submit([release_of(lease)])
    assert (await granted(second)).owner_id == "carol"


async def test_batches_of_many_stores_in_any_order_never_wait_for_each_other_in_a_circle(
    own: str, open_store: OpenStore
) -> None:
    stores = [await open_store(own) for _ in range(3)]
    chance = random.Random(1)
    names = [f"job-{number}" for number in range(20)]
    good: dict[str, Granted] = {}

    async def client(store: PostgresStore, number: int) -> None:
        for _ in range(count(15, 150)):
            asked: list[Operation] = [Acquire(name, f"owner-{number}", 600_000) for name in chance.sample(names, 12)]
            outcomes = await store.submit(asked)
            mine = [outcome for outcome in outcomes if isinstance(outcome, Granted)]
            for lease in mine:
                assert lease.lock_name not in good, "two good leases of one lock"
                good[lease.lock_name] = lease
            chance.shuffle(mine)
            for lease in mine:
                del good[lease.lock_name]
            assert all(isinstance(outcome, Released) for outcome in await store.submit([*map(release_of, mine)]))

    async with asyncio.timeout(PATIENCE_S * 5):
        await asyncio.gather(*(client(store, number) for store in stores for number in range(8)))
    name = conninfo_to_dict(own)["dbname"]
    assert await rows(own, "SELECT deadlocks FROM pg_stat_database WHERE datname = %s", name) == [(0,)]


# --- Wake-ups are hints


async def test_a_wake_up_that_is_lost_costs_time_only(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own), await open_store(own)
    lease = await acquired(here, "job")
    waiter = waiting(there, "job", "bob")
    await until_waiting(here, "job", 1)
    with psycopg.connect(own, autocommit=True) as dba:
        dba.execute("DROP FUNCTION pgleaderlock.lock_wake")
        dba.execute(
            "CREATE FUNCTION pgleaderlock.lock_wake(p_lock_name text, p_except text DEFAULT NULL) RETURNS void"
            " LANGUAGE sql AS ''"
        )
    await here.submit([release_of(lease)])
    assert (await granted(waiter)).fencing_token == 2


async def test_wake_ups_that_are_forged_change_nothing(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own), await open_store(own)
    lease = await acquired(here, "job")
    waiters = []
    for number in range(5):
        waiters.append(waiting(there, "job", f"waiter-{number}"))
        await until_waiting(here, "job", number + 1)
    async with await psycopg.AsyncConnection.connect(own, autocommit=True) as forger:
        for _ in range(20):
            await forger.execute(
                "SELECT pg_notify('pgleaderlock_locks_' || server_id, payload)"
                " FROM pgleaderlock.lock_servers, unnest(ARRAY['', 'job', 'other', repeat('x', 7999)]) AS payload,"
                " generate_series(1, 50)"
            )
    for number, waiter in enumerate(waiters):
        assert not waiter.done()
        await here.submit([release_of(lease)])
        lease = await granted(waiter)
        assert lease.owner_id == f"waiter-{number}"


async def test_a_listener_that_is_ended_comes_back(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own), await open_store(own)
    lease = await acquired(here, "job")
    waiter = waiting(there, "job", "bob")
    await until_waiting(here, "job", 1)
    (pid,) = await until_row(own, "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN %%'")
    await rows(own, "SELECT pg_terminate_backend(%s)", pid)
    await until_row(own, "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN %%' AND pid <> %s", pid)
    await here.submit([release_of(lease)])
    assert (await granted(waiter)).fencing_token == 2


# --- An answer that never came


@contextlib.asynccontextmanager
async def row_held(dsn: str, lock_name: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """Somebody's transaction holds the lock's row, so that whoever asks for it waits in mid-statement."""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("SELECT 1 FROM pgleaderlock.lock_leases WHERE lock_name = %s FOR UPDATE", (lock_name,))
        yield conn
        await conn.rollback()


_BLOCKED = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%lock_apply%%'"


async def test_a_backend_that_is_killed_in_mid_acquire_is_an_error_and_the_store_goes_on(
    own: str, open_store: OpenStore
) -> None:
    store = await open_store(own)
    await store.submit([release_of(await acquired(store, "job"))])
    acquire = Acquire("job", "bob", 30_000, "key-1")
    async with row_held(own, "job"):
        asked = store.submit([acquire])
        (pid,) = await until_row(own, _BLOCKED)
        await rows(own, "SELECT pg_terminate_backend(%s)", pid)
        with pytest.raises(StoreError):
            await asked
    lease = await until_acquired(store, acquire)
    assert (lease.fencing_token, lease.replayed) == (2, False)


async def test_a_renewal_that_waited_until_the_lease_had_ended_renews_nothing(own: str, open_store: OpenStore) -> None:
    store = await open_store(own)
    lease = await acquired(store, "job", ttl_ms=500)
    # Whoever holds the row changes nothing, so PostgreSQL itself has no reason to look at the lease again.
    async with row_held(own, "job"):
        asked = store.submit([renew_of(lease, 600_000)])
        await until_row(own, _BLOCKED)
        await until_row(own, "SELECT 1 FROM pgleaderlock.lock_leases WHERE lease_expiry < clock_timestamp()")
    assert await asked == [NotRenewed()]


async def test_callers_that_go_before_they_are_served_cost_no_session(own: str, open_store: OpenStore) -> None:
    store = await open_store(own, pool_size=1)
    for _ in range(2 * sys.getrecursionlimit()):
        asked = store.submit([Acquire("job", "alice", 30_000)])
        await asyncio.sleep(0)  # it is handed over,
        asked.cancel()  # and taken back before anybody has looked
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await acquired(store, "other")


async def test_an_acquire_whose_reply_is_dropped_and_that_is_repeated_with_its_key_is_one_grant(
    own: str, open_store: OpenStore, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(own)
    far, near = await open_store(proxy.dsn_for(own), pool_size=1), await open_store(own)
    for number in range(count(30, 1000)):
        acquire = Acquire(f"job-{number}", "alice", 600_000, f"key-{number}")
        proxy.drop_replies()
        asked = far.submit([acquire])
        async with asyncio.timeout(PATIENCE_S):
            while not (seen := await near.get(acquire.lock_name)).held:
                await asyncio.sleep(0.001)
        proxy.reset()
        with pytest.raises(StoreError):
            await asked
        proxy.heal()
        lease = await until_acquired(far, acquire)
        assert lease.replayed
        assert (lease.lease_id, lease.fencing_token) == (seen.lease_id, 1)
    assert set(await rows(own, "SELECT last_token FROM pgleaderlock.lock_tokens")) == {(1,)}


async def _granted_in_the_dark(
    own: str, open_store: OpenStore, proxy: Proxy, key: str | None
) -> "tuple[PostgresStore, asyncio.Task[Granted | Held | StoreFull]]":
    """A waiter that was granted the lock and does not know it: the reply never came."""
    far, near = await open_store(proxy.dsn_for(own)), await open_store(own)
    lease = await acquired(near, "job", ttl_ms=600_000)
    waiter = waiting(far, "job", "bob", key=key)
    await until_waiting(near, "job", 1)
    async with await psycopg.AsyncConnection.connect(own) as holder:
        await holder.execute("LOCK TABLE pgleaderlock.lock_tokens IN SHARE MODE")  # whoever is to be granted it waits
        assert await near.submit([release_of(lease)]) == [Released()]
        await until_row(own, _BLOCKED)
        proxy.drop_replies()
        await holder.rollback()
    async with asyncio.timeout(PATIENCE_S):
        while (await near.get("job")).owner_id != "bob":
            await asyncio.sleep(POLL_S)
    return near, waiter


async def test_a_cancelled_waiter_ends_the_lease_that_it_never_heard_of(
    own: str, open_store: OpenStore, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(own)
    near, waiter = await _granted_in_the_dark(own, open_store, proxy, None)
    waiter.cancel()
    proxy.heal()
    proxy.reset()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    async with asyncio.timeout(PATIENCE_S):
        while (await near.get("job")).held:
            await asyncio.sleep(POLL_S)


async def test_a_cancelled_waiter_does_not_end_the_lease_that_its_repeated_request_was_given(
    own: str, open_store: OpenStore, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(own)
    near, waiter = await _granted_in_the_dark(own, open_store, proxy, "key-1")
    (lease,) = await near.submit([Acquire("job", "bob", 600_000, "key-1")])
    assert isinstance(lease, Granted)
    assert lease.replayed
    waiter.cancel()
    proxy.heal()
    proxy.reset()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await until_waiting(near, "job", 0)
    assert (await near.get("job")).lease_id == lease.lease_id
    assert isinstance((await near.submit([renew_of(lease)]))[0], Renewed)
    assert (await near.get("job")).held


async def test_a_waiter_whose_reply_is_lost_asks_again_and_has_its_lease(
    own: str, open_store: OpenStore, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(own)
    near, waiter = await _granted_in_the_dark(own, open_store, proxy, None)
    seen = await near.get("job")
    proxy.heal()
    proxy.reset()
    lease = await granted(waiter)
    assert (lease.lease_id, lease.fencing_token) == (seen.lease_id, seen.fencing_token)


async def test_a_waiter_that_never_heard_of_its_ticket_does_not_stand_in_its_own_way(
    own: str, open_store: OpenStore, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(own)
    far, near = await open_store(proxy.dsn_for(own)), await open_store(own)
    lease = await acquired(near, "job", ttl_ms=600_000)
    async with await psycopg.AsyncConnection.connect(own) as holder:
        await holder.execute("LOCK TABLE pgleaderlock.lock_waiters IN SHARE MODE")  # no ticket can be drawn
        waiter = waiting(far, "job", "bob")
        await until_row(own, _BLOCKED)
        proxy.drop_replies()
        await holder.rollback()
        await until_waiting(near, "job", 1)
    proxy.heal()
    proxy.reset()
    # It asks again without knowing its ticket. Whoever has drawn a second one waits behind the first.
    await near.submit([release_of(lease)])
    lease = await granted(waiter)
    assert (lease.owner_id, lease.fencing_token) == ("bob", 2)
    await near.submit([release_of(lease)])
    assert (await acquired(near, "job")).fencing_token == 3


async def test_an_operation_that_the_database_cannot_take_harms_no_other(own: str, open_store: OpenStore) -> None:
    store = await open_store(own, pool_size=1)
    outcomes = await asyncio.gather(
        *(store.submit([Acquire(name, "alice", 30_000)]) for name in ("a", "b\0", "c", "d")), return_exceptions=True
    )
    assert [isinstance(outcome, StoreError) for outcome in outcomes] == [False, True, False, False]


# --- The server: restarts, failovers, warnings


async def test_a_waiter_that_the_database_cannot_take_keeps_no_other_from_its_place(
    own: str, open_store: OpenStore
) -> None:
    store = await open_store(own)
    lease = await acquired(store, "job", ttl_ms=600_000)
    # While the first asks, the others gather for one statement.
    first, bad, last = (waiting(store, "job", owner) for owner in ("bob", "\x00", "carol"))
    await until_waiting(store, "job", 2)
    await store.submit([release_of(lease)])
    await store.submit([release_of(await granted(first))])
    assert (await granted(last)).owner_id == "carol"
    bad.cancel()
    await asyncio.gather(bad, return_exceptions=True)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_over_crashes_of_the_server_every_grant_stands_and_no_token_comes_twice(
    throwaway_postgres: StartServer, open_store: OpenStore
) -> None:
    server = throwaway_postgres()
    stores = [await open_store(server.dsn) for _ in range(2)]
    tokens: list[int] = []
    stop = False

    async def insisted(store: PostgresStore, operation: Operation) -> Outcome:
        """The same until there is an answer, as a client does."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(StoreError):
                    (outcome,) = await store.submit([operation])
                    return outcome
                await asyncio.sleep(POLL_S)

    async def client(store: PostgresStore, name: str) -> None:
        for number in itertools.count():
            lease = await insisted(store, Acquire("job", name, 600_000, f"{name}-{number}"))
            if isinstance(lease, Granted):
                tokens.append(lease.fencing_token)
                renewed = await insisted(store, renew_of(lease, 600_000))
                assert isinstance(renewed, Renewed), "a grant that was acknowledged is gone"
                await insisted(store, release_of(lease))
            if stop:
                return

    clients = [asyncio.create_task(client(store, f"client-{n}")) for n, store in enumerate(stores)]
    for _ in range(count(3, 20)):
        seen = len(tokens)
        async with asyncio.timeout(PATIENCE_S):
            while len(tokens) < seen + 50:
                await asyncio.sleep(POLL_S)
        await asyncio.to_thread(server.restart, "immediate")
    stop = True
    await asyncio.gather(*clients)
    assert tokens == sorted(set(tokens))


async def test_a_waiter_outlives_a_restart_of_the_server(
    throwaway_postgres: StartServer, open_store: OpenStore
) -> None:
    server = throwaway_postgres()
    here, there = await open_store(server.dsn), await open_store(server.dsn)
    lease = await acquired(here, "job", ttl_ms=600_000)
    waiter = waiting(there, "job", "bob")
    await until_waiting(here, "job", 1)
    await asyncio.to_thread(server.restart, "immediate")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreError):
                assert await here.submit([release_of(lease)]) == [Released()]
                break
            await asyncio.sleep(POLL_S)
    assert (await granted(waiter)).fencing_token == 2


async def test_a_server_that_is_away_is_an_error_at_once_and_no_secret_is_told(
    throwaway_postgres: StartServer, open_store: OpenStore
) -> None:
    server = throwaway_postgres()
    store = await open_store(server.dsn)
    lease = await acquired(store, "job", ttl_ms=600_000)
    await asyncio.to_thread(server.stop, "immediate")
    secret = str(conninfo_to_dict(server.dsn)["password"])
    for use in (
        lambda: store.submit([Acquire("new", "alice", 30_000)]),
        lambda: waited(store, Acquire("new", "alice", 30_000), 600_000),
        store.check,
        store.sweep,
    ):
        with pytest.raises(StoreError) as caught:
            await use()
        assert secret not in str(caught.value)
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreError):
                await store.check()
                break
            await asyncio.sleep(POLL_S)
    assert (await store.get("job")).lease_id == lease.lease_id, "what was granted stays granted"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["server away", "table away"])
async def test_of_those_who_wait_in_vain_nothing_is_kept(
    throwaway_postgres: StartServer, open_store: OpenStore, fault: str
) -> None:
    server = throwaway_postgres()
    store = await open_store(server.dsn)
    if fault == "server away":
        await asyncio.to_thread(server.stop, "immediate")
    else:
        await rows(server.dsn, "ALTER TABLE pgleaderlock.lock_leases RENAME TO elsewhere")

    names = (f"job-{number}" for number in itertools.count())

    async def in_vain() -> None:
        with pytest.raises(StoreError):
            await waited(store, Acquire(next(names), "alice", 30_000), 600_000)

    async def left_after(fifties: int) -> int:
        for _ in range(fifties):
            await asyncio.gather(*(in_vain() for _ in range(50)))
        return _waiters()

    # What is on its way when a connection ends may have been executed, and the store has several. When it has noticed
    # that all of them have ended, nothing is even sent. The last one may still be in the hands of what has failed.
    noticed = await left_after(4)
    assert await left_after(4) - noticed < 10, "of two hundred"


def _waiters() -> int:
    """How many there are in this process, those of other tests included."""
    gc.collect()
    return sum(isinstance(found, Waiter) for found in gc.get_objects())


@pytest.fixture
async def careless(throwaway_postgres: StartServer) -> EmbeddedPostgres:
    """A server whose DBA prefers speed: what is committed is on disk at some later time."""
    server = throwaway_postgres(wal_writer_delay="10s")
    await migrate(server.dsn)
    await rows(server.dsn, "ALTER DATABASE postgres SET synchronous_commit = off")
    await rows(server.dsn, "CHECKPOINT")
    return server


async def _tokens_over_crashes(server: EmbeddedPostgres, crashes: int) -> list[int]:
    tokens = []
    for number in range(crashes):
        store = PostgresStore(server.dsn)
        await store.open()
        try:
            (lease,) = await store.submit([Acquire("job", f"owner-{number}", 1)])
            assert isinstance(lease, Granted)
            tokens.append(lease.fencing_token)
            await asyncio.to_thread(server.stop, "immediate")
        finally:
            await store.close()
        await asyncio.to_thread(server.start)
    return tokens


@pytest.mark.timeout(300)
async def test_no_token_is_issued_again_after_a_crash_though_commits_are_asynchronous(
    careless: EmbeddedPostgres,
) -> None:
    assert await rows(careless.dsn, "SHOW synchronous_commit") == [("off",)]
    tokens = await _tokens_over_crashes(careless, count(3, 20))
    assert tokens == sorted(set(tokens))


async def test_no_token_is_issued_again_though_commits_become_asynchronous_under_an_open_store(
    throwaway_postgres: StartServer, open_store: OpenStore
) -> None:
    server = throwaway_postgres(wal_writer_delay="10s")
    store = await open_store(server.dsn, pool_size=1)
    await rows(server.dsn, "ALTER SYSTEM SET synchronous_commit = off")
    await rows(server.dsn, "SELECT pg_reload_conf()")
    await until_row(server.dsn, "SELECT 1 WHERE current_setting('synchronous_commit') = 'off'")
    await rows(server.dsn, "CHECKPOINT")
    # The session of the store has read the files again by its second statement.
    tokens = [(await until_acquired(store, Acquire("job", "alice", 1))).fencing_token for _ in range(3)]
    await asyncio.to_thread(server.restart, "immediate")
    tokens += [(await until_acquired(store, Acquire("job", "alice", 1))).fencing_token]
    assert tokens == [1, 2, 3, 4]


@pytest.mark.long
async def test_without_a_durable_commit_the_same_crashes_do_issue_a_token_again(
    careless: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = statement("locks_set_up")
    durable = b"THEN set_config('synchronous_commit', 'on', false)"
    assert durable in whole
    forgetful = whole.replace(durable, b"THEN 'off'")
    monkeypatch.setattr(session, "statement", lambda name: forgetful if name == "locks_set_up" else statement(name))
    tokens = await _tokens_over_crashes(careless, 4)
    assert len(set(tokens)) < len(tokens)


@pytest.mark.long
async def test_a_standby_grants_nothing_and_once_promoted_no_token_that_was_issued_before(
    throwaway_postgres: StartServer, open_store: OpenStore
) -> None:
    primary = throwaway_postgres()
    old = await open_store(primary.dsn)
    await acquired(old, "job", ttl_ms=1)
    with open_folder() as folder, primary.make_replica(folder / "replica") as standby:
        await until_row(standby.dsn, "SELECT 1 FROM pgleaderlock.lock_tokens WHERE lock_name = 'job'")
        with pytest.raises(StoreError, match="standby"):
            await PostgresStore(standby.dsn).open()
        await _cut_off(primary, standby)
        lost = [await until_acquired(old, Acquire(name, "alice", 1)) for name in ("job", "job", "unknown to it")]
        await asyncio.to_thread(standby.promote)
        new = PostgresStore(standby.dsn)
        await new.open()
        try:
            kept = [await until_acquired(new, Acquire(name, "bob", 1)) for name in ("job", "job", "unknown to it")]
        finally:
            await new.close()
    assert [lease.fencing_token for lease in lost] == [2, 3, 1]
    assert [lease.fencing_token for lease in kept] == [JUMP, JUMP + 1, JUMP + 1]


async def _cut_off(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """What follows on the primary is lost with it."""
    await rows(standby.dsn, "ALTER SYSTEM SET primary_conninfo = ''")
    await rows(standby.dsn, "SELECT pg_reload_conf()")
    await until_row(primary.dsn, "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_replication)")


@pytest.mark.long
async def test_a_token_whose_every_trace_was_lost_in_a_second_failover_is_not_issued_again(
    throwaway_postgres: StartServer, open_store: OpenStore
) -> None:
    first = throwaway_postgres()
    tokens = [await acquired(await open_store(first.dsn), "job", ttl_ms=1)]
    with contextlib.ExitStack() as servers:
        folder = servers.enter_context(open_folder())
        second = servers.enter_context(first.make_replica(folder / "second"))
        await until_row(second.dsn, "SELECT 1 FROM pgleaderlock.lock_tokens WHERE lock_name = 'job'")
        await _cut_off(first, second)
        await asyncio.to_thread(second.promote)
        third = servers.enter_context(second.make_replica(folder / "third"))
        await _cut_off(second, third)
        async with contextlib.AsyncExitStack() as stores:
            for server in (second, third):
                if server is third:
                    await asyncio.to_thread(third.promote)
                store = PostgresStore(server.dsn)
                await store.open()
                stores.push_async_callback(store.close)
                tokens.append(await until_acquired(store, Acquire("job", "alice", 1)))
    assert [lease.fencing_token for lease in tokens] == [1, JUMP, 2 * JUMP]


async def test_a_grant_that_comes_with_a_warning_is_not_reported(
    throwaway_postgres: StartServer, open_store: OpenStore
) -> None:
    """A cancelled wait for a synchronous standby: the commit is here and nowhere else."""
    server = throwaway_postgres()
    store = await open_store(server.dsn)
    await rows(server.dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    await rows(server.dsn, "SELECT pg_reload_conf()")
    await until_row(server.dsn, "SELECT 1 WHERE current_setting('synchronous_standby_names') = 'nobody'")
    acquire = Acquire("job", "alice", 600_000, "key-1")
    asked = store.submit([acquire])
    (pid,) = await until_row(
        server.dsn, "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE '%%lock_apply%%'"
    )
    await rows(server.dsn, "SELECT pg_cancel_backend(%s)", pid)
    with pytest.raises(StoreError, match="not known what is durable"):
        await asked
    await rows(server.dsn, "ALTER SYSTEM RESET synchronous_standby_names")
    await rows(server.dsn, "SELECT pg_reload_conf()")
    assert (await until_acquired(store, acquire)).replayed


# --- Opening


async def test_an_owner_needs_no_migration_of_its_own(own: str, open_store: OpenStore) -> None:
    stores = await asyncio.gather(*(open_store(own) for _ in range(3)))
    assert (await acquired(stores[0], "job")).fencing_token == 1


async def test_a_role_that_may_not_make_the_tables_is_told_who_should(own: str) -> None:
    with plain_role(own) as plain:
        with pytest.raises(StoreError, match="run `pgleaderlock migrate`"):
            await PostgresStore(plain).open()
        await migrate(own)
        with pytest.raises(StoreError, match="GRANT"):
            await PostgresStore(plain).open()


async def test_a_store_that_must_not_migrate_says_what_to_run(own: str) -> None:
    with pytest.raises(StoreError, match="run `pgleaderlock migrate`"):
        await PostgresStore(own, auto_migrate=False).open()
    assert await rows(own, "SELECT 1 FROM pg_namespace WHERE nspname = 'pgleaderlock'") == []


async def test_a_database_that_is_much_newer_is_left_alone(own: str) -> None:
    await migrate(own)
    version = "pgleaderlock.schema_version"
    await rows(own, f"INSERT INTO {version} (version) SELECT max(version) + 2 FROM {version}")
    with pytest.raises(StoreError, match="upgrade the library"):
        await PostgresStore(own).open()


async def test_a_wrong_password_is_an_error_that_does_not_repeat_it(own: str) -> None:
    with plain_role(own) as plain:
        wrong = make_conninfo(plain, password="sesame-street")
        with pytest.raises(StoreError) as caught:
            await PostgresStore(wrong).open()
    assert "sesame" not in str(caught.value)
    assert "password authentication failed" in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"ignore_startup_parameters": "options,extra_float_digits"}], ids=str)
async def test_a_pooler_in_transaction_mode_is_refused(
    own: str, pgbouncer: StartPooler, settings: dict[str, str]
) -> None:
    await migrate(own)
    through = pgbouncer(own, "transaction", **settings)
    with pytest.raises(StoreError, match=r"needs sessions of its own.*address of PostgreSQL itself"):
        await PostgresStore(through).open()
    with pytest.raises(StoreError, match="needs sessions of its own"):
        await PostgresStore(through, allow_pooler=True).open()


@pytest.mark.parametrize(
    "options",
    [
        {"pool_size": 0},
        {"locks_max": 0},
        {"waiters_max": 0},
        {"statement_timeout_s": 0},
        {"statement_timeout_s": 60},
        {"free_kept_s": 0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_before_anything_is_opened(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PostgresStore("postgresql://localhost/x", **options)


async def test_the_dbas_defaults_do_not_matter(own: str, open_store: OpenStore) -> None:
    name = conninfo_to_dict(own)["dbname"]
    for setting in ("default_transaction_isolation = 'serializable'", "default_transaction_read_only = on"):
        await rows(own, f'ALTER DATABASE "{name}" SET {setting}')
    stores = [await open_store(own) for _ in range(2)]
    outcomes = await asyncio.gather(
        *(store.submit([Acquire("job", f"{number}", 30_000)]) for store in stores for number in range(20))
    )
    assert sum(isinstance(outcome, Granted) for (outcome,) in outcomes) == 1


# --- What is kept


async def test_of_a_lock_that_is_pruned_token_and_version_go_on(own: str, open_store: OpenStore) -> None:
    store = await open_store(own, free_kept_s=1e-6, locks_max=2)
    await store.submit([release_of(await acquired(store, "job"))])
    await acquired(store, "other")
    assert await store.submit([Acquire("third", "alice", 30_000)]) == [StoreFull(2)]
    before = await store.get("job")
    await store.sweep()
    assert await rows(own, "SELECT lock_name FROM pgleaderlock.lock_leases") == [("other",)]
    assert await store.get("job") == before
    assert [lock.lock_name for lock in (await store.list_locks("", None, 10)).locks] == ["job", "other"]
    lease = await acquired(store, "job", "bob")
    assert lease.fencing_token == 2
    assert (await store.get("job")).version > before.version


async def test_the_limit_counts_what_other_servers_have_made(own: str, open_store: OpenStore) -> None:
    here, there = await open_store(own, locks_max=5), await open_store(own, locks_max=5)
    await here.submit([Acquire(f"here-{number}", "alice", 30_000) for number in range(3)])
    await here.sweep()
    await there.sweep()
    outcomes = await there.submit([Acquire(f"there-{number}", "alice", 30_000) for number in range(5)])
    assert [type(outcome) for outcome in outcomes] == [Granted, Granted, StoreFull, StoreFull, StoreFull]


async def test_more_waiters_than_allowed_are_told_to_come_back(own: str, open_store: OpenStore) -> None:
    store = await open_store(own, waiters_max=2)
    await acquired(store, "job")
    waiters = [waiting(store, "job", f"waiter-{number}") for number in range(2)]
    await until_waiting(store, "job", 2)
    with pytest.raises(StoreBusy):
        await waited(store, Acquire("job", "one too many", 30_000), 600_000)
    await store.close()
    assert [type(await waiter) for waiter in waiters] == [Held, Held]


async def test_a_sweep_clears_more_than_one_step_of_it(own: str, open_store: OpenStore) -> None:
    store = await open_store(own, free_kept_s=1e-6)
    for begin in range(0, 2500, 500):
        await store.submit([Acquire(f"job-{begin + number}", "alice", 1) for number in range(500)])
    swept, left = 0, 1
    async with asyncio.timeout(PATIENCE_S):
        while left:
            swept += (await store.sweep()).expired
            ((left,),) = await rows(own, "SELECT count(*) FROM pgleaderlock.lock_leases")
    assert swept == 2500
    assert await rows(own, "SELECT count(*), min(version) FROM pgleaderlock.lock_tokens") == [(2500, 2)]


async def test_what_a_killed_server_left_behind_is_swept(own: str, open_store: OpenStore) -> None:
    store = await open_store(own)
    await acquired(store, "job")
    await rows(
        own,
        "INSERT INTO pgleaderlock.lock_waiters (lock_name, owner_id, ttl_ms, server_id, waiter, deadline)"
        " VALUES ('job', 'ghost', 1, 'nobody', 1, clock_timestamp() + interval '1 hour')",
    )
    await store.sweep()
    assert await rows(own, "SELECT 1 FROM pgleaderlock.lock_waiters") == []


# --- Who may do what


@pytest.fixture
async def plain(own: str) -> AsyncIterator[str]:
    """A role with `grants_lock_server` alone."""
    with plain_role(own) as made:
        await migrate(own, grant_lock_server_to=str(conninfo_to_dict(made)["user"]))
        yield made


@pytest.mark.parametrize(
    "attempt",
    [
        "UPDATE pgleaderlock.lock_tokens SET last_token = 1",
        "INSERT INTO pgleaderlock.lock_tokens VALUES ('x', 1, 0, 1, 1)",
        "DELETE FROM pgleaderlock.lock_tokens",
        "TRUNCATE pgleaderlock.lock_tokens",
        "SELECT 1 FROM pgleaderlock.lock_tokens FOR UPDATE",
        "UPDATE pgleaderlock.lock_leases SET lease_expiry = NULL",
        "DELETE FROM pgleaderlock.lock_leases",
        "DELETE FROM pgleaderlock.lock_waiters",
        "DELETE FROM pgleaderlock.lock_breaks",
        "SELECT pgleaderlock.lock_wake('job')",
        "SELECT * FROM pgleaderlock.leaders",
        "SELECT pgleaderlock.advance_epoch('r', 'n', 'c')",
        "CREATE FUNCTION pgleaderlock.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "DROP FUNCTION pgleaderlock.lock_apply",
    ],
)
async def test_a_lock_servers_role_changes_nothing_by_hand(
    own: str, plain: str, open_store: OpenStore, attempt: str
) -> None:
    store = await open_store(plain)
    await acquired(store, "job")
    before = await rows(own, "SELECT * FROM pgleaderlock.lock_tokens")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await rows(plain, attempt)
    assert await rows(own, "SELECT * FROM pgleaderlock.lock_tokens") == before
    await held(store, "job")


async def test_the_sql_for_a_dba_makes_the_same_tables_and_grants(own: str, open_store: OpenStore) -> None:
    with plain_role(own) as made:
        with psycopg.connect(own, autocommit=True) as dba:
            dba.execute(sql(grant_lock_server_to=str(conninfo_to_dict(made)["user"])).encode())
        store = PostgresStore(made)
        await store.open()
        lease = await acquired(store, "job")
        assert await store.submit([Release("job", "alice", lease.lease_id, lease.fencing_token)]) == [Released()]
        await store.close()
