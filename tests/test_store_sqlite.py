"""What is the SQLite store's own: its file, its one writer, its clock, and how it fails."""

# ruff: noqa: ASYNC220, ASYNC240 - a test may stand still: that is how it comes between two threads.

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import psutil
import pytest

from fakes import FakeClock
from pgleaderlock._clock import BOOT_CLOCK
from pgleaderlock.server import _sqlite_file, _sqlite_locks, _sqlite_log, _sqlite_writer, store_sqlite
from pgleaderlock.server.store import (
    Acquire,
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
from pgleaderlock.server.store_sqlite import SqliteStore
from support.stores import (
    PATIENCE_S,
    Told,
    acquired,
    all_is_quiet,
    held,
    release_of,
    renew_of,
    the_thread_rests,
    until_waiting,
)
from support.torn_disk import Disk

USER = Path(__file__).parent / "support" / "store_user.py"
OpenStore = Callable[..., AbstractAsyncContextManager[SqliteStore]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def opened(path: Path, clock: FakeClock) -> OpenStore:
    @asynccontextmanager
    async def open_it(**options: Any) -> AsyncIterator[SqliteStore]:
        store = SqliteStore(options.pop("path", path), **{"clock": clock, **options})
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    return open_it


@pytest.fixture
def disk() -> Any:
    disk = Disk()
    yield disk
    disk.unregister()


class Blocked:
    """Holds up the writer's thread, inside a transaction, for as long as the block lasts."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._free = threading.Event()
        self._reached = threading.Event()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._store._call(lambda locks: self._hold()))
        await asyncio.to_thread(self._reached.wait, PATIENCE_S)

    def _hold(self) -> None:
        self._reached.set()
        self._free.wait(PATIENCE_S)

    async def __aexit__(self, *error: object) -> None:
        self._free.set()
        await self._task


def stand_still_until(happened: Callable[[], bool]) -> None:
    """Waits for the writer's thread while the event loop does nothing: what it answers is not heard yet."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def turns_of_the_loop(number: int) -> None:
    """A request gathers with others for one turn before it is handed over."""
    for _ in range(number):
        await asyncio.sleep(0)


def read(path: Path, query: str, *values: Any) -> Any:
    """One value out of the file, past the store."""
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(query, values).get
    finally:
        connection.close()


def write(path: Path, statement: str) -> None:
    """Somebody changes the file while no store uses it."""
    connection = apsw.Connection(str(path))
    try:
        connection.execute(statement)
    finally:
        connection.close()


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
            await store.apply([release_of(lease)])


async def test_mere_releases_wait_for_no_disk_and_the_grant_after_them_does(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        leases = [await acquired(store, f"job-{number}") for number in range(3)]
        before = disk.syncs
        await all_is_quiet(store)
        assert await store.apply([release_of(leases[2])]) == [Released()]
        assert await store.apply([release_of(lease) for lease in leases[:2]]) == [Released(), Released()]
        assert disk.syncs == before
        await acquired(store, "job-0")
        assert disk.syncs > before


async def test_a_renewal_is_synced(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        await store.apply([release_of(await acquired(store, "other"))])  # after a commit that was not
        before = disk.syncs
        assert isinstance((await store.apply([renew_of(lease, 60_000)]))[0], Renewed)
        assert disk.syncs > before


async def test_a_release_that_grants_the_lock_to_a_waiter_is_synced(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        waiting = asyncio.ensure_future(store.wait(Acquire("job", "second", 60_000), 60_000))
        await until_waiting(store, "job", 1)
        before = disk.syncs
        await store.apply([release_of(lease)])
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
            tasks = [asyncio.create_task(store.apply([Acquire(f"job-{n}", "alice", 30_000)])) for n in range(200)]
            await asyncio.sleep(0)
            before = disk.syncs
        await asyncio.gather(*tasks)
        assert disk.syncs == before + 1


async def test_a_release_and_the_grant_to_the_next_are_one_commit(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        task = asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 600_000))
        await until_waiting(store, "job", 1)
        before = disk.syncs
        await store.apply([release_of(lease)])
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
        assert await store.apply([renew_of(lease)]) == [NotRenewed()]
        assert (await acquired(store, "job", "bob")).fencing_token == 2


async def test_a_clock_that_starts_again_at_nothing_ends_no_lease_early(opened: OpenStore, clock: FakeClock) -> None:
    async with opened() as store:
        lease = await acquired(store, "job", ttl_ms=10_000)
    rebooted = FakeClock()
    rebooted.jump(-999.0)
    async with opened(clock=rebooted) as store:
        rebooted.advance(9)
        await held(store, "job")
        assert isinstance((await store.apply([renew_of(lease, 10_000)]))[0], Renewed)
        rebooted.advance(11)
        await acquired(store, "job", "bob")


async def test_a_renewed_lease_counts_for_what_it_was_renewed_by(opened: OpenStore, clock: FakeClock) -> None:
    async with opened() as store:
        lease = await acquired(store, "job", ttl_ms=10_000)
        await store.apply([renew_of(lease, 100_000)])
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
        late = asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 5_000))
        await until_waiting(store, "job", 1)
        patient = asyncio.create_task(store.wait(Acquire("job", "carol", 30_000), 15_000))
        await until_waiting(store, "job", 2)
        clock.advance(60)  # as after a suspend: both moments have passed
        assert isinstance(await late, Held)
        lease = await patient
        assert isinstance(lease, Granted)
        assert lease.waited_ms == 60_000
        assert isinstance((await store.apply([renew_of(lease)]))[0], Renewed)


async def test_one_whose_time_is_up_in_the_moment_the_lease_ends_is_granted(
    opened: OpenStore, clock: FakeClock
) -> None:
    async with opened() as store:
        await acquired(store, "job", ttl_ms=10_000)
        task = asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 10_000))
        await until_waiting(store, "job", 1)
        clock.advance(10)
        assert isinstance(await task, Granted)


