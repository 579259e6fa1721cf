"""The SQLite store's file: one process uses it, one that cannot be used is refused, and one that fails is left."""

import asyncio
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

from pgleaderlock.server.sqlite import file as _sqlite_file
from pgleaderlock.server.sqlite import locks as _sqlite_locks
from pgleaderlock.server.sqlite import mark as _sqlite_mark
from pgleaderlock.server.sqlite import store as _sqlite_store
from pgleaderlock.server.sqlite.store import SqliteStore
from pgleaderlock.server.store import Acquire, Granted, Held, Released, StoreBusy, StoreError, StoreFull, Sweep
from support.fakes import FakeClock
from support.stores import (
    PATIENCE_S,
    STORE_USER,
    Blocked,
    OpenStore,
    acquired,
    all_is_quiet,
    held,
    release_of,
    renew_of,
    stand_still_until,
    turns_of_the_loop,
    until_waiting,
    waited,
    write,
)
from support.torn_disk import Disk

# ruff: noqa: ASYNC220, ASYNC221, ASYNC240 - a test may stand still: that is how it comes between two threads.


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
    with subprocess.Popen([sys.executable, str(STORE_USER), "hold", str(path)], stdout=subprocess.PIPE) as owner:
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
    with subprocess.Popen([sys.executable, str(STORE_USER), "fork", str(path)], stdout=subprocess.PIPE) as parent:
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


