"""The SQLite store against a model of a page: random operations one after the other, on a disk that fails and is cut
from power. Nothing is granted twice, no token is reused, what was told is kept, and everybody is answered once."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import apsw
import pytest

from pgleaderlock.server.sqlite import file, writer
from pgleaderlock.server.sqlite.store import SqliteStore
from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    KeyReused,
    NotReleased,
    NotRenewed,
    Operation,
    Released,
    Renewed,
    StoreError,
)
from support.counts import count
from support.fakes import FakeClock
from support.stores import PATIENCE_S, all_is_quiet, release_of, renew_of
from support.torn_disk import Disk

STEPS = 150
CUTS = 6
NAMES = ["a", "b", "c"]


@dataclass
class Lease:
    granted: Granted
    ttl_s: float
    until: float


@dataclass
class Story:
    """One run: the store, and what it must be like."""

    folder: Path
    chance: random.Random
    clock: FakeClock = field(default_factory=FakeClock)
    disk: Disk = field(default_factory=Disk)
    leases: dict[str, Lease] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    """What each who asked was told: one thing."""

    async def tell(self) -> None:
        await self.open()
        begins = len(self.disk.record)
        for _ in range(STEPS):
            await self.step()
        self.disk.full = self.disk.sync_fails = False
        ends = len(self.disk.record)
        await self.store.close()
        for number in range(CUTS):
            self.cut_power(self.chance.randrange(begins, ends + 1), self.folder / f"cut-{number}")

    async def open(self) -> None:
        self.store = SqliteStore(self.folder / "locks.db", vfs=self.disk.name, clock=self.clock, free_kept_s=20)
        await self.store.open()

    async def step(self) -> None:
        self.disk.sync_fails = self.chance.random() < 0.08
        self.disk.full = self.chance.random() < 0.05
        if self.chance.random() < 0.9:
            await all_is_quiet(self.store)
        name = self.chance.choice(NAMES)
        what = self.chance.random()
        if what < 0.45:
            key = self.chance.choice([None, "key-1", "key-2"])
            await self.ask(Acquire(name, self.chance.choice("xy"), self.chance.choice([1_000, 5_000]), key))
        elif what < 0.90 and name in self.leases:
            granted = self.leases[name].granted
            renewal = renew_of(granted, self.chance.choice([1_000, 5_000]))
            await self.ask(renewal if what < 0.6 else release_of(granted))
        elif 0.90 <= what < 0.93:
            self.clock.advance(self.chance.choice([0.5, 2, 6, 30]))
        elif 0.93 <= what < 0.97:
            await self.look_after(name, what)
        elif what >= 0.97:
            await self.restart()

    async def look_after(self, name: str, what: float) -> None:
        try:
            if what < 0.95:
                await self.store.sweep()
            else:
                await self.store.break_lock(name, "the test")
                self.leases.pop(name, None)
        except StoreError:
            assert self.disk.full or self.disk.sync_fails

    async def restart(self) -> None:
        """Whoever held a lease holds it for its whole duration again; one that had expired may have been swept."""
        self.disk.full = self.disk.sync_fails = False
        await self.store.close()
        await self.open()
        for name, lease in list(self.leases.items()):
            kept = (await self.store.get(name)).lease_id == lease.granted.lease_id
            assert kept or lease.until <= self.clock.now(), "a good lease was lost"
            if kept:
                lease.until = self.clock.now() + lease.ttl_s
            else:
                del self.leases[name]

    async def ask(self, operation: Operation) -> None:
        try:
            (outcome,) = await asyncio.wait_for(self.store.submit((operation,)), PATIENCE_S)
        except StoreError:
            assert self.disk.full or self.disk.sync_fails
        else:
            self.check(operation, outcome)
        await self.check_counts()

    def check(self, operation: Operation, outcome: object) -> None:
        name = operation.lock_name
        lease = self.leases.get(name)
        good = lease is not None and lease.until > self.clock.now()
        match outcome:
            case Granted(replayed=True):
                assert good
                assert lease is not None
                assert outcome.lease_id == lease.granted.lease_id
            case Granted():
                assert not good, "two leases are good"
                assert isinstance(operation, Acquire)
                assert outcome.fencing_token > self.tokens.get(name, 0)
                self.tokens[name] = outcome.fencing_token
                ttl_s = operation.ttl_ms / 1000
                self.leases[name] = Lease(outcome, ttl_s, self.clock.now() + ttl_s)
                self.disk.mark(name, outcome.fencing_token)
            case Renewed():
                assert good
                assert lease is not None
                lease.ttl_s = operation.extend_by_ms / 1000  # type: ignore[union-attr]
                lease.until = self.clock.now() + lease.ttl_s
            case Released():
                assert good
                del self.leases[name]
            case Held():
                assert good
            case KeyReused("lock"):
                assert any(other != name and held.until > self.clock.now() for other, held in self.leases.items())
            case KeyReused():
                assert good
            case NotRenewed() | NotReleased():
                assert not good
            case _:
                raise AssertionError(outcome)

    async def check_counts(self) -> None:
        """What the store counts is what is in the file, and nothing is left half done."""
        await all_is_quiet(self.store)
        locks = self.store._locks
        counted = locks._connection.execute("SELECT count(*), count(owner_id) FROM locks").get
        assert counted == (locks.rows, locks.held)
        assert not locks.answers
        assert locks._connection.txn_state() == 0

    def cut_power(self, at: int, folder: Path) -> None:
        self.disk.after_power_cut(at, folder, self.chance)
        connection = apsw.Connection(str(folder / "locks.db"))
        kept: dict[str, int] = {}
        for table in ("SELECT lock_name, fencing_token FROM locks", "SELECT lock_name, last_token FROM tokens"):
            for name, token in connection.execute(table):
                kept[name] = max(token, kept.get(name, 0))
        connection.close(True)
        told = [entry for entry in self.disk.record[:at] if entry[0] == "mark"]
        for _, name, token, _ in told:
            assert kept.get(name, 0) >= token, "what was told is lost"


@pytest.mark.timeout(600)
def test_whatever_happens_the_store_is_as_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "LOG_PAGES", 30)  # so that the log is copied, and that fails, too
    monkeypatch.setattr(file, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(writer, "SLOW_S", float("inf"))
    stories = count(12, 300)
    for seed in range(stories):
        folder = tmp_path / str(seed)
        folder.mkdir()
        story = Story(folder, random.Random(seed))
        try:
            asyncio.run(story.tell())
        finally:
            story.disk.unregister()