# --- What outlives a lock's row


async def test_a_lock_that_is_long_free_is_pruned_and_its_token_and_version_stay(
    opened: OpenStore, path: Path, clock: FakeClock
) -> None:
    async with opened(free_kept_s=3600) as store:
        await store.apply([release_of(await acquired(store, "job"))])
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
            await store.apply([release_of(await acquired(store, name))])
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
        await store.apply([Acquire(f"{first}{n:03}", "alice", 60_000) for first in "az" for n in range(count)])

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
            await store.apply([release_of(lease)])
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
        await store.apply([release_of(await acquired(store, "free"))])
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
        await store.apply([release_of(await acquired(store, "one"))])
        assert await store.apply([Acquire("two", "alice", 1_000)]) == [StoreFull(1)]
        clock.advance(3600)
        await store.sweep()
        await acquired(store, "two")


async def test_a_row_that_somebody_deletes_by_hand_resets_no_token(opened: OpenStore, path: Path) -> None:
    async with opened() as store:
        lease = await acquired(store, "job")
        before = await store.get("job")
    write(path, "DELETE FROM locks")
    async with opened() as store:
        assert (await acquired(store, "job")).fencing_token == lease.fencing_token + 1
        assert (await store.get("job")).version > before.version


async def test_the_sweep_goes_in_small_steps_and_goes_on_where_it_stopped(
    opened: OpenStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_sqlite, "WALK_STEP", 4)
    monkeypatch.setattr(store_sqlite, "WALK_MAX", 8)
    monkeypatch.setattr(store_sqlite, "TIDY_STEP", 3)
    async with opened() as store:
        await store.apply([Acquire(f"job-{number:02}", "alice", 10_000) for number in range(20)])
        clock.advance(10)
        assert [await store.sweep() for _ in range(3)] == [Sweep(8, 12), Sweep(8, 4), Sweep(4, 0)]


async def test_the_counts_are_those_of_the_file_after_a_restart(opened: OpenStore) -> None:
    async with opened() as store:
        await store.apply([Acquire(f"job-{number}", "alice", 10_000) for number in range(5)])
        await store.apply([release_of(await acquired(store, "free"))])
    async with opened(locks_max=6) as store:
        assert await store.sweep() == Sweep(0, 5)
        assert await store.apply([Acquire("seventh", "alice", 10_000)]) == [StoreFull(6)]


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


# --- One process, one file


async def test_a_file_in_use_is_refused_and_says_by_whom(opened: OpenStore, path: Path) -> None:
    async with opened():
        with pytest.raises(StoreError, match=f"in use by another lock server \\(process {os.getpid()}\\)"):
            await SqliteStore(path).open()
    async with opened():
        pass


def spoken(process: "subprocess.Popen[bytes]", what: str) -> dict[str, Any]:
    assert process.stdout is not None
    while line := process.stdout.readline():
        message: dict[str, Any] = json.loads(line)
        if message["what"] == what:
            return message
    raise AssertionError(f"it ended before it said {what!r}")


async def test_a_file_in_use_by_another_process_is_refused_until_that_is_killed(opened: OpenStore, path: Path) -> None:
    with subprocess.Popen([sys.executable, str(USER), "hold", str(path)], stdout=subprocess.PIPE) as owner:
        try:
            spoken(owner, "held")
            with pytest.raises(StoreError, match=f"process {owner.pid}"):
                await SqliteStore(path).open()
        finally:
            owner.kill()
    async with opened() as store:
        assert (await held(store, "job")).current_owner_id == "holder"


