"""What is the SQLite store's own: its file, its one writer, its clock, and how it fails."""

# ruff: noqa: ASYNC240 - a test may stand still: that is how it comes between two threads.

import asyncio
import itertools
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import psutil
import pytest

from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.server.sqlite import (
    file as _sqlite_file,
)
from pgleaderlock.server.sqlite import (
    locks as _sqlite_locks,
)
from pgleaderlock.server.sqlite import (
    store as store_sqlite,
)
from pgleaderlock.server.sqlite import (
    writer as _sqlite_log,
)
from pgleaderlock.server.sqlite import (
    writer as _sqlite_writer,
)
from pgleaderlock.server.sqlite.mark import read_mark
from pgleaderlock.server.sqlite.store import SqliteStore
from pgleaderlock.server.store import (
    Acquire,
    Adopted,
    Granted,
    Held,
    NotRenewed,
    Released,
    Renewed,
    StoreBusy,
    StoreError,
    StoreFull,
    Sweep,
)
from support.fakes import FakeClock
from support.stores import (
    PATIENCE_S,
    Blocked,
    OpenStore,
    acquired,
    all_is_quiet,
    held,
    read,
    release_of,
    renew_of,
    stand_still_until,
    the_thread_rests,
    turns_of_the_loop,
    until_waiting,
    waited,
    write,
)
from support.torn_disk import Disk

# --- Durable, or refused


async def test_every_grant_is_synced(opened: OpenStore, disk: Disk, transactions: list[tuple[bool, int]]) -> None:
    async with opened(vfs=disk.name) as store:
        connection = store._locks._connection
        assert connection.execute("PRAGMA synchronous").get == 2
        assert connection.execute("PRAGMA journal_mode").get == "wal"
        for number in (0, 1, 2, 0, 1, 2):  # new ones, and those that are known and free
            await all_is_quiet(store)
            before = disk.syncs
            lease = await acquired(store, f"job-{number}")
            assert disk.syncs > before
            assert transactions[-1] == (True, 1), "on the loop's thread"
            await store.submit([release_of(lease)])


