"""Taking over from the Go LockServer: its tokens go on rising, its leases go on."""

import contextlib
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pgleaderlock.server.sqlite.original import read_original
from pgleaderlock.server.store import Adopted, Release, Released, Renew, Renewed, StoreError
from support.lockserver import acquire, lock_server
from support.program import running
from support.stores import OWNED, Place, acquired, held

# As its design describes it.
SCHEMA = """
CREATE TABLE locks (lock_name TEXT PRIMARY KEY, owner_id TEXT, lease_id TEXT, fencing_token INTEGER,
                    lease_expiry_ns INTEGER, version INTEGER);
CREATE TABLE tokens (lock_name TEXT PRIMARY KEY, last_token INTEGER NOT NULL);
"""
HOUR_NS = 3_600_000_000_000


@contextlib.contextmanager
def original(path: Path) -> Iterator[sqlite3.Connection]:
    """Its database, open as its server has it."""
    connection = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(SCHEMA)
        now_ns = time.time_ns()
        rows = [
            ("held", "w1", "lease-1", 7, now_ns + HOUR_NS, 9),
            ("expired", "w2", "lease-2", 4, now_ns - 1, 5),
            ("free", None, None, 3, None, 6),
        ]
        connection.executemany("INSERT INTO locks VALUES (?, ?, ?, ?, ?, ?)", rows)
        tokens = [("held", 7), ("expired", 4), ("free", 5), ("swept", 41)]
        connection.executemany("INSERT INTO tokens VALUES (?, ?)", tokens)
        yield connection


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    with original(tmp_path / "lockserver.db"):
        pass
    return tmp_path / "lockserver.db"


def test_every_lock_and_every_token_is_read(stopped: Path) -> None:
    found = {lock.lock_name: lock for lock in read_original(stopped)}
    left_ms = found["held"].remaining_ms
    assert found == {
        "held": Adopted("held", 7, 9, "w1", "lease-1", left_ms),
        "expired": Adopted("expired", 4, 5),
        "free": Adopted("free", 5, 6),
        "swept": Adopted("swept", 41, 0),
    }
    assert 3_000_000 < left_ms <= 3_600_000


USER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT count(*) FROM locks").fetchall()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_database_that_is_in_use_is_refused(stopped: Path) -> None:
    # Another process: locks of the operating system do not keep a process from itself.
    command = [sys.executable, "-c", USER, str(stopped)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match="stop the server"):
            read_original(stopped)
        user.communicate("")
    assert read_original(stopped)


KILLED = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("INSERT INTO tokens VALUES ('last', 77)")
os._exit(0)
"""


def killed(path: Path) -> None:
    """A server has written to the log of this database and was killed."""
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=True)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("lockserver.db*")}


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize("with_index", [False, True])
def test_the_log_of_a_killed_server_is_read_and_neither_file_is_changed(
    tmp_path: Path, stopped: Path, through_link: bool, with_index: bool
) -> None:
    killed(stopped)
    if not with_index:
        (tmp_path / "lockserver.db-shm").unlink()
    before = contents(tmp_path)
    assert {"lockserver.db", "lockserver.db-wal"} <= before.keys()
    link = tmp_path / "link.db"
    link.symlink_to(stopped)
    assert Adopted("last", 77, 0) in read_original(link if through_link else stopped)
    assert contents(tmp_path) == before


def test_a_database_that_was_closed_in_order_gets_no_log(tmp_path: Path, stopped: Path) -> None:
    before = contents(tmp_path)
    assert before.keys() == {"lockserver.db"}
    assert read_original(stopped)
    assert contents(tmp_path) == before


@contextlib.contextmanager
def plain_user() -> Iterator[None]:
    """This process as a user whom permissions bind, also if it is root's."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.parametrize("read_only", ["folder", "file"])