async def test_a_forked_child_is_refused_and_does_not_keep_the_file_of_its_dead_parent(
    opened: OpenStore, path: Path
) -> None:
    with subprocess.Popen([sys.executable, str(USER), "fork", str(path)], stdout=subprocess.PIPE) as parent:
        try:
            for _ in range(2):
                assert "before a fork" in spoken(parent, "child was refused")["why"]
            child = spoken(parent, "child")["pid"]
        finally:
            parent.kill()
            parent.wait()
        try:
            async with opened() as store:
                await acquired(store, "job")
        finally:
            os.kill(child, signal.SIGKILL)


async def test_one_that_lost_the_file_to_another_grants_nothing_any_more(opened: OpenStore, path: Path) -> None:
    async with opened() as old:
        lease = await acquired(old, "job")
        await old.apply([release_of(await acquired(old, "free"))])
        Path(f"{path}-owner").unlink()  # the claim is lost: only the number of the run is left to tell
        async with opened() as new:
            for operation in (release_of(lease), renew_of(lease), Acquire("free", "alice", 30_000)):
                await all_is_quiet(old)
                with pytest.raises(StoreError, match="opened by another lock server"):
                    await old.apply([operation])
            with pytest.raises(StoreError, match="opened by another lock server"):
                await old.check()
            assert await new.apply([release_of(lease)]) == [Released()]
            assert (await acquired(new, "job")).fencing_token == 2
            assert (await acquired(new, "free")).fencing_token == 2


async def it_is_time_to_look() -> None:
    """The names were looked at a moment ago, and are not looked at before each grant."""
    until = time.monotonic() + _sqlite_file.LOOK_AGAIN_S
    while time.monotonic() < until:
        await asyncio.sleep(_sqlite_file.LOOK_AGAIN_S)


async def test_one_whose_folder_was_swapped_grants_nothing_once_another_has_granted_from_what_is_there_now(
    opened: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "LOOK_AGAIN_S", 0.3)  # so that the other one would be quicker
    folder, backup, aside = (tmp_path / name for name in ("data", "backup", "aside"))
    folder.mkdir()
    async with opened(path=folder / "locks.db") as store:
        await store.apply([release_of(await acquired(store, "job"))])
    shutil.copytree(folder, backup)
    async with opened(path=folder / "locks.db") as old:
        await acquired(old, "other")  # looks at the names
        folder.rename(aside)
        backup.rename(folder)
        async with opened(path=folder / "locks.db") as new:
            assert (await acquired(new, "job")).fencing_token == 2
            with pytest.raises(StoreError, match="moved, removed or replaced"):
                await old.apply([Acquire("job", "bob", 30_000)])
        folder.rename(backup)
        aside.rename(folder)


@pytest.mark.parametrize("suffix", ["", "-wal"], ids=["file", "log"])
async def test_a_file_that_was_moved_away_grants_nothing_until_it_is_back(
    opened: OpenStore, path: Path, suffix: str
) -> None:
    async with opened() as store:
        lease = await acquired(store, "job")
        await store.apply([release_of(await acquired(store, "free"))])
        moved, aside = Path(f"{path}{suffix}"), path.with_name("aside")
        moved.rename(aside)
        await it_is_time_to_look()
        for operation in (Acquire("other", "alice", 30_000), Acquire("free", "alice", 30_000), renew_of(lease)):
            await all_is_quiet(store)
            with pytest.raises(StoreError, match="moved, removed or replaced"):
                await store.apply([operation])
        aside.rename(moved)
        assert await store.apply([release_of(lease)]) == [Released()]
        assert (await acquired(store, "free")).fencing_token == 2


async def test_one_that_is_moved_long_after_its_folder_last_changed_is_missed_all_the_same(
    opened: OpenStore, path: Path
) -> None:
    async with opened() as store:
        an_hour_ago = time.time() - 3600
        os.utime(path.parent, (an_hour_ago, an_hour_ago))
        await acquired(store, "job")  # looks at the folder, and need not look at the names again
        path.rename(path.with_name("aside"))
        await it_is_time_to_look()
        with pytest.raises(StoreError, match="moved, removed or replaced"):
            await store.apply([Acquire("other", "alice", 30_000)])


