"""What a store keeps when its process is killed, and the SQLite store when the power fails or its log is damaged: every
grant that it told of or, where that is lost, the height of its token."""

import asyncio
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import psycopg
import pytest

from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.server.sqlite import file, mark
from pgleaderlock.server.sqlite import store as sqlite_store
from pgleaderlock.server.sqlite.store import SqliteStore
from pgleaderlock.server.store import Acquire, Granted, StoreError
from support.counts import count
from support.fencing import database
from support.stores import STORE_USER, acquired, all_is_quiet, release_of, waited
from support.torn_disk import Disk

Stored = Callable[[], dict[str, tuple[int, str | None]]]


def killed_hammer(path: Path | str, seed: int) -> list[dict[str, Any]]:
    """Runs a process that hammers the store, kills it at a random moment, and gives what it had been told."""
    with subprocess.Popen(
        [sys.executable, str(STORE_USER), "hammer", str(path), str(seed)], stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        first = user.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.0, 0.3))  # the moment itself is what is tried
        user.kill()
        rest = user.stdout.read()
    return [json.loads(line) for line in [first, *rest.splitlines()] if line.strip()]


def stored(path: Path) -> dict[str, tuple[int, str | None]]:
    """Token and lease of each lock as they are in the file."""
    connection = apsw.Connection(str(path))
    try:
        found: Any = connection.execute("SELECT lock_name, fencing_token, lease_id FROM locks")
        return {name: (token, lease) for name, token, lease in found}
    finally:
        connection.close()


def stored_in_database(dsn: str) -> dict[str, tuple[int, str | None]]:
    query = "SELECT lock_name, t.last_token, l.lease_id FROM pgleaderlock.lock_tokens t "
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(query + "LEFT JOIN pgleaderlock.lock_leases l USING (lock_name)").fetchall()
    return {name: (token, lease) for name, token, lease in rows}


@pytest.fixture(params=["sqlite", "postgres"])
def killed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Stored]]:
    """The place of a store whose processes are killed, and what is in it."""
    if request.param == "sqlite":
        yield str(tmp_path / "locks.db"), lambda: stored(tmp_path / "locks.db")
    else:
        with database(request.getfixturevalue("dsn")) as dsn:
            yield dsn, lambda: stored_in_database(dsn)


@pytest.mark.timeout(600)
def test_a_kill_at_any_moment_loses_no_grant_reuses_no_token_and_grants_nothing_twice(
    killed: tuple[str, Stored],
) -> None:
    place, what_is_stored = killed
    last: dict[str, dict[str, Any]] = {}
    releasing: set[tuple[str, int]] = set()
    grants = 0
    for seed in range(count(6, 100)):
        said = killed_hammer(place, seed)
        # Lines of one process are in the order in which they were said, and the grants of a lock in that of tokens.
        releasing |= {(line["lock"], line["token"]) for line in said if line["what"] == "releasing"}
        for line in said:
            if line["what"] != "granted":
                continue
            grants += 1
            before = last.get(line["lock"])
            if before is not None:
                assert line["token"] > before["token"]
                if (line["lock"], before["token"]) not in releasing:
                    assert line["told_s"] >= before["from_s"] + before["ttl_s"], (before, line)
            last[line["lock"]] = line
        kept = what_is_stored()
        for name, line in last.items():
            token, lease = kept[name]
            assert token >= line["token"]
            if token == line["token"] and (name, token) not in releasing:
                assert lease == line["lease"]
    assert grants > 50


# --- A damaged log


LOG_FRAME_BYTES = 24 + file.PAGE_BYTES


def used_bytes(log: bytes | bytearray) -> int:
    """How long the part of the log is that counts: the pages whose salts are those of its header.

    The last one may be torn by the power cut.
    """
    at = file.LOG_HEADER_BYTES
    while log[at + 8 : at + 16] == log[16:24]:
        at += LOG_FRAME_BYTES
    return min(at, len(log))