async def test_mere_releases_wait_for_no_disk_and_the_grant_after_them_does(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        leases = [await acquired(store, f"job-{number}") for number in range(3)]
        before = disk.syncs
        await all_is_quiet(store)
        assert await store.submit([release_of(leases[2])]) == [Released()]
        assert await store.submit([release_of(lease) for lease in leases[:2]]) == [Released(), Released()]
        assert disk.syncs == before
        await acquired(store, "job-0")
        assert disk.syncs > before


async def test_every_grant_is_synced_and_no_release_whatever_came_before(
    opened: OpenStore, disk: Disk, transactions: list[tuple[bool, int]]
) -> None:
    """The loop's thread switches the sync in advance, to what it expects of the next request."""
    leases: list[Granted] = []
    kinds = [kind for kinds in itertools.product("arn", repeat=4) for kind in kinds]
    async with opened(vfs=disk.name) as store:
        for number, kind in enumerate(kinds):
            await all_is_quiet(store)
            before = disk.syncs
            if kind == "a" or not leases:
                leases.append(await acquired(store, f"job-{number}"))
            elif kind == "n":
                assert isinstance((await store.submit([renew_of(leases[-1], 60_000)]))[0], Renewed)
            else:
                assert await store.submit([release_of(leases.pop())]) == [Released()]
                assert disk.syncs == before
                continue
            assert disk.syncs > before, kinds[: number + 1]
        assert transactions == [(True, 1)] * len(kinds), "on the loop's thread"


async def test_a_renewal_is_synced(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        await store.submit([release_of(await acquired(store, "other"))])  # after a commit that was not
        before = disk.syncs
        assert isinstance((await store.submit([renew_of(lease, 60_000)]))[0], Renewed)
        assert disk.syncs > before


async def test_a_release_that_grants_the_lock_to_a_waiter_is_synced(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        waiting = asyncio.ensure_future(waited(store, Acquire("job", "second", 60_000), 60_000))
        await until_waiting(store, "job", 1)
        before = disk.syncs
        await store.submit([release_of(lease)])
        assert isinstance(await waiting, Granted)
        assert disk.syncs > before


@pytest.mark.parametrize("ignored", ["PRAGMA synchronous", "PRAGMA journal_mode"])
async def test_a_file_that_does_not_take_the_durable_settings_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    class Stubborn(apsw.Connection):
        def execute(self, statement: str, *args: Any, **options: Any) -> apsw.Cursor:  # type: ignore[override]
            weak = {"PRAGMA synchronous": "PRAGMA synchronous = 1", "PRAGMA journal_mode": "PRAGMA journal_mode"}
            if statement.startswith(f"{ignored} ="):
                statement = weak[ignored]
            return super().execute(statement, *args, **options)

    monkeypatch.setattr(apsw, "Connection", Stubborn)
    with pytest.raises(StoreError, match="cannot be written durably"):
        await SqliteStore(path).open()


async def test_what_has_gathered_while_the_disk_was_busy_is_one_commit(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        async with Blocked(store):
            tasks = [store.submit([Acquire(f"job-{n}", "alice", 30_000)]) for n in range(200)]
            await asyncio.sleep(0)
            before = disk.syncs
        await asyncio.gather(*tasks)
        assert disk.syncs == before + 1


async def test_a_release_and_the_grant_to_the_next_are_one_commit(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        task = asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 600_000))
        await until_waiting(store, "job", 1)
        before = disk.syncs
        await store.submit([release_of(lease)])
        assert isinstance(await task, Granted)
        assert disk.syncs == before + 1


async def test_a_refusal_costs_no_sync(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        await acquired(store, "job")
        before = disk.syncs
        await held(store, "job")
        assert disk.syncs == before


# --- Its clock


async def test_after_a_restart_a_lease_counts_for_its_full_duration_again(opened: OpenStore, clock: FakeClock) -> None:
    async with opened() as store:
        lease = await acquired(store, "job", ttl_ms=10_000)
        clock.advance(9)
    async with opened() as store:
        clock.advance(9)
        refusal = await held(store, "job")
        assert refusal.remaining_ms == 1_000
        assert (await store.get("job")).held
        clock.advance(1)
        assert await store.submit([renew_of(lease)]) == [NotRenewed()]
        assert (await acquired(store, "job", "bob")).fencing_token == 2


async def test_a_clock_that_starts_again_at_nothing_ends_no_lease_early(opened: OpenStore, clock: FakeClock) -> None:
    async with opened() as store:
        lease = await acquired(store, "job", ttl_ms=10_000)
    rebooted = FakeClock()
    rebooted.jump(-999.0)
    async with opened(clock=rebooted) as store:
        rebooted.advance(9)
        await held(store, "job")
        assert isinstance((await store.submit([renew_of(lease, 10_000)]))[0], Renewed)
        rebooted.advance(11)
        await acquired(store, "job", "bob")


async def test_a_renewed_lease_counts_for_what_it_was_renewed_by(opened: OpenStore, clock: FakeClock) -> None:
    async with opened() as store:
        lease = await acquired(store, "job", ttl_ms=10_000)
        await store.submit([renew_of(lease, 100_000)])
    async with opened() as store:
        clock.advance(99)
        await held(store, "job")
        clock.advance(2)
        await acquired(store, "job", "bob")


async def test_the_wall_clock_decides_nothing(
    opened: OpenStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as store:
        await acquired(store, "job", ttl_ms=10_000)
        now_ns = time.time_ns()
        for jump_s in (10**9, -(10**9)):
            monkeypatch.setattr(time, "time_ns", lambda jump_s=jump_s: now_ns + jump_s * 10**9)
            await held(store, "job")
            assert (await store.sweep()).held == 1
        clock.advance(10)
        await acquired(store, "job", "bob")


async def test_a_waiter_whose_turn_came_before_its_end_is_granted_in_one_leap_of_time(
    opened: OpenStore, clock: FakeClock
) -> None:
    async with opened() as store:
        await acquired(store, "job", ttl_ms=10_000)
        late = asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 5_000))
        await until_waiting(store, "job", 1)
        patient = asyncio.create_task(waited(store, Acquire("job", "carol", 30_000), 15_000))
        await until_waiting(store, "job", 2)
        clock.advance(60)  # as after a suspend: both moments have passed
        assert isinstance(await late, Held)
        lease = await patient
        assert isinstance(lease, Granted)
        assert lease.waited_ms == 60_000
        assert isinstance((await store.submit([renew_of(lease)]))[0], Renewed)


async def test_one_whose_time_is_up_in_the_moment_the_lease_ends_is_granted(
    opened: OpenStore, clock: FakeClock
) -> None:
    async with opened() as store:
        await acquired(store, "job", ttl_ms=10_000)
        task = asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 10_000))
        await until_waiting(store, "job", 1)
        clock.advance(10)
        assert isinstance(await task, Granted)


# --- What outlives a lock's row


async def test_a_lock_that_is_long_free_is_pruned_and_its_token_and_version_stay(
    opened: OpenStore, path: Path, clock: FakeClock
) -> None:
    async with opened(free_kept_s=3600) as store:
        await store.submit([release_of(await acquired(store, "job"))])
        await acquired(store, "held", ttl_ms=600_000)
        before = await store.get("job")
        clock.advance(3599)
        await store.sweep()
        assert read(path, "SELECT count(*) FROM locks") == 2
        clock.advance(1)
        await store.sweep()
        assert read(path, "SELECT count(*) FROM locks WHERE lock_name = 'job'") == 0
        assert await store.get("job") == before
        assert before in (await store.list_locks("", None, 10)).locks
        assert (await acquired(store, "job")).fencing_token == before.fencing_token + 1
        assert (await store.get("job")).version > before.version
        assert [lock.lock_name for lock in (await store.list_locks("", None, 10)).locks] == ["held", "job"]


@pytest.mark.parametrize(("prefix", "names"), [("", "abcdefgh"), ("c", "c"), ("x", "")])
async def test_pages_of_locks_and_of_mere_tokens_have_every_name_once(
    opened: OpenStore, clock: FakeClock, prefix: str, names: str
) -> None:
    async with opened(free_kept_s=3600.0) as store:
        for name in "adeg":
            await store.submit([release_of(await acquired(store, name))])
        clock.advance(3600)
        await store.sweep()
        for name in "bcfh":
            await acquired(store, name)
        await acquired(store, "d")  # has a row again, and its token is still filed
        found, cursor = "", None
        while True:
            page = await store.list_locks(prefix, cursor, 2)
            found += "".join(lock.lock_name for lock in page.locks)
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == names


async def test_a_page_costs_the_same_however_many_locks_are_not_on_it(
    opened: OpenStore, clock: FakeClock, path: Path
) -> None:
    async def take(count: int) -> None:
        await store.submit([Acquire(f"{first}{n:03}", "alice", 60_000) for first in "az" for n in range(count)])

    async def steps(prefix: str, cursor: str | None) -> int:
        taken = 0

        def step() -> bool:
            nonlocal taken
            taken += 1
            return False

        store._reader.set_progress_handler(step, 1)
        await store.list_locks(prefix, cursor, 3)
        store._reader.set_progress_handler(None)
        return taken

    async with opened(free_kept_s=0.0) as store:
        await take(200)
        clock.advance(60)
        await store.sweep()
        await store.sweep()
        assert read(path, "SELECT count(*) FROM tokens") == 400
        await take(20)
        asked = [("", None), ("m", None), ("z", None), ("z", "z009"), ("z", "a009"), ("a", "a199"), ("a", "z009")]
        await store.list_locks("", None, 3)  # the first look reads the schema, too
        before = [await steps(*page) for page in asked]
        await take(200)
        assert [await steps(*page) for page in asked] == before


async def test_a_lock_that_is_pruned_again_and_again_resets_neither_token_nor_version(
    opened: OpenStore, path: Path, clock: FakeClock
) -> None:
    tokens, versions = [], []
    async with opened(free_kept_s=3600) as store:
        for _ in range(3):
            lease = await acquired(store, "job")
            await store.submit([release_of(lease)])
            tokens.append(lease.fencing_token)
            versions.append((await store.get("job")).version)
            clock.advance(3600)
            await store.sweep()
            assert read(path, "SELECT count(*) FROM locks") == 0
    assert tokens == [1, 2, 3]
    assert versions == sorted(set(versions))


async def test_the_sweep_leaves_alone_what_has_changed_since_it_looked(
    opened: OpenStore, path: Path, clock: FakeClock
) -> None:
    async with opened(free_kept_s=3600) as store:
        await acquired(store, "held", ttl_ms=10_000)
        await store.submit([release_of(await acquired(store, "free"))])
        assert await store._tidy(["held", "free"]) == 0
        assert (await store.get("held")).held
        assert read(path, "SELECT count(*) FROM locks") == 2
    clock.advance(5000)  # on the clock of the run before, all of it would be over
    async with opened(free_kept_s=3600) as store:
        assert await store._tidy(["held", "free"]) == 0
        assert (await store.get("held")).held
        assert read(path, "SELECT count(*) FROM locks") == 2
        clock.advance(10)
        assert await store._tidy(["held", "free"]) == 1
        assert not (await store.get("held")).held


async def test_a_pruned_lock_makes_room(opened: OpenStore, clock: FakeClock) -> None:
    async with opened(free_kept_s=3600, locks_max=1) as store:
        await store.submit([release_of(await acquired(store, "one"))])
        assert await store.submit([Acquire("two", "alice", 1_000)]) == [StoreFull(1)]
        clock.advance(3600)
        await store.sweep()
        await acquired(store, "two")


async def test_a_row_that_somebody_deletes_by_hand_resets_no_token(opened: OpenStore, path: Path) -> None:
    async with opened() as store:
        lease = await acquired(store, "job")
        before = await store.get("job")
        write(path, "DELETE FROM locks")
        assert (await acquired(store, "job")).fencing_token == lease.fencing_token + 1
        assert (await store.get("job")).version > before.version


async def test_the_sweep_goes_in_small_steps_and_goes_on_where_it_stopped(
    opened: OpenStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_sqlite, "WALK_STEP", 4)
    monkeypatch.setattr(store_sqlite, "WALK_MAX", 8)
    monkeypatch.setattr(store_sqlite, "TIDY_STEP", 3)
    async with opened() as store:
        await store.submit([Acquire(f"job-{number:02}", "alice", 10_000) for number in range(20)])
        clock.advance(10)
        assert [await store.sweep() for _ in range(3)] == [Sweep(8, 12), Sweep(8, 4), Sweep(4, 0)]


async def test_the_counts_are_those_of_the_file_after_a_restart(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([Acquire(f"job-{number}", "alice", 10_000) for number in range(5)])
        await store.submit([release_of(await acquired(store, "free"))])
    async with opened(locks_max=6) as store:
        assert await store.sweep() == Sweep(0, 5)
        assert await store.submit([Acquire("seventh", "alice", 10_000)]) == [StoreFull(6)]


async def test_a_break_is_written_down_and_the_last_ones_are_kept(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_locks, "BREAKS_KEPT", 3)
    async with opened() as store:
        lease = await acquired(store, "job")
        await store.break_lock("job", "anna")
        assert read(path, "SELECT broken_by || owner_id || lease_id FROM breaks") == f"annaalice{lease.lease_id}"
        for number in range(5):
            await store.break_lock("job", f"admin-{number}")
        assert read(path, "SELECT group_concat(broken_by) FROM breaks") == "admin-2,admin-3,admin-4"


# --- Replies that are no futures


async def test_who_asks_again_when_it_is_told_does_not_put_the_next_waiter_off(opened: OpenStore) -> None:
    """What is due is planned before anybody is told: the second question frees a lock for a short lease."""
    async with opened(clock=BOOT_CLOCK) as store, asyncio.timeout(PATIENCE_S):
        lease = await acquired(store, "job")
        short = asyncio.create_task(waited(store, Acquire("job", "short", 50), 60_000))
        await until_waiting(store, "job", 1)
        late = asyncio.create_task(waited(store, Acquire("job", "late", 30_000), 60_000))
        await until_waiting(store, "job", 2)
        store.submit([Acquire("first", "me", 30_000)])  # on the loop's thread
        await store.submit([Acquire("second", "me", 30_000)])  # in the writer's
        assert await store.submit([release_of(lease)]) == [Released()]
        assert isinstance(await short, Granted)
        assert isinstance(await late, Granted), "nobody looked when the short lease had ended"


# --- Bounds, and who waits for whom


async def test_a_full_queue_is_busy(opened: OpenStore) -> None:
    async with opened(queue_max=10) as store:
        async with Blocked(store):
            tasks = [store.submit([Acquire(f"job-{n}", "alice", 30_000)]) for n in range(10)]
            await asyncio.sleep(0)
            with pytest.raises(StoreBusy, match="10 operations wait"):
                await store.submit([Acquire("one too many", "alice", 30_000)])
        await asyncio.gather(*tasks)
        await acquired(store, "one too many")


async def test_too_many_who_wait_are_busy(opened: OpenStore) -> None:
    async with opened(waiters_max=3) as store:
        lease = await acquired(store, "job")
        tasks = [asyncio.create_task(waited(store, Acquire("job", f"w-{n}", 30_000), 600_000)) for n in range(3)]
        await until_waiting(store, "job", 3)
        with pytest.raises(StoreBusy, match="3 requests wait"):
            await waited(store, Acquire("job", "one too many", 30_000), 600_000)
        tasks[0].cancel()
        await until_waiting(store, "job", 2)
        tasks.append(asyncio.create_task(waited(store, Acquire("job", "w-3", 30_000), 600_000)))
        await until_waiting(store, "job", 3)
        await store.submit([release_of(lease)])
        assert isinstance(await tasks[1], Granted)


async def test_reads_wait_for_no_writer(opened: OpenStore) -> None:
    async with opened() as store:
        await acquired(store, "job")
        async with Blocked(store):
            assert (await store.get("job")).held
            assert len((await store.list_locks("", None, 10)).locks) == 1


async def test_tickets_that_have_gone_do_not_fill_the_agenda(opened: OpenStore) -> None:
    async with opened() as store:
        await acquired(store, "job", ttl_ms=600_000)
        for _ in range(30):
            tasks = [asyncio.create_task(waited(store, Acquire("job", f"w-{n}", 1_000), 600_000)) for n in range(100)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await until_waiting(store, "job", 0)
        assert len(store._locks.room._agenda) < 1_500


async def test_a_lease_that_is_renewed_for_less_each_time_does_not_fill_the_agenda(opened: OpenStore) -> None:
    async with opened() as store:
        lease = await acquired(store, "job", ttl_ms=600_000)
        task = asyncio.create_task(waited(store, Acquire("job", "bob", 1_000), 600_000))
        await until_waiting(store, "job", 1)
        await store.submit([renew_of(lease, 600_000 - number) for number in range(5_000)])
        assert len(store._locks.room._agenda) < 1_500
        task.cancel()


async def test_a_lease_that_was_given_twice_stays_when_one_of_both_goes(opened: OpenStore) -> None:
    async with opened() as store:
        gone = store.submit([Acquire("job", "bob", 600_000, "key")], 600_000)
        again = store.submit([Acquire("job", "bob", 600_000, "key")])
        await turns_of_the_loop(2)
        stand_still_until(lambda: any(share.receivers == 2 for share in list(store._locks.fresh.values())))
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        (lease,) = await again
        assert isinstance(lease, Granted)
        await store.check()  # behind the word that the first has gone
        assert isinstance((await store.submit([renew_of(lease)]))[0], Renewed)
        assert not store._locks.fresh


async def test_a_lease_that_two_waited_for_with_one_key_ends_when_both_have_gone(
    opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_writer, "SLOW_S", float("inf"))
    async with opened() as store:
        lease = await acquired(store, "job")
        gone = []
        for number in range(2):
            gone.append(store.submit([Acquire("job", "bob", 600_000, "key")], 600_000))
            await until_waiting(store, "job", number + 1)
        assert store._writer is not None
        store._writer._leave_to_thread(PATIENCE_S)
        released = store.submit([release_of(lease)])
        await turns_of_the_loop(1)  # done in the thread: they have it, and have not heard of it
        stand_still_until(lambda: any(share.tickets == 2 for share in list(store._locks.fresh.values())))
        for reply in gone:
            assert reply.cancel()
        await asyncio.gather(*gone, released, return_exceptions=True)
        await store.check()
        assert not (await store.get("job")).held
        assert not store._locks.fresh


async def test_an_open_that_was_cancelled_leaves_the_file_free(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()
    real = _sqlite_file.open_writer

    def slow(*args: Any) -> apsw.Connection:
        reached.set()
        go.wait(PATIENCE_S)
        return real(*args)

    monkeypatch.setattr(store_sqlite, "open_writer", slow)
    task = asyncio.create_task(SqliteStore(path).open())
    await asyncio.to_thread(reached.wait, PATIENCE_S)
    task.cancel()
    threading.Timer(0.05, go.set).start()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with opened() as store:
        await acquired(store, "job")


async def test_a_copy_of_a_closed_file_is_whole(opened: OpenStore, path: Path, tmp_path: Path) -> None:
    async with opened() as store:
        await acquired(store, "job")
    assert not Path(f"{path}-wal").exists()
    shutil.copy(path, tmp_path / "backup.db")
    async with opened(path=tmp_path / "backup.db") as store:
        await held(store, "job")


async def test_the_log_does_not_grow_beyond_its_bound_while_many_write(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "LOG_PAGES", 50)
    async with opened() as store:
        for turn in range(100):
            await store.submit([Acquire(f"job-{turn}-{number}", "alice", 30_000) for number in range(50)])
        pages = Path(f"{path}-wal").stat().st_size // _sqlite_file.PAGE_BYTES
        assert pages < 50 * 10
    assert read(path, "SELECT count(*) FROM locks") == 5_000


async def test_the_log_starts_again_although_something_is_written_during_each_copy(
    opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    copies = 0
    copied, go_on = threading.Event(), threading.Event()
    real_committed, real_copy = _sqlite_log.Log._committed, _sqlite_log.Log._copy

    def committed(log: Any, connection: apsw.Connection, database: str, pages: int) -> int:
        lengths.append(pages)
        return real_committed(log, connection, database, pages)

    def copy(log: Any, connection: apsw.Connection) -> int:
        nonlocal copies
        pages = real_copy(log, connection)
        if connection is log._copier:
            copies += 1
            copied.set()
            assert go_on.wait(PATIENCE_S)
            go_on.clear()
        return pages

    async def write() -> None:
        await store.submit([release_of(await acquired(store, "job"))])
        await turns_of_the_loop(1)
        await the_thread_rests(store)  # whichever thread did it has asked for a copy, if one is due

    monkeypatch.setattr(_sqlite_log.Log, "_committed", committed)
    monkeypatch.setattr(_sqlite_log.Log, "_copy", copy)
    monkeypatch.setattr(_sqlite_file, "LOG_PAGES", 200)
    async with opened() as store, asyncio.timeout(PATIENCE_S):
        log = store._writer._log  # type: ignore[union-attr]
        while len(lengths) < 1_000:
            await write()
            if not log._idle.is_set():
                await asyncio.to_thread(copied.wait)
                await write()
                copied.clear()
                go_on.set()
                await asyncio.to_thread(log._idle.wait)
    assert max(lengths) < 220
    starts = sum(after < before for before, after in itertools.pairwise(lengths))
    assert starts in (copies - 1, copies), "one copy for each start; the last start may be still to come"


async def test_a_log_that_grew_behind_a_reader_is_short_again_when_that_has_gone(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "LOG_PAGES", 50)
    log = Path(f"{path}-wal")

    async def many(turns: int) -> None:
        for _ in range(turns):
            await store.submit([Acquire(f"job-{number}", "alice", 1) for number in range(50)])
            await asyncio.sleep(0.002)  # longer than the leases

    async with opened(clock=BOOT_CLOCK) as store:
        other = apsw.Connection(str(path))
        other.execute("BEGIN")
        assert other.execute("SELECT count(*) FROM locks").get == 0
        await many(200)
        grown = log.stat().st_size
        other.close(True)
        async with asyncio.timeout(PATIENCE_S):
            while log.stat().st_size > grown / 4:
                await many(1)
        await acquired(store, "works")


async def test_refusals_do_not_keep_the_log_from_starting_again(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "LOG_PAGES", 50)
    async with opened() as store:
        await acquired(store, "job")
        for turn in range(400):  # each transaction ends with a refusal
            await asyncio.gather(
                store.submit([Acquire(f"job-{turn}-{number}", "alice", 30_000) for number in range(10)]),
                store.submit([Acquire("job", "bob", 30_000)]),
            )
        pages = Path(f"{path}-wal").stat().st_size // _sqlite_file.PAGE_BYTES
        assert pages < 50 * 10


# --- Which thread does it


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """One entry a transaction: whether the event loop's thread did it, and of how many items."""
    seen: list[tuple[bool, int]] = []
    real = _sqlite_writer.Writer._transact
    loop_thread = threading.get_ident()

    def transact(self: Any, group: list[Any], *, closing: bool) -> Any:
        seen.append((threading.get_ident() == loop_thread, len(group)))
        return real(self, group, closing=closing)

    monkeypatch.setattr(_sqlite_writer.Writer, "_transact", transact)
    monkeypatch.setattr(_sqlite_writer, "SLOW_S", float("inf"))  # however slow this machine's disk is now
    return seen


async def test_a_request_that_comes_alone_wakes_no_other_thread(
    opened: OpenStore, transactions: list[tuple[bool, int]]
) -> None:
    async with opened() as store:
        lease = await acquired(store, "job")
        await turns_of_the_loop(1)
        await store.submit([release_of(lease)])
        assert transactions == [(True, 1), (True, 1)]


async def test_requests_that_come_together_are_one_transaction_of_the_writers_thread(
    opened: OpenStore, transactions: list[tuple[bool, int]]
) -> None:
    async with opened() as store:
        async with Blocked(store):
            tasks = [asyncio.create_task(acquired(store, f"job-{number}")) for number in range(64)]
            await turns_of_the_loop(2)
        await asyncio.gather(*tasks)
        assert transactions == [(False, 1), (False, 64)], "the one that was in the way, and all of them"


async def test_while_the_writers_thread_is_at_work_nobody_else_writes(
    opened: OpenStore, transactions: list[tuple[bool, int]]
) -> None:
    async with opened() as store:
        async with Blocked(store):
            late = asyncio.create_task(acquired(store, "job"))
            await turns_of_the_loop(2)
            assert transactions == [(False, 1)]
        await late
        assert transactions == [(False, 1), (False, 1)]


async def test_after_a_crowd_the_next_one_is_not_done_in_the_loop(
    opened: OpenStore, transactions: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_writer, "CROWD_REMEMBERED_S", 3600.0)
    async with opened() as store:
        await asyncio.gather(*(acquired(store, f"job-{number}") for number in range(3)))
        assert transactions == [(True, 1), (False, 2)], "nobody knew yet that the first was not alone"
        del transactions[:]
        await acquired(store, "after")
        assert transactions == [(False, 1)]
        await all_is_quiet(store)
        await acquired(store, "and after that")
        assert transactions == [(False, 1), (True, 1)]


def test_the_clock_of_sleep_counts_neither_work_nor_waiting_for_a_processor() -> None:
    sleep = _sqlite_writer.SleepClock()
    try:
        sleep.begin()
        began_s, worked_s = time.monotonic(), time.thread_time()
        while time.thread_time() < worked_s + 0.02:
            pass
        at_most_s = time.monotonic() - began_s - 0.02
        assert sleep.slow_s() <= at_most_s + 0.001
        sleep.begin()
        time.sleep(0.05)
        assert sleep.slow_s() >= 0.049
        for _ in range(3):
            sleep.begin()
            assert sleep.slow_s() == 0, "short"
            time.sleep(0.01)
        before_s = time.monotonic()
        sleep.begin()
        time.sleep(0.02)
        assert 0.019 <= sleep.slow_s() <= time.monotonic() - before_s, "sleep between two transactions does not count"
    finally:
        sleep.close()


async def test_waiting_for_a_processor_is_no_slow_disk(
    opened: OpenStore, transactions: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that takes long because the machine is busy does not send the next one to the thread."""
    monkeypatch.setattr(_sqlite_writer, "SLOW_S", 0.005)
    monkeypatch.setattr(_sqlite_writer.SleepClock, "slow_s", lambda _clock: 0.0)  # all of it was work, or waiting
    real = _sqlite_writer.Writer._verify

    def late(writer: Any) -> None:
        time.sleep(0.02)
        real(writer)

    monkeypatch.setattr(_sqlite_writer.Writer, "_verify", late)
    async with opened() as store:
        for turn in range(3):
            await acquired(store, f"job-{turn}")
            await turns_of_the_loop(1)
        assert transactions == [(True, 1)] * 3


def every_disk_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, and nobody forgets it."""
    monkeypatch.setattr(_sqlite_writer.SleepClock, "slow_s", lambda _clock: 1.0)
    monkeypatch.setattr(_sqlite_writer, "SLOW_FACTOR", 1e9)


async def test_after_a_slow_disk_the_loop_does_not_stand_still_again(
    opened: OpenStore, transactions: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as store:
        await acquired(store, "fast")
        every_disk_is_slow(monkeypatch)
        await turns_of_the_loop(1)
        await acquired(store, "slow")
        await turns_of_the_loop(1)
        await acquired(store, "next")
        assert transactions == [(True, 1), (True, 1), (False, 1)]


async def test_a_disk_that_is_slow_in_the_thread_is_not_tried_in_the_loop(
    opened: OpenStore, transactions: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as store:
        every_disk_is_slow(monkeypatch)
        await store.check()
        await the_thread_rests(store)
        await acquired(store, "next")
        assert transactions == [(False, 1), (False, 1)]


async def test_a_long_request_is_the_threads_and_says_nothing_about_the_disk(
    opened: OpenStore, transactions: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as store:
        every_disk_is_slow(monkeypatch)
        await store.submit([Acquire(f"job-{number}", "me", 30_000) for number in range(17)])
        await the_thread_rests(store)
        await acquired(store, "next")
        assert transactions == [(False, 1), (True, 1)]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per look at a lock: whether the event loop's thread did it."""
    seen: list[bool] = []
    real = SqliteStore._get
    loop_thread = threading.get_ident()

    def get(self: Any, connection: apsw.Connection, lock_name: str) -> Any:
        seen.append(threading.get_ident() == loop_thread)
        return real(self, connection, lock_name)

    monkeypatch.setattr(SqliteStore, "_get", get)
    monkeypatch.setattr(_sqlite_writer, "SLOW_S", float("inf"))
    return seen


async def test_a_look_at_one_lock_wakes_no_other_thread(opened: OpenStore, looks: list[bool]) -> None:
    async with opened() as store:
        lease = await acquired(store, "job")
        assert (await store.get("job")).lease_id == lease.lease_id
        assert looks == [True]


async def test_after_a_slow_disk_a_look_is_the_readers_threads(
    opened: OpenStore, looks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as store:
        every_disk_is_slow(monkeypatch)
        for _ in range(3):
            await store.get("job")
        assert looks == [True, False, False], "the first one has noticed it"


async def test_a_look_that_the_disk_does_not_answer_says_so(opened: OpenStore, disk: Disk) -> None:
    """SQLite rolls back by itself then. What is to be told is the disk's error, not that there is nothing to end."""
    async with opened(vfs=disk.name) as store:
        await acquired(store, "job")
        disk.read_fails = True
        with pytest.raises(StoreError, match="the disk gave an error"):
            await store.get("job")
        disk.read_fails = False
        assert (await store.get("job")).held


async def test_a_look_that_finds_the_file_locked_waits_in_the_readers_thread(
    opened: OpenStore, looks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SqliteStore._get

    def get(self: Any, connection: apsw.Connection, lock_name: str) -> Any:
        found = real(self, connection, lock_name)
        if connection is self._looker:
            raise apsw.BusyError
        return found

    monkeypatch.setattr(SqliteStore, "_get", get)
    async with opened() as store:
        lease = await acquired(store, "job")
        assert (await store.get("job")).lease_id == lease.lease_id
        assert looks == [True, False]


async def test_to_copy_more_than_a_rest_of_the_log_is_never_the_loops_work(
    opened: OpenStore, transactions: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_by: list[int] = []

    def copy(_log: Any, _connection: apsw.Connection) -> int:
        copied_by.append(threading.get_ident())
        return 0

    monkeypatch.setattr(_sqlite_log.Log, "_copy", copy)
    monkeypatch.setattr(_sqlite_file, "LOG_PAGES", 2)
    async with opened() as store:
        for turn in range(40):
            await acquired(store, f"job-{turn}")
            await turns_of_the_loop(1)
        assert (True, 1) in transactions
    assert copied_by
    assert threading.get_ident() not in copied_by


async def test_who_was_cancelled_before_its_turn_gets_nothing(opened: OpenStore) -> None:
    async with opened() as store:
        first = store.submit([Acquire("first", "bob", 600_000)])
        gone = store.submit([Acquire("job", "bob", 600_000)])
        gone.cancel()  # in the turn of the loop in which requests are still gathered
        await turns_of_the_loop(2)
        await the_thread_rests(store)
        assert not (await store.get("job")).held
        assert isinstance((await first)[0], Granted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_store_whose_writer_has_ended_says_so_and_can_be_closed(opened: OpenStore) -> None:
    def defect() -> Any:
        raise RuntimeError("a defect")

    async with opened() as store, asyncio.timeout(PATIENCE_S):
        lease = await acquired(store, "job")
        writer = store._writer
        assert writer is not None
        writer._take = defect  # type: ignore[method-assign]
        await store.check()  # what the thread has taken is the last that it does
        await asyncio.to_thread(writer.join)
        with pytest.raises(StoreError, match="restart the server"):
            await store.submit([Acquire("job", "bob", 600_000)])
        await store.close()
    async with opened() as store:
        assert (await store.get("job")).lease_id == lease.lease_id


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_what_the_writer_was_doing_when_it_ended_is_answered(opened: OpenStore) -> None:
    def defect(_group: Any, *, closing: bool) -> Any:
        raise RuntimeError("a defect")

    async with opened() as store, asyncio.timeout(PATIENCE_S):
        store._writer._transact = defect  # type: ignore[method-assign, union-attr]
        with pytest.raises(StoreError, match="ended by a defect"):
            await store.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_when_the_writer_ends_by_a_defect_all_who_wait_for_it_are_told_and_the_file_is_let_go(
    opened: OpenStore, path: Path
) -> None:
    def defect() -> Any:
        raise RuntimeError("a defect")

    async with opened() as store, asyncio.timeout(PATIENCE_S):
        await acquired(store, "job")
        in_line = asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 600_000))
        await until_waiting(store, "job", 1)
        writer = store._writer
        assert writer is not None
        async with Blocked(store):
            writer._take = defect  # type: ignore[method-assign]
            queued = store.submit([Acquire("other", "bob", 30_000)])
            await turns_of_the_loop(2)
            closing = asyncio.create_task(store.close())
            await turns_of_the_loop(2)
        await closing
        for task in (in_line, queued):
            with pytest.raises(StoreError, match="ended by a defect"):
                await task
        assert not [file.path for file in psutil.Process().open_files() if file.path.startswith(str(path))]


async def test_a_link_to_the_file_is_the_file(opened: OpenStore, path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    async with opened(path=link) as store:
        await acquired(store, "job")
        beside = {entry.name for entry in tmp_path.iterdir()}
        assert not {name for name in beside if name.startswith("link.db-")}
        with pytest.raises(StoreError, match="in use by another lock server"):
            await SqliteStore(path).open()


async def test_what_was_asked_in_the_moment_of_a_close_is_answered(opened: OpenStore) -> None:
    async with opened() as store:
        writer, loop = store._writer, asyncio.get_running_loop()
        assert writer is not None
        asked, done = loop.create_future(), loop.create_future()
        async with Blocked(store):
            writer.submit((asked, [Acquire("job", "bob", 600_000)]))
            writer.stop(done)
        await done
        assert asked.done()
        assert isinstance(asked.result()[0], Granted)
        store._writer = None
        store._claim.give_up()
        store._readers.shutdown()
        store._reader.close()


async def test_the_log_has_its_length_from_the_beginning_and_its_zeros_are_no_locks(
    opened: OpenStore, path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    async with opened() as store:
        length = Path(f"{path}-wal").stat().st_size
        assert length > _sqlite_file.LOG_PAGES * _sqlite_file.PAGE_BYTES
        lease = await acquired(store, "job")
        assert Path(f"{path}-wal").stat().st_size == length, "a commit does not make it longer"
        for suffix in ("", "-wal"):  # as a power cut would leave them
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    async with opened(path=copy) as store:
        assert (await store.get("job")).fencing_token == lease.fencing_token
        assert (await store.get("job")).held


async def test_a_token_that_is_taken_over_is_covered_by_the_mark_before_it_is_stored(
    opened: OpenStore, path: Path
) -> None:
    async with opened() as store:
        await store.adopt([Adopted("from-elsewhere", 500_000, 1)])
        found = read_mark(path)
    assert found is not None
    assert found[0].ceiling >= 500_000