async def test_the_file_is_missed_when_its_folder_is_gone(opened: OpenStore, tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    async with opened(path=folder / "locks.db") as store:
        await acquired(store, "job")
        folder.rename(tmp_path / "aside")
        await it_is_time_to_look()
        with pytest.raises(StoreError, match="moved, removed or replaced"):
            await store.apply([Acquire("other", "alice", 30_000)])
        (tmp_path / "aside").rename(folder)


# --- Replies that are no futures


async def test_who_asks_again_when_it_is_told_does_not_put_the_next_waiter_off(opened: OpenStore) -> None:
    """What is due is planned before anybody is told: the second question frees a lock for a short lease."""
    done = asyncio.get_running_loop().create_future()
    async with opened(clock=BOOT_CLOCK) as store, asyncio.timeout(PATIENCE_S):
        lease = await acquired(store, "job")
        short = asyncio.create_task(store.wait(Acquire("job", "short", 50), 60_000))
        await until_waiting(store, "job", 1)
        late = asyncio.create_task(store.wait(Acquire("job", "late", 30_000), 60_000))
        await until_waiting(store, "job", 2)
        store.submit(Told(lambda _: None), [Acquire("first", "me", 30_000)])  # on the loop's thread
        again = Told(lambda _: store.submit(Told(done.set_result), [release_of(lease)]))
        store.submit(again, [Acquire("second", "me", 30_000)])  # in the writer's
        assert await done == [Released()]
        assert isinstance(await short, Granted)
        assert isinstance(await late, Granted), "nobody looked when the short lease had ended"


async def test_a_reply_that_fails_keeps_nobody_else_from_its_answer(opened: OpenStore) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("a defect")

    async with opened() as store, asyncio.timeout(PATIENCE_S):
        told = asyncio.get_running_loop().create_future()
        for number in range(3):  # the first on the loop's thread, the others together in the writer's
            store.submit(Told(fail), [Acquire(f"bad-{number}", "me", 30_000)])
        store.submit(Told(told.set_result), [Acquire("good", "me", 30_000)])
        (outcome,) = await told
        assert isinstance(outcome, Granted)


# --- Files that cannot be used


async def refused(path: Path, match: str) -> None:
    with pytest.raises(StoreError, match=match):
        await SqliteStore(path).open()


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    await refused(tmp_path / "none" / "locks.db", "folder .*none does not exist: create it")


async def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "locks.db").mkdir()
    await refused(tmp_path / "locks.db", "is not a file")


async def test_a_file_that_is_no_database_is_left_as_it_is(path: Path) -> None:
    path.write_text("something of somebody else's " * 1000)
    before = path.read_bytes()
    await refused(path, "is not an SQLite database")
    assert path.read_bytes() == before


async def test_a_database_of_another_program_is_left_as_it_is(path: Path) -> None:
    write(path, "CREATE TABLE theirs (what)")
    before = path.read_bytes()
    await refused(path, "database of another program")
    assert path.read_bytes() == before


async def test_a_file_of_a_newer_version_is_left_as_it_is(opened: OpenStore, path: Path) -> None:
    async with opened():
        pass
    write(path, "UPDATE meta SET value = 2 WHERE name = 'schema_version'")
    before = path.read_bytes()
    await refused(path, "newer version of pgleaderlock")
    assert path.read_bytes() == before


async def test_a_damaged_file_is_refused(opened: OpenStore, path: Path) -> None:
    async with opened() as store:
        await store.apply([Acquire(f"job-{number}", "alice", 30_000) for number in range(500)])
    damaged = bytearray(path.read_bytes())
    damaged[1024:] = os.urandom(len(damaged) - 1024)
    path.write_bytes(damaged)
    await refused(path, "damaged")


async def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sqlite_file._file_system(Path("/proc/self")) == "proc"
    monkeypatch.setattr(_sqlite_file, "_file_system", lambda folder: "nfs4")
    await refused(path, r"network file system \(nfs4\)")


async def test_a_store_that_could_not_be_opened_can_be_opened_when_the_cause_is_gone(path: Path) -> None:
    path.mkdir()
    store = SqliteStore(path)
    with pytest.raises(StoreError):
        await store.open()
    path.rmdir()
    await store.open()
    await store.check()
    await store.close()


async def test_limits_below_one_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="locks_max"):
        SqliteStore(path, locks_max=0)


# --- Failing while in use