async def test_a_file_in_use_is_refused_by_its_second_name(opened: OpenStore, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "other.db"
    other.parent.mkdir()
    async with opened() as store:
        await acquired(store, "job")
        other.hardlink_to(path)
        with pytest.raises(StoreError, match="in use by another lock server, under another path"):
            await SqliteStore(other).open()
        asked = subprocess.run([sys.executable, str(STORE_USER), "try", str(other)], capture_output=True, check=True)
        assert b"in use by another lock server, under another path" in asked.stdout
        await store.submit([Acquire("still works", "alice", 30_000)])


async def test_a_second_server_that_was_refused_has_not_ended_the_locks_of_the_first(
    opened: OpenStore, path: Path
) -> None:
    """The kernel ends all of a process's POSIX locks on a file, SQLite's among them, when it closes any descriptor of
    that file. Another program that then opens and closes the file would remove the log under the server."""
    async with opened() as store:
        await acquired(store, "job")
        with pytest.raises(StoreError, match="in use"):
            await SqliteStore(path).open()
        reads = "import sys, apsw; apsw.Connection(sys.argv[1]).execute('SELECT count(*) FROM locks').get"
        subprocess.run([sys.executable, "-c", reads, str(path)], check=True)
        assert Path(f"{path}-wal").exists()
        await it_is_time_to_look()
        await acquired(store, "other")


async def test_a_file_with_two_names_is_refused(opened: OpenStore, path: Path, tmp_path: Path) -> None:
    async with opened():
        pass
    other = tmp_path / "other.db"
    other.hardlink_to(path)
    for name in (path, other):
        await refused(name, "has 2 names .hard links.*remove the others")
    other.unlink()
    async with opened():
        pass


@pytest.mark.parametrize("in_use", [True, False])
async def test_a_file_that_is_mounted_by_itself_is_refused(
    opened: OpenStore, path: Path, tmp_path: Path, in_use: bool
) -> None:
    async with opened():
        pass
    other = tmp_path / "container" / "locks.db"
    other.parent.mkdir()
    other.touch()
    mounted = f'mount --bind "$0" "$1" && exec {sys.executable} {STORE_USER} try "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, str(path), str(other)]
    if in_use:
        async with opened() as store:
            await acquired(store, "job")
            asked = subprocess.run(command, capture_output=True, check=False)
    else:
        asked = subprocess.run(command, capture_output=True, check=False)
    if b"unshare failed" in asked.stderr or b"permission denied" in asked.stderr.lower():
        pytest.skip("this system lets nobody mount here")
    said = json.loads(asked.stdout)
    assert said["what"] == "refused", said
    expected = "in use by another lock server, under another path" if in_use else "mount the folder"
    assert expected in said["why"]


class NoClaim:
    def __init__(self, path: Path) -> None:
        pass

    def give_up(self) -> None:
        pass


async def test_one_that_lost_the_file_to_another_grants_nothing_any_more(
    opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as old:
        lease = await acquired(old, "job")
        await old.submit([release_of(await acquired(old, "free"))])
        monkeypatch.setattr(_sqlite_store, "Claim", NoClaim)  # only the number of the run is left to tell
        async with opened() as new:
            for operation in (release_of(lease), renew_of(lease), Acquire("free", "alice", 30_000)):
                await all_is_quiet(old)
                with pytest.raises(StoreError, match="opened by another lock server"):
                    await old.submit([operation])
            with pytest.raises(StoreError, match="opened by another lock server"):
                await old.check()
            assert await new.submit([release_of(lease)]) == [Released()]
            assert (await acquired(new, "job")).fencing_token > 1
            assert (await acquired(new, "free")).fencing_token > 1


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
        await store.submit([release_of(await acquired(store, "job"))])
    shutil.copytree(folder, backup)
    async with opened(path=folder / "locks.db") as old:
        await acquired(old, "other")  # looks at the names
        folder.rename(aside)
        backup.rename(folder)
        async with opened(path=folder / "locks.db") as new:
            assert (await acquired(new, "job")).fencing_token == 2
            with pytest.raises(StoreError, match="moved, removed or replaced"):
                await old.submit([Acquire("job", "bob", 30_000)])
        folder.rename(backup)
        aside.rename(folder)


@pytest.mark.parametrize("suffix", ["", "-wal"], ids=["file", "log"])
async def test_a_file_that_was_moved_away_grants_nothing_until_it_is_back(
    opened: OpenStore, path: Path, suffix: str
) -> None:
    async with opened() as store:
        lease = await acquired(store, "job")
        await store.submit([release_of(await acquired(store, "free"))])
        moved, aside = Path(f"{path}{suffix}"), path.with_name("aside")
        moved.rename(aside)
        await it_is_time_to_look()
        for operation in (Acquire("other", "alice", 30_000), Acquire("free", "alice", 30_000), renew_of(lease)):
            await all_is_quiet(store)
            with pytest.raises(StoreError, match="moved, removed or replaced"):
                await store.submit([operation])
        aside.rename(moved)
        assert await store.submit([release_of(lease)]) == [Released()]
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
            await store.submit([Acquire("other", "alice", 30_000)])


async def test_the_file_is_missed_when_its_folder_is_gone(opened: OpenStore, tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    async with opened(path=folder / "locks.db") as store:
        await acquired(store, "job")
        folder.rename(tmp_path / "aside")
        await it_is_time_to_look()
        with pytest.raises(StoreError, match="moved, removed or replaced"):
            await store.submit([Acquire("other", "alice", 30_000)])
        (tmp_path / "aside").rename(folder)


# --- Who may read


async def test_nobody_else_may_read_the_files_whatever_the_umask_is(path: Path) -> None:
    before = os.umask(0)
    try:
        store = SqliteStore(path)
        await store.open()
        await acquired(store, "job")
        modes = {file.name: oct(file.stat().st_mode & 0o777) for file in path.parent.iterdir()}
        await store.close()
    finally:
        os.umask(before)
    assert {"locks.db", "locks.db-wal", "locks.db-shm", "locks.db-owner"} <= modes.keys()
    assert set(modes.values()) == {"0o600"}, modes


async def test_files_that_others_may_read_are_tightened_and_that_is_said(
    opened: OpenStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with subprocess.Popen([sys.executable, str(STORE_USER), "hold", str(path)], stdout=subprocess.PIPE) as owner:
        spoken(owner, "held")
        owner.kill()
    files = [path, Path(f"{path}-wal"), Path(f"{path}-owner")]
    for file in files:
        file.chmod(0o644)
    async with opened():
        assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}
    assert [record.getMessage() for record in caplog.records if "permissions_tightened" in record.getMessage()]


async def test_files_that_others_may_read_and_that_cannot_be_tightened_are_refused(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened():
        pass
    path.chmod(0o640)

    def not_ours(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", not_ours)
    monkeypatch.setattr(Path, "chmod", not_ours)
    await refused(path, "other users may read .*0640.*chmod 600")


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


async def test_a_file_with_pages_of_an_earlier_size_keeps_them_and_is_served(
    opened: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(_sqlite_file, "PAGE_BYTES", 1024)
        async with opened() as store:
            first = await acquired(store, "a")
    async with opened() as store:
        assert (await held(store, "a")).current_owner_id == "alice"
        assert await store.submit([release_of(first)]) == [Released()]
        for number in range(100):
            await acquired(store, f"b-{number}")
        assert (await acquired(store, "a")).fencing_token == first.fencing_token + 1
    connection = apsw.Connection(str(path))
    assert connection.execute("PRAGMA page_size").get == 1024
    assert connection.execute("PRAGMA integrity_check").get == "ok"
    connection.close()


async def test_a_file_of_a_newer_version_is_left_as_it_is(opened: OpenStore, path: Path) -> None:
    async with opened():
        pass
    write(path, "UPDATE meta SET value = 2 WHERE name = 'schema_version'")
    before = path.read_bytes()
    await refused(path, "newer version of pgleaderlock")
    assert path.read_bytes() == before


async def test_a_damaged_file_is_refused(opened: OpenStore, path: Path) -> None:
    async with opened() as store:
        await store.submit([Acquire(f"job-{number}", "alice", 30_000) for number in range(500)])
    damaged = bytearray(path.read_bytes())
    damaged[1024:] = os.urandom(len(damaged) - 1024)
    path.write_bytes(damaged)
    await refused(path, "damaged")


async def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sqlite_file._file_system(Path("/proc/self")) == "proc"
    monkeypatch.setattr(_sqlite_file, "_file_system", lambda folder: "nfs4")
    await refused(path, r"network or shared file system \(nfs4\)")


@pytest.mark.parametrize("kind", ["9p", "virtiofs", "vboxsf", "fuse.grpcfuse"])
async def test_a_folder_of_the_host_is_refused(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = path.parent.resolve()
    mounted = f"36 35 0:52 / {folder} rw,relatime shared:1 - {kind} share rw,access=client\n"
    real = Path.read_bytes

    def read_bytes(file: Path) -> bytes:
        return real(file) + (mounted.encode() if file == Path("/proc/self/mountinfo") else b"")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    await refused(path, rf"network or shared file system \({kind}\)")
    assert not path.exists()


async def test_a_store_that_could_not_be_opened_can_be_opened_when_the_cause_is_gone(path: Path) -> None:
    path.mkdir()
    store = SqliteStore(path)
    with pytest.raises(StoreError):
        await store.open()
    path.rmdir()
    await store.open()
    await store.check()
    await store.close()


async def test_a_log_that_finds_no_room_for_its_usual_length_takes_none(path: Path) -> None:
    store = SqliteStore(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # as little as a disk that is nearly full
    try:
        await store.open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(f"{path}-wal").stat().st_size < 1 << 18
    assert (await acquired(store, "job")).fencing_token == 1
    await store.close()


async def test_a_first_start_that_failed_for_lack_of_space_is_forgotten_when_there_is_some(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = SqliteStore(path)
    with monkeypatch.context() as patched:
        patched.setattr(_sqlite_mark, "durably", fails)
        for _ in range(2):
            with pytest.raises(StoreError, match="free some space"):
                await store.open()
    await store.open()
    assert store.found.lost is None
    assert (await acquired(store, "job")).fencing_token == 1
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
        waiter = asyncio.create_task(waited(store, Acquire("kept", "bob", 30_000), 600_000))
        await until_waiting(store, "kept", 1)
        disk.full = True
        outcomes = await asyncio.gather(
            *(store.submit([Acquire(f"job-{number}", "alice", 30_000)]) for number in range(20)),
            waited(store, Acquire("waited", "alice", 30_000), 1_000),
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
        assert await store.submit([release_of(kept)]) == [Released()]


async def test_those_who_wait_behind_a_failed_commit_are_still_served(opened: OpenStore, disk: Disk) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "job")
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(waited(store, Acquire("job", f"waiter-{number}", 30_000), 600_000)))
            await until_waiting(store, "job", number + 1)
        disk.full = True
        with pytest.raises(StoreError):
            await store.submit([release_of(lease)])
        with pytest.raises(StoreError):
            await tasks[0]  # its grant was part of what failed
        disk.full = False
        assert await store.submit([release_of(lease)]) == [Released()]
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
            tasks.append(asyncio.create_task(waited(store, Acquire("job", f"waiter-{number}", 30_000), 600_000)))
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
            tasks.append(asyncio.create_task(waited(store, Acquire("job", f"waiter-{number}", 30_000), 600_000)))
            await until_waiting(store, "job", number + 1)
        disk.full = True
        clock.advance(10)
        with pytest.raises(StoreError):
            await tasks[0]
        disk.full = False
        newcomer = asyncio.create_task(waited(store, Acquire("job", "newcomer", 30_000), 600_000))
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
        task = asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 5_000 if what == "FIND" else 600_000))
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
            tasks.append(asyncio.create_task(waited(store, Acquire("job", "bob", 30_000, "key"), 600_000)))
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
        task = asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 600_000))
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
                asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 600_000)),
                asyncio.create_task(waited(store, Acquire("new", "bob", 30_000), 600_000)),
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
            await store.submit([Acquire(name, "alice", 30_000) for name in names])
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
            await store.submit([Acquire("job", "alice", 30_000)])
        disk.sync_fails = False
        await acquired(store, "job")
    async with opened() as store:
        await held(store, "job")


@pytest.mark.parametrize("renews", [False, True], ids=["grant", "renewal"])
async def test_when_a_lone_operation_fails_only_its_owner_is_told_and_nothing_has_changed(
    opened: OpenStore, disk: Disk, renews: bool
) -> None:
    async with opened(vfs=disk.name) as store:
        lease = await acquired(store, "held")
        await store.submit([release_of(await acquired(store, "free"))])
        await all_is_quiet(store)
        before = store.submit([Acquire("before", "alice", 30_000)])
        assert before.done()
        await all_is_quiet(store)
        disk.sync_fails = True
        with pytest.raises(StoreError, match="disk gave an error"):
            await store.submit([renew_of(lease, 1) if renews else Acquire("free", "alice", 30_000)])
        disk.sync_fails = False
        assert isinstance(before.result()[0], Granted), "who has had an answer gets no other one"
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
        waiting = asyncio.create_task(waited(store, Acquire("job", "bob", 30_000), 600_000))
        await until_waiting(store, "job", 1)
        assert await store.submit([release_of(lease)]) == [Released()]
        assert (await held(store, "job", "carol")).current_owner_id == "bob"
        assert isinstance(await waiting, Granted)


async def test_a_file_that_has_become_read_only_is_told(opened: OpenStore) -> None:
    async with opened() as store:
        store._locks._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreError, match="read-only: make file and folder writable"):
            await store.submit([Acquire("job", "alice", 30_000)])
        store._locks._connection.execute("PRAGMA query_only = OFF")
        await acquired(store, "job")


@pytest.mark.parametrize("alone", [True, False])
async def test_a_lease_whose_waiter_has_gone_is_given_back_even_if_the_disk_was_full(
    opened: OpenStore, disk: Disk, alone: bool
) -> None:
    async with opened(vfs=disk.name) as store:
        await store.submit([release_of(await acquired(store, "free"))])
        gone = asyncio.create_task(waited(store, Acquire("job", "bob", 600_000), 600_000))
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
            await store.submit([Acquire("job", "alice", 30_000)])
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