def test_a_database_where_nothing_can_be_written_is_refused_with_the_remedy(stopped: Path, read_only: str) -> None:
    # A plain user cannot enter root's tmp_path.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = Path(shutil.copy(stopped, folder))
        file.chmod(0o444 if read_only == "file" else 0o666)
        folder.chmod(0o555 if read_only == "folder" else 0o777)
        try:
            with plain_user(), pytest.raises(StoreError, match="copy the file, and its -wal"):
                read_original(file)
        finally:
            folder.chmod(0o700)


def test_a_file_that_is_no_such_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        read_original(tmp_path / "missing.db")
    (tmp_path / "text").write_text("no database at all, but long enough to be read as one" * 100)
    with pytest.raises(StoreError, match="cannot be read"):
        read_original(tmp_path / "text")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE locks (name TEXT)").connection.close()
    with pytest.raises(StoreError, match="not the database"):
        read_original(tmp_path / "other.db")


def test_a_row_with_a_token_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with original(tmp_path / "lockserver.db") as connection:
        connection.execute("UPDATE tokens SET last_token = 'many' WHERE lock_name = 'swept'")
    with pytest.raises(StoreError, match="nothing was taken over"):
        read_original(tmp_path / "lockserver.db")


# --- The stores


@pytest.fixture(params=sorted(OWNED))
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with OWNED[request.param](request)() as opened:
        yield opened


FOUND = [Adopted("held", 7, 9, "w1", "lease-1", 60_000), Adopted("free", 5, 6)]


async def test_tokens_go_on_rising(place: Place) -> None:
    assert await place.store.adopt(FOUND) == 2
    assert (await acquired(place.store, "free")).fencing_token == 6
    await place.pass_ms(90_000)
    assert (await acquired(place.store, "held")).fencing_token == 8


async def test_a_lease_goes_on_for_the_time_that_was_left(place: Place) -> None:
    await place.store.adopt(FOUND)
    assert 0 < (await held(place.store, "held")).remaining_ms <= 60_000
    renewed, released = await place.store.submit(
        [Renew("held", "w1", "lease-1", 7, 30_000), Release("held", "w1", "lease-1", 7)]
    )
    assert (type(renewed), released) == (Renewed, Released())
    assert (await acquired(place.store, "held")).fencing_token == 8


async def test_what_was_taken_over_once_is_not_taken_over_again(place: Place) -> None:
    await place.store.adopt(FOUND)
    await place.store.submit([Release("held", "w1", "lease-1", 7)])
    await place.reopen()
    assert await place.store.adopt(FOUND) == 0
    seen = await place.store.get("held")
    assert (seen.held, seen.fencing_token) == (False, 7)


async def test_a_token_that_is_known_here_is_never_lowered(place: Place) -> None:
    for _ in range(9):
        lease = await acquired(place.store, "free")
        await place.store.submit([Release("free", "alice", lease.lease_id, lease.fencing_token)])
    assert await place.store.adopt(FOUND) == 1
    assert (await acquired(place.store, "free")).fencing_token == 10


async def test_a_lock_that_was_free_here_takes_over_token_and_lease(place: Place) -> None:
    lease = await acquired(place.store, "held")
    await place.store.submit([Release("held", "alice", lease.lease_id, lease.fencing_token)])
    await place.store.adopt(FOUND)
    outcomes = await place.store.submit([Renew("held", "w1", "lease-1", 7, 30_000)])
    assert isinstance(outcomes[0], Renewed)
    assert (await place.store.sweep()).held == 1


# --- The program


def test_serve_takes_over_before_it_serves(tmp_path: Path, stopped: Path) -> None:
    with lock_server(tmp_path, "--import-go", str(stopped)) as server:
        assert acquire(server, "held").json()["current_owner_id"] == "w1"
        assert acquire(server, "swept").json()["fencing_token"] == 42
        server.program.until("taken_over")


def test_serve_does_not_start_without_what_it_is_to_take_over(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/locks.db"
    with running("serve", "--port", "0", "--store", store, "--import-go", str(tmp_path / "no.db")) as program:
        assert program.end() == 2
        assert "no such file" in program.err