async def test_a_full_disk_grants_nothing_loses_nothing_and_works_again_with_space(
    opened: OpenStore, disk: Disk
) -> None:
    async with opened(vfs=disk.name) as store:
        kept = await acquired(store, "kept", ttl_ms=600_000)
        waiter = asyncio.create_task(store.wait(Acquire("kept", "bob", 30_000), 600_000))
        await until_waiting(store, "kept", 1)
        disk.full = True
        outcomes = await asyncio.gather(
            *(store.apply([Acquire(f"job-{number}", "alice", 30_000)]) for number in range(20)),
            store.wait(Acquire("waited", "alice", 30_000), 1_000),
            store.break_lock("kept", "admin"),
            return_exceptions=True,
        )
        assert {type(outcome) for outcome in outcomes} == {StoreError}
        assert "the disk is full: free some space" in str(outcomes[0])
        with pytest.raises(StoreError, match="disk is full"):
            await store.check()
        assert (await store.get("kept")).held
        disk.full = False
        await store.check()
        assert await store.sweep() == Sweep(0, 1)
        for number in range(20):
            assert (await acquired(store, f"job-{number}")).fencing_token == 1
        if waiter.done():  # the break that failed had given it the lock
            with pytest.raises(StoreError):
                await waiter
        assert await store.apply([release_of(kept)]) == [Released()]


async def test_those_who_wait_behind_a_failed_commit_are_still_served(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(store.wait(Acquire("job", f"waiter-{number}", 30_000), 600_000)))
            await until_waiting(store, "job", number + 1)
        disk.full = True
        with pytest.raises(StoreError):
            await store.apply([release_of(lease)])
        with pytest.raises(StoreError):
            await tasks[0]  # its grant was part of what failed
        disk.full = False
        assert await store.apply([release_of(lease)]) == [Released()]
        got = await tasks[1]
        assert isinstance(got, Granted)
        assert got.fencing_token == 2


async def test_those_whose_turn_came_while_the_disk_was_full_are_looked_at_again(
    opened: OpenStore, disk: Disk, clock: FakeClock
) -> None:
    async with opened(vfs=disk.name) as store:
        await acquired(store, "job", ttl_ms=10_000)
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(store.wait(Acquire("job", f"waiter-{number}", 30_000), 600_000)))
            await until_waiting(store, "job", number + 1)
        disk.full = True
        clock.advance(10)
        with pytest.raises(StoreError):
            await tasks[0]
        disk.full = False
        clock.advance(1)
        async with asyncio.timeout(PATIENCE_S):
            assert isinstance(await tasks[1], Granted)


async def test_nobody_overtakes_those_whose_turn_came_while_the_disk_was_full(
    opened: OpenStore, disk: Disk, clock: FakeClock
) -> None:
    async with opened(vfs=disk.name) as store:
        await acquired(store, "job", ttl_ms=10_000)
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(store.wait(Acquire("job", f"waiter-{number}", 30_000), 600_000)))
            await until_waiting(store, "job", number + 1)
        disk.full = True
        clock.advance(10)
        with pytest.raises(StoreError):
            await tasks[0]
        disk.full = False
        newcomer = asyncio.create_task(store.wait(Acquire("job", "newcomer", 30_000), 600_000))
        async with asyncio.timeout(PATIENCE_S):
            assert isinstance(await tasks[1], Granted)
        await until_waiting(store, "job", 1)
        newcomer.cancel()


@pytest.mark.parametrize("ended", [False, True], ids=["transaction goes on", "transaction ended"])
@pytest.mark.parametrize("what", ["GRANT", "FIND"])
async def test_one_in_line_is_told_of_an_error_that_comes_with_its_turn_or_its_end(
    opened: OpenStore, clock: FakeClock, what: str, ended: bool
) -> None:
    async with opened() as store:
        await acquired(store, "job", ttl_ms=10_000)
        task = asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 5_000 if what == "FIND" else 600_000))
        await until_waiting(store, "job", 1)
        locks, statement = store._locks, getattr(_sqlite_locks, what)
        works = locks._execute

        def fails(text: str, *values: Any) -> Any:
            if text != statement:
                return works(text, *values)
            if ended:  # as SQLite does by itself after some errors
                locks._connection.execute("ROLLBACK")
            raise apsw.IOError("disk I/O error")

        locks._execute = fails  # type: ignore[assignment]
        clock.advance(5 if what == "FIND" else 10)
        with pytest.raises(StoreError, match="disk gave an error"):
            async with asyncio.timeout(PATIENCE_S):
                await task
        locks._execute = works
        assert (await store.get("job")).waiters == 0


async def test_two_who_wait_with_one_key_are_both_told_that_the_store_is_full(
    opened: OpenStore, path: Path, clock: FakeClock
) -> None:
    async with opened(locks_max=1) as store:
        await acquired(store, "job", ttl_ms=10_000)
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(store.wait(Acquire("job", "bob", 30_000, "key"), 600_000)))
            await until_waiting(store, "job", number + 1)
        write(path, "DELETE FROM locks")  # somebody, by hand: the store still counts it
        clock.advance(10)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*tasks) == [StoreFull(1), StoreFull(1)]