def damaged(log: bytes, chance: random.Random) -> tuple[str, bytes]:
    """The log with one damage somewhere in the part that counts."""
    used = used_bytes(log)
    at = chance.randrange(used)
    what = chance.choice(["bit", "page", "zeros", "cut", "header", "removed"])
    data = bytearray(log)
    if what == "bit":
        data[at] ^= 1 << chance.randrange(8)
    elif what == "page":
        data[at : at + 1024] = chance.randbytes(len(data[at : at + 1024]))
    elif what == "zeros":
        data[at : at + 1024] = bytes(len(data[at : at + 1024]))
    elif what == "cut":
        del data[at:]
    elif what == "header":
        data[chance.randrange(file.LOG_HEADER_BYTES)] ^= 1 << chance.randrange(8)
    else:
        data.clear()
    return f"{what} at {at} of {used}", bytes(data)


@pytest.mark.timeout(600)
async def test_a_log_that_is_damaged_after_a_kill_reuses_no_token_and_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(7)
    places, kills = count(18, 200), count(3, 10)
    noticed = 0
    for number in range(places):
        killed = tmp_path / f"killed-{number % kills}"
        if not killed.exists():
            killed.mkdir()
            said = killed_hammer(killed / "locks.db", number)
            (tmp_path / f"{killed.name}.json").write_text(json.dumps(said))
        told: dict[str, int] = {}
        for line in json.loads((tmp_path / f"{killed.name}.json").read_text()):
            if line["what"] == "granted":
                told[line["lock"]] = max(line["token"], told.get(line["lock"], 0))
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(killed, folder)
        log = folder / "locks.db-wal"
        what, data = damaged(log.read_bytes(), chance)
        log.write_bytes(data)
        store = SqliteStore(folder / "locks.db")
        await store.open()
        noticed += store.found.lost is not None
        for name, token in told.items():
            if store.found.lost is None:  # the damage is in a commit that nobody was told of
                assert (await store.get(name)).fencing_token >= token, what
            await store.break_lock(name, "the test")
            assert (await acquired(store, name)).fencing_token > token, what
        await store.close()
    record_property("damaged", places)
    record_property("noticed", noticed)
    assert noticed > 0.8 * places
    assert caplog.text.count("store_damaged") == noticed


@pytest.mark.parametrize("log_is", ["the first", "restarted", "restarted by a longer commit"])
async def test_the_last_page_of_the_log_is_missed_as_soon_as_its_grant_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_is: str
) -> None:
    monkeypatch.setattr(file, "LOG_PAGES", 2_000 if log_is == "restarted by a longer commit" else 20)
    path, killed = tmp_path / "locks.db", tmp_path / "killed"

    def last_page_is_missed() -> bool:
        shutil.rmtree(killed, ignore_errors=True)
        killed.mkdir()
        for name in ("locks.db", "locks.db-wal", "locks.db-mark"):
            shutil.copy(tmp_path / name, killed)  # what a kill would leave now
        log = killed / "locks.db-wal"
        data = bytearray(log.read_bytes())
        data[used_bytes(data) - 1] ^= 1
        log.write_bytes(data)
        lost = SqliteStore(killed / "locks.db")._examine().lost
        return lost is not None and " of the log are damaged or missing" in lost

    store = SqliteStore(path)
    await store.open()
    assert store._writer is not None
    log = store._writer._log
    while log_is == "restarted" and log._starts < 3:
        await store.submit([release_of(await acquired(store, "job"))])
        await all_is_quiet(store)
    if log_is == "restarted by a longer commit":
        log._copier.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        before = log._pages
        await store.submit([Acquire(f"job-{number}", "alice", 30_000) for number in range(500)])
        assert last_page_is_missed()
        assert log._pages > before
    await all_is_quiet(store)
    # On the loop's thread: nothing else runs between the grant and the copy.
    lease = store.submit([Acquire("job", "alice", 30_000)]).result()[0]
    assert isinstance(lease, Granted)
    assert last_page_is_missed()
    await all_is_quiet(store)
    assert store.submit([release_of(lease)]).done()
    await asyncio.sleep(0)
    assert last_page_is_missed(), "that of a release, a moment later"
    await store.close()


