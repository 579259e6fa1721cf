"""What the SQLite store keeps when its process is killed and when the power fails: every grant that it told of."""

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

from pgleaderlock.server import _sqlite_file
from pgleaderlock.server.store import Acquire, Granted, StoreError
from pgleaderlock.server.store_sqlite import SqliteStore
from support.counts import count
from support.stores import acquired, all_is_quiet, release_of
from support.torn_disk import Disk

USER = Path(__file__).parent / "support" / "store_user.py"


def killed_hammer(path: Path, seed: int) -> list[dict[str, Any]]:
    """Runs a process that hammers the store, kills it at a random moment, and gives what it had been told."""
    with subprocess.Popen([sys.executable, str(USER), "hammer", str(path), str(seed)], stdout=subprocess.PIPE) as user:
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


@pytest.mark.timeout(600)
def test_a_kill_at_any_moment_loses_no_grant_reuses_no_token_and_grants_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    last: dict[str, dict[str, Any]] = {}
    releasing: set[tuple[str, int]] = set()
    grants = 0
    for seed in range(count(6, 100)):
        said = killed_hammer(path, seed)
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
        kept = stored(path)
        for name, line in last.items():
            token, lease = kept[name]
            assert token >= line["token"]
            if token == line["token"] and (name, token) not in releasing:
                assert lease == line["lease"]
    assert grants > 50


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
                lease = await store.wait(Acquire(name, f"owner-{number}", 30_000), 60_000)  # type: ignore[assignment]
            assert isinstance(lease, Granted)
            disk.mark(name, lease.fencing_token)
            await store.apply([release_of(lease)])

    await asyncio.gather(*(client(number) for number in range(1 if alone else 4)))
    ends = len(disk.record)
    await store.close()
    del disk.record[ends:]
    return begins


async def reused_after_power_cuts(tmp_path: Path, cuts: int, *, alone: bool) -> int:
    """How many tokens were given again, over so many power cuts at random moments."""
    disk = Disk()
    try:
        begins = await fill(disk, tmp_path, alone=alone)
        chance = random.Random(5)
        reused = 0
        for number in range(cuts):
            at = chance.randrange(begins, len(disk.record) + 1)
            told: dict[str, int] = {}
            for kind, name, token, _ in disk.record[:at]:
                if kind == "mark":
                    told[name] = max(token, told.get(name, 0))
            folder = tmp_path / f"cut-{number}"
            disk.after_power_cut(at, folder, chance)
            store = SqliteStore(folder / "locks.db")
            await store.open()
            for name, token in told.items():
                await store.break_lock(name, "the test")
                reused += (await acquired(store, name)).fencing_token <= token
            await store.close()
        return reused
    finally:
        disk.unregister()


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes back into the file often, so that power fails then too."""
    monkeypatch.setattr(_sqlite_file, "LOG_PAGES", 20)


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
            await store.apply([release_of(lease)])  # in the log, and unsynced
        await all_is_quiet(store)
        disk.sync_fails = True
        if copier:
            log._idle.clear()
            log._asked.put(True)  # as when it has become long
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
@pytest.mark.timeout(600)
async def test_a_power_cut_at_any_moment_reuses_no_token(tmp_path: Path, small_log: None, alone: bool) -> None:
    assert await reused_after_power_cuts(tmp_path, count(40, 1000), alone=alone) == 0


@ALONE
async def test_the_power_cut_does_reuse_tokens_when_commits_are_not_synced(
    tmp_path: Path, small_log: None, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(_sqlite_file, "SYNCHRONOUS", 1)  # NORMAL: what the store refuses to run with
    assert await reused_after_power_cuts(tmp_path, 40, alone=alone) > 0