@pytest.mark.parametrize("fault", ["full", "sync_fails"])
async def test_a_disk_that_fails_at_the_close_keeps_nobody_waiting_and_loses_nothing(
    opened: OpenStore, disk: Disk, fault: str
) -> None:
    async with opened(vfs=disk.name) as store:
        await acquired(store, "job")
        task = asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 600_000))
        await until_waiting(store, "job", 1)
        setattr(disk, fault, True)
        async with asyncio.timeout(PATIENCE_S):
            await store.close()
            assert isinstance(await task, Held)
    async with opened() as store:
        await held(store, "job")


async def test_a_ticket_of_a_group_that_failed_is_told_and_stands_in_nobodys_way(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        await acquired(store, "job")
        async with Blocked(store):
            asked = [
                asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 600_000)),
                asyncio.create_task(store.wait(Acquire("new", "bob", 30_000), 600_000)),
            ]
            await asyncio.sleep(0)
            disk.full = True
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreError, StoreError]
        disk.full = False
        assert (await store.get("job")).waiters == 0
        await acquired(store, "new")


async def test_a_list_that_failed_does_not_count(opened: OpenStore) -> None:
    async with opened(locks_max=2) as store:
        names = ["one", "two", "\ud800"]
        with pytest.raises(UnicodeEncodeError):
            await store.apply([Acquire(name, "alice", 30_000) for name in names])
        for name in names[:2]:
            await acquired(store, name)
        assert await store.sweep() == Sweep(0, 2)


async def test_a_log_in_doubt_is_started_again_when_our_own_copier_has_ended(opened: OpenStore) -> None:
    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    waits = threading.Event()
    async with opened() as store:
        log = store._writer._log  # type: ignore[union-attr]
        await acquired(store, "before")
        log._idle, log.doubtful = Waited(), True  # as while it copies
        asked = asyncio.create_task(acquired(store, "job"))
        assert await asyncio.to_thread(waits.wait, PATIENCE_S)
        assert not asked.done()
        log._idle.set()
        await asked
        assert not log.doubtful


async def test_a_sync_that_fails_is_told_and_its_token_is_not_lost(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        disk.sync_fails = True
        with pytest.raises(StoreError, match="disk gave an error"):
            await store.apply([Acquire("job", "alice", 30_000)])
        disk.sync_fails = False
        await acquired(store, "job")
    async with opened() as store:
        await held(store, "job")


@pytest.mark.parametrize("renews", [False, True], ids=["grant", "renewal"])
async def test_when_a_lone_operation_fails_only_its_owner_is_told_and_nothing_has_changed(
    opened: OpenStore, disk: Disk, renews: bool
) -> None:
    told: list[Any] = []
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "held")
        await store.apply([release_of(await acquired(store, "free"))])
        await all_is_quiet(store)
        store.submit(Told(told.append), [Acquire("before", "alice", 30_000)])
        assert len(told) == 1
        await all_is_quiet(store)
        disk.sync_fails = True
        with pytest.raises(StoreError, match="disk gave an error"):
            await store.apply([renew_of(lease, 1) if renews else Acquire("free", "alice", 30_000)])
        disk.sync_fails = False
        assert len(told) == 1, "who has had an answer gets no other one"
        assert await store.sweep() == Sweep(0, 2)
        assert (await store.get("held")).version == 1
        assert (await acquired(store, "free")).fencing_token == 2


async def test_a_lease_that_has_expired_is_followed_by_the_next_token_and_counted_once(
    opened: OpenStore, clock: FakeClock
) -> None:
    async with opened() as store:
        await acquired(store, "job", ttl_ms=1_000)
        clock.advance(2)
        assert (await acquired(store, "job")).fencing_token == 2
        await turns_of_the_loop(1)
        assert await store.sweep() == Sweep(0, 1)


async def test_a_freed_lock_that_somebody_waits_for_is_not_granted_past_the_line(opened: OpenStore) -> None:
    async with opened() as store, asyncio.timeout(PATIENCE_S):
        lease = await acquired(store, "job")
        waiting = asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 600_000))
        await until_waiting(store, "job", 1)
        assert await store.apply([release_of(lease)]) == [Released()]
        assert (await held(store, "job", "carol")).current_owner_id == "bob"
        assert isinstance(await waiting, Granted)


async def test_a_file_that_has_become_read_only_is_told(opened: OpenStore) -> None:
    async with opened() as store:
        store._locks._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreError, match="read-only: make file and folder writable"):
            await store.apply([Acquire("job", "alice", 30_000)])
        store._locks._connection.execute("PRAGMA query_only = OFF")
        await acquired(store, "job")