@pytest.mark.timeout(600)
async def test_a_kill_alone_is_no_damage(tmp_path: Path) -> None:
    for seed in range(count(3, 30)):
        killed_hammer(tmp_path / "locks.db", seed)
        store = SqliteStore(tmp_path / "locks.db")
        await store.open()
        assert store.found.unclean
        assert store.found.lost is None
        await store.close()
        await store.open()
        assert not store.found.unclean
        await store.close()


@pytest.mark.parametrize("what", ["older", "zeros", "bit"])
async def test_no_damaged_page_of_a_file_that_was_closed_in_order_gives_a_token_again(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, chance = tmp_path / "locks.db", random.Random(3)
    store = SqliteStore(path)
    await store.open()
    leases = [await acquired(store, f"job-{number}") for number in range(60)]
    await store.close()
    older = path.read_bytes()
    await store.open()
    for lease in leases:
        await store.submit([release_of(lease)])
    told = {lease.lock_name: (await acquired(store, lease.lock_name)).fencing_token for lease in leases}
    await store.close()
    whole = path.read_bytes()
    opened = refused = 0
    for at in range(0, len(whole), file.PAGE_BYTES):
        page = slice(at, at + file.PAGE_BYTES)
        data = bytearray(whole)
        if what == "older":
            data[page] = older[page]
        elif what == "zeros":
            data[page] = bytes(file.PAGE_BYTES)
        else:
            data[at + chance.randrange(file.PAGE_BYTES)] ^= 1 << chance.randrange(8)
        if bytes(data) == whole or not any(data[:100]):
            continue  # without its first bytes it is no database
        folder = tmp_path / f"damaged-{at}"
        folder.mkdir()
        shutil.copy(mark.mark_path(path), mark.mark_path(folder / path.name))
        (folder / path.name).write_bytes(data)
        damaged_one = SqliteStore(folder / path.name)
        try:
            await damaged_one.open()
        except StoreError:
            refused += 1  # it is no valid database
            continue
        opened += 1
        assert damaged_one.found.lost is not None
        for name, token in told.items():
            outcome = (await damaged_one.submit([Acquire(name, "bob", 30_000)]))[0]
            assert not isinstance(outcome, Granted) or outcome.fencing_token > token
        await damaged_one.close()
    assert caplog.text.count("store_damaged") == opened
    assert opened >= 3 if what == "older" else opened + refused >= 3


async def test_a_file_that_was_only_looked_at_since_its_end_is_whole(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "locks.db")
    await store.open()
    lease = await acquired(store, "job")
    await store.close()
    assert (await store.examine()).lost is None
    await store.open()
    assert (store.found.unclean, store.found.lost) == (False, None)
    await store.submit([release_of(lease)])
    assert (await acquired(store, "job")).fencing_token == lease.fencing_token + 1
    await store.close()


async def test_an_open_store_keeps_the_lock_by_which_sqlite_knows_that_its_log_is_in_use(tmp_path: Path) -> None:
    """Closing any descriptor of the file would drop it, as after reading the file for its checksum."""
    store = SqliteStore(tmp_path / "locks.db")
    for name in ("at the first start", "at one that compares the checksum of the file"):
        await store.open()
        await acquired(store, name)
        assert posix_locks(tmp_path / "locks.db"), name
        await store.close()


def posix_locks(path: Path) -> list[str]:
    inode = f":{path.stat().st_ino} "
    return [line for line in Path("/proc/locks").read_text().splitlines() if inode in line and "POSIX" in line]


async def test_an_older_copy_of_the_file_beside_its_mark_reuses_no_token(tmp_path: Path) -> None:
    path, copy = tmp_path / "locks.db", tmp_path / "copy.db"
    store = SqliteStore(path)
    await store.open()
    await acquired(store, "before")
    await store.close()
    shutil.copy(path, copy)
    await store.open()
    lease = await acquired(store, "job")
    await store.close()
    copy.replace(path)
    await store.open()
    assert "older than its mark" in str(store.found.lost)
    assert (await acquired(store, "job")).fencing_token > lease.fencing_token
    await store.close()
    path.unlink()
    identity = store.found.store_id
    await store.open()
    assert (await acquired(store, "job")).fencing_token > lease.fencing_token + 1
    assert store.found.store_id == identity
    await store.close()


async def test_a_token_above_the_ceiling_is_granted_when_the_new_ceiling_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mark, "RESERVED_TOKENS", 3)
    path = tmp_path / "locks.db"
    store = SqliteStore(path)
    await store.open()

    def fails(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for token in range(1, 20):
        lease = await acquired(store, "job")
        assert lease.fencing_token == token
        read = mark.read_mark(path)
        assert read is not None
        assert token <= read[0].ceiling <= token + 3
        await store.submit([release_of(lease)])
        if token == read[0].ceiling:
            with monkeypatch.context() as patched:
                patched.setattr(mark, "durably", fails)
                with pytest.raises(StoreError, match="free some space"):
                    await acquired(store, "job")
    await store.close()


@pytest.mark.parametrize("step", ["count", "begin", "note", "reader"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
async def test_a_start_that_was_cut_short_is_no_damage_and_reuses_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, used: bool
) -> None:
    class Cut(BaseException):
        pass

    def cut(*_: object) -> None:
        raise Cut

    store = SqliteStore(tmp_path / "locks.db")
    lease = None
    if used:
        await store.open()
        lease = await acquired(store, "job")
        await store.submit([release_of(lease)])
        await store.close()
    with monkeypatch.context() as patched:
        if step == "count":
            known = file.sql
            patched.setattr(mark, "sql", lambda name: cut() if name == "next_run" else known(name))
        elif step == "reader":
            patched.setattr(sqlite_store, "open_reader", cut)
        else:
            patched.setattr(mark.Mark, step, cut)
        with pytest.raises(Cut):
            await store.open()
    assert (await store.examine()).lost is None
    await store.open()
    assert store.found.lost is None
    assert (await acquired(store, "job")).fencing_token > (0 if lease is None else lease.fencing_token)
    await store.close()


def copied_while_in_use(path: Path, copy: Path) -> None:
    """As `sqlite3 locks.db .backup` does."""
    source, target = apsw.Connection(str(path)), apsw.Connection(str(copy))
    with target.backup("main", source, "main") as backup:
        backup.step()
    target.close()
    source.close()


@pytest.mark.parametrize("end", ["in order", "killed"])
async def test_a_copy_from_the_middle_of_the_last_run_beside_its_mark_reuses_no_token(tmp_path: Path, end: str) -> None:
    path, copy, killed = tmp_path / "locks.db", tmp_path / "copy.db", tmp_path / "killed-mark"
    store = SqliteStore(path)
    await store.open()
    await acquired(store, "before")
    copied_while_in_use(path, copy)
    lease = await acquired(store, "job")
    shutil.copy(mark.mark_path(path), killed)  # what a kill would leave
    await store.close()
    copy.replace(path)
    if end == "killed":
        killed.replace(mark.mark_path(path))
    assert (await store.examine()).lost is not None
    await store.open()
    assert store.found.lost is not None
    assert (await acquired(store, "job")).fencing_token > lease.fencing_token
    await store.close()


def test_a_mark_that_is_cut_short_does_not_end_the_server(tmp_path: Path) -> None:
    """Nor does a file system that has no room for the note, as one that copies on write when it is full."""
    path = tmp_path / "locks.db"
    with subprocess.Popen([sys.executable, str(STORE_USER), "hammer", str(path)], stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        told = map(json.loads, user.stdout)
        assert any(each["what"] == "granted" for each in told)
        os.truncate(mark.mark_path(path), 0)
        cut_s = BOOT_CLOCK.now()
        assert any(each["what"] == "granted" and each["from_s"] > cut_s for each in told)
        user.kill()


@pytest.mark.parametrize("what", ["damaged", "removed", "that of another store", "that of an earlier run"])
async def test_without_its_mark_a_store_goes_on_far_above_the_file_which_may_be_a_copy(
    tmp_path: Path, what: str
) -> None:
    path, copy, early, another = (tmp_path / name for name in ("locks.db", "copy.db", "early-mark", "another.db"))
    store, other = SqliteStore(path), SqliteStore(another)
    for each in (store, other):
        await each.open()
        await acquired(each, "before")
        await each.close()
    shutil.copy(mark.mark_path(path), early)
    for _ in range(2):
        await store.open()
        await store.close()
    shutil.copy(path, copy)
    await store.open()
    lease = await acquired(store, "job")
    for _ in range(100):
        await store.submit([release_of(lease)])
        lease = await acquired(store, "job")
    await store.close()
    copy.replace(path)
    if what == "damaged":
        data = bytearray(mark.mark_path(path).read_bytes())
        data[20] ^= 1
        mark.mark_path(path).write_bytes(data)
    elif what == "removed":
        mark.mark_path(path).unlink()
    else:
        shutil.copy(mark.mark_path(another) if "another" in what else early, mark.mark_path(path))
    identity = store.found.store_id
    assert "mark" in str((await store.examine()).lost)
    await store.open()
    assert store.found.unclean
    assert "mark" in str(store.found.lost)
    assert store.found.store_id == identity
    assert (await acquired(store, "job")).fencing_token > mark.UNKNOWN_TOKENS
    await store.close()
    await store.open()
    assert not store.found.unclean
    await store.close()


# --- Power cuts


async def fill(disk: Disk, folder: Path, *, alone: bool) -> int:
    """Grants and releases on a few locks; marks each answer in the record. Gives where the record of them begins."""
    store = SqliteStore(folder / "locks.db", vfs=disk.name)
    await store.open()
    begins = len(disk.record)

    async def client(number: int) -> None:
        for turn in range(40):
            name = f"lock-{(number + turn) % 4}"
            if alone:
                await all_is_quiet(store)
                lease = await acquired(store, name)
            else:
                lease = await waited(store, Acquire(name, f"owner-{number}", 30_000), 60_000)  # type: ignore[assignment]
            assert isinstance(lease, Granted)
            disk.mark(name, lease.fencing_token)
            await store.submit([release_of(lease)])

    await asyncio.gather(*(client(number) for number in range(1 if alone else 4)))
    ends = len(disk.record)
    await store.close()
    del disk.record[ends:]
    return begins


class Cuts(NamedTuple):
    forgotten: int
    """How many tokens of grants that had been told the file did not know any more."""
    reused: int
    """How many of them were given again."""


def leave_the_mark_alone(folder: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{folder}/locks.db{suffix}").unlink(missing_ok=True)


async def granted_again(path: Path, told: dict[str, int]) -> Cuts:
    forgotten = reused = 0
    store = SqliteStore(path)
    await store.open()
    try:
        assert store.found.unclean
        for name, token in told.items():
            forgotten += (await store.get(name)).fencing_token < token
            await store.break_lock(name, "the test")
            reused += (await acquired(store, name)).fencing_token <= token
    finally:
        await store.close()
    return Cuts(forgotten, reused)


async def power_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: int, *, alone: bool, damage: bool = False
) -> Cuts:
    """Cuts the power at random moments and, if asked, damages the log that is left."""
    disk = Disk()
    write_mark = mark.durably

    def recorded(fd: int, data: bytes) -> None:
        disk.record += [("write", "locks.db-mark", 0, data), ("sync", "locks.db-mark", 0, b"")]
        write_mark(fd, data)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(mark, "durably", recorded)
            begins = await fill(disk, tmp_path, alone=alone)
        monkeypatch.setattr(mark, "boot", lambda: b"after power cut.")
        chance = random.Random(5)
        forgotten = reused = 0
        for number in range(cuts):
            at = chance.randrange(begins, len(disk.record) + 1)
            told: dict[str, int] = {}
            for kind, name, token, _ in disk.record[:at]:
                if kind == "mark":
                    told[name] = max(token, told.get(name, 0))
            folder = tmp_path / f"cut-{number}"
            disk.after_power_cut(at, folder, chance)
            log = folder / "locks.db-wal"
            if damage and log.exists() and log.stat().st_size > file.LOG_HEADER_BYTES:
                log.write_bytes(damaged(log.read_bytes(), chance)[1])
            try:
                found = await granted_again(folder / "locks.db", told)
            except StoreError as error:
                # The power failed while the log was being copied, and the copy cannot be finished without the log.
                if not damage or "the file is damaged" not in str(error):
                    raise
                leave_the_mark_alone(folder)
                found = await granted_again(folder / "locks.db", told)
            forgotten += found.forgotten
            reused += found.reused
            shutil.rmtree(folder)
        return Cuts(forgotten, reused)
    finally:
        disk.unregister()


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes back into the file often, so that power fails then too."""
    monkeypatch.setattr(file, "LOG_PAGES", 20)


ALONE = pytest.mark.parametrize("alone", [True, False], ids=["one client", "a crowd"])


@pytest.mark.parametrize("known", [True, False], ids=["of a known lock", "of a new lock"])
@pytest.mark.parametrize("copier", [True, False], ids=["to copy the log", "to grant"])
async def test_a_grant_behind_a_sync_that_failed_behind_a_release_is_not_lost(
    tmp_path: Path, copier: bool, known: bool
) -> None:
    names = ("one", "two") if known else ("new", "newer")
    disk = Disk()
    try:
        store = SqliteStore(tmp_path / "locks.db", vfs=disk.name)
        await store.open()
        log = store._writer._log  # type: ignore[union-attr]
        for lease in [await acquired(store, name) for name in ("one", "two", "three")]:
            await store.submit([release_of(lease)])  # in the log, and unsynced
        await all_is_quiet(store)
        disk.sync_fails = True
        if copier:
            log._idle.clear()
            log._asked.put(log._starts)  # as when it has become long
            assert await asyncio.to_thread(log._idle.wait, 20)
        else:
            with pytest.raises(StoreError):
                await acquired(store, names[0])
        assert log.doubtful
        disk.sync_fails = False
        leases = []
        for name in names:
            await all_is_quiet(store)
            leases.append(await acquired(store, name))
        at = len(disk.record)
        await store.close()
        disk.after_power_cut(at, tmp_path / "cut", random.Random(5))
    finally:
        disk.unregister()
    kept = stored(tmp_path / "cut" / "locks.db")
    token = 2 if known else 1
    assert [kept.get(lease.lock_name) for lease in leases] == [(token, lease.lease_id) for lease in leases]


@ALONE
@pytest.mark.timeout(900)
async def test_a_power_cut_at_any_moment_forgets_no_grant(
    tmp_path: Path, small_log: None, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    assert await power_cuts(tmp_path, monkeypatch, count(40, 1000), alone=alone) == Cuts(0, 0)


@ALONE
@pytest.mark.timeout(600)
async def test_a_power_cut_that_also_damages_the_log_reuses_no_token(
    tmp_path: Path, small_log: None, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    found = await power_cuts(tmp_path, monkeypatch, count(20, 200), alone=alone, damage=True)
    assert found.forgotten > 0  # against an empty proof
    assert found.reused == 0


@ALONE
async def test_the_power_cut_does_forget_grants_when_commits_are_not_synced(
    tmp_path: Path, small_log: None, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(file, "SYNCHRONOUS", 1)  # NORMAL: what the store refuses to run with
    found = await power_cuts(tmp_path, monkeypatch, 40, alone=alone)
    assert found.forgotten > 0
    assert found.reused == 0