@pytest.mark.parametrize("alone", [True, False])
async def test_a_lease_whose_waiter_has_gone_is_given_back_even_if_the_disk_was_full(
    opened: OpenStore, disk: Disk, alone: bool
) -> None:
    async with opened(vfs=disk.name) as store:
        await store.apply([release_of(await acquired(store, "free"))])
        gone = asyncio.create_task(store.wait(Acquire("job", "bob", 600_000), 600_000))
        before = disk.syncs
        await asyncio.sleep(0)
        stand_still_until(lambda: disk.syncs > before)  # the grant is made, and its owner does not know yet
        gone.cancel()
        disk.full = True
        await asyncio.gather(gone, return_exceptions=True)
        with pytest.raises(StoreError):
            await store.check()
        assert (await store.get("job")).held
        disk.full = False
        if alone:
            await all_is_quiet(store)
            await acquired(store, "free")
        else:
            await store.check()
        assert not (await store.get("job")).held


async def test_a_file_that_another_program_locks_is_busy(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "BUSY_MS", 1)
    async with opened() as store:
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="locked by another program"):
            await store.apply([Acquire("job", "alice", 30_000)])
        other.close(True)
        await acquired(store, "job")


async def test_a_file_that_another_program_wrote_to_after_a_refusal_is_written_to_again(
    opened: OpenStore, path: Path
) -> None:
    async with opened() as store:
        await acquired(store, "job")
        await held(store, "job")  # a mere read: it must be over with its transaction
        write(path, "UPDATE meta SET value = value + 1 WHERE name = 'checks'")
        await acquired(store, "other")


# --- Bounds, and who waits for whom


async def test_a_full_queue_is_busy(opened: OpenStore) -> None:
    async with opened(queue_max=10) as store:
        async with Blocked(store):
            tasks = [asyncio.create_task(store.apply([Acquire(f"job-{n}", "alice", 30_000)])) for n in range(10)]
            await asyncio.sleep(0)
            with pytest.raises(StoreBusy, match="10 operations wait"):
                await store.apply([Acquire("one too many", "alice", 30_000)])
        await asyncio.gather(*tasks)
        await acquired(store, "one too many")


async def test_too_many_who_wait_are_busy(opened: OpenStore) -> None:
    async with opened(waiters_max=3) as store:
        lease = await acquired(store, "job")
        tasks = [asyncio.create_task(store.wait(Acquire("job", f"w-{n}", 30_000), 600_000)) for n in range(3)]
        await until_waiting(store, "job", 3)
        with pytest.raises(StoreBusy, match="3 requests wait"):
            await store.wait(Acquire("job", "one too many", 30_000), 600_000)
        tasks[0].cancel()
        await until_waiting(store, "job", 2)
        tasks.append(asyncio.create_task(store.wait(Acquire("job", "w-3", 30_000), 600_000)))
        await until_waiting(store, "job", 3)
        await store.apply([release_of(lease)])
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
            tasks = [asyncio.create_task(store.wait(Acquire("job", f"w-{n}", 1_000), 600_000)) for n in range(100)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await until_waiting(store, "job", 0)
        assert len(store._locks.room._agenda) < 1_500


async def test_a_lease_that_is_renewed_for_less_each_time_does_not_fill_the_agenda(opened: OpenStore) -> None:
    async with opened() as store:
        lease = await acquired(store, "job", ttl_ms=600_000)
        task = asyncio.create_task(store.wait(Acquire("job", "bob", 1_000), 600_000))
        await until_waiting(store, "job", 1)
        await store.apply([renew_of(lease, 600_000 - number) for number in range(5_000)])
        assert len(store._locks.room._agenda) < 1_500
        task.cancel()


async def test_a_lease_that_was_given_twice_stays_when_one_of_both_goes(opened: OpenStore) -> None:
    async with opened() as store:
        gone = asyncio.create_task(store.wait(Acquire("job", "bob", 600_000, "key"), 600_000))
        again = asyncio.create_task(store.apply([Acquire("job", "bob", 600_000, "key")]))
        await turns_of_the_loop(2)
        stand_still_until(lambda: any(share.receivers == 2 for share in list(store._locks.fresh.values())))
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        (lease,) = await again
        assert isinstance(lease, Granted)
        await store.check()  # behind the word that the first has gone
        assert isinstance((await store.apply([renew_of(lease)]))[0], Renewed)
        assert not store._locks.fresh


async def test_a_lease_that_two_waited_for_with_one_key_ends_when_both_have_gone(
    opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_writer, "SLOW_S", float("inf"))
    async with opened() as store:
        lease = await acquired(store, "job")
        gone = []
        for number in range(2):
            gone.append(asyncio.create_task(store.wait(Acquire("job", "bob", 600_000, "key"), 600_000)))
            await until_waiting(store, "job", number + 1)
        released = asyncio.create_task(store.apply([release_of(lease)]))
        await turns_of_the_loop(1)  # done in the loop: they have it, and have not heard of it
        stand_still_until(lambda: any(share.tickets == 2 for share in list(store._locks.fresh.values())))
        for task in gone:
            task.cancel()
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
            await store.apply([Acquire(f"job-{turn}-{number}", "alice", 30_000) for number in range(50)])
        pages = Path(f"{path}-wal").stat().st_size // _sqlite_file.PAGE_BYTES
        assert pages < 50 * 10
    assert read(path, "SELECT count(*) FROM locks") == 5_000


async def test_refusals_do_not_keep_the_log_from_starting_again(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "LOG_PAGES", 50)
    async with opened() as store:
        await acquired(store, "job")
        for turn in range(400):  # each transaction ends with a refusal
            await asyncio.gather(
                store.apply([Acquire(f"job-{turn}-{number}", "alice", 30_000) for number in range(10)]),
                store.apply([Acquire("job", "bob", 30_000)]),
            )
        pages = Path(f"{path}-wal").stat().st_size // _sqlite_file.PAGE_BYTES
        assert pages < 50 * 10


# --- Which thread does it


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """One entry a transaction: whether the event loop's thread did it, and of how many items."""
    seen: list[tuple[bool, int]] = []
    real, real_alone = _sqlite_writer.Writer._transact, _sqlite_writer.Writer._alone
    loop_thread = threading.get_ident()

    def transact(self: Any, group: list[Any], *, closing: bool) -> Any:
        seen.append((threading.get_ident() == loop_thread, len(group)))
        return real(self, group, closing=closing)

    def alone(self: Any, request: Any) -> Any:
        answers = real_alone(self, request)
        if answers is not None:
            seen.append((threading.get_ident() == loop_thread, 1))
        return answers

    monkeypatch.setattr(_sqlite_writer.Writer, "_transact", transact)
    monkeypatch.setattr(_sqlite_writer.Writer, "_alone", alone)
    monkeypatch.setattr(_sqlite_writer, "SLOW_S", float("inf"))  # however slow this machine's disk is now
    return seen


async def test_a_request_that_comes_alone_wakes_no_other_thread(
    opened: OpenStore, transactions: list[tuple[bool, int]]
) -> None:
    async with opened() as store:
        lease = await acquired(store, "job")
        await turns_of_the_loop(1)
        await store.apply([release_of(lease)])
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
    opened: OpenStore, transactions: list[tuple[bool, int]]
) -> None:
    async with opened() as store:
        await asyncio.gather(*(acquired(store, f"job-{number}") for number in range(3)))
        assert transactions == [(True, 1), (False, 2)], "nobody knew yet that the first was not alone"
        del transactions[:]
        await acquired(store, "after")
        assert transactions == [(False, 1)]
        await all_is_quiet(store)
        await acquired(store, "and after that")
        assert transactions == [(False, 1), (True, 1)]


def every_disk_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, and nobody forgets it."""
    monkeypatch.setattr(_sqlite_writer, "SLOW_S", -1.0)
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
        await store.apply([Acquire(f"job-{number}", "me", 30_000) for number in range(17)])
        await the_thread_rests(store)
        await acquired(store, "next")
        assert transactions == [(False, 1), (True, 1)]


async def test_to_copy_the_log_is_never_the_loops_work(
    opened: OpenStore, transactions: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_by: list[int] = []
    monkeypatch.setattr(_sqlite_log.Log, "_copy", lambda _log, _connection: copied_by.append(threading.get_ident()))
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
        first = asyncio.create_task(store.apply([Acquire("first", "bob", 600_000)]))
        gone = asyncio.create_task(store.apply([Acquire("job", "bob", 600_000)]))
        await turns_of_the_loop(1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
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
            await store.apply([Acquire("job", "bob", 600_000)])
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
        in_line = asyncio.create_task(store.wait(Acquire("job", "bob", 30_000), 600_000))
        await until_waiting(store, "job", 1)
        writer = store._writer
        assert writer is not None
        async with Blocked(store):
            writer._take = defect  # type: ignore[method-assign]
            queued = asyncio.create_task(store.apply([Acquire("other", "bob", 30_000)]))
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
            writer.apply((asked, [Acquire("job", "bob", 600_000)]))
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
