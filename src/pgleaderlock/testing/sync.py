"""`FakeElection` and `FakeLock` for threads: those of `pgleaderlock.testing`, driven on the background loop."""

from typing import cast

from pgleaderlock import sync, testing
from pgleaderlock.sync import background

__all__ = ["FakeElection", "FakeLock"]


class FakeElection(sync.LeaderElection):
    """A `pgleaderlock.sync.LeaderElection` without a database: see `pgleaderlock.testing.FakeElection`."""

    _aio = testing.FakeElection

    @property
    def fake(self) -> testing.FakeElection:
        """The same election for code on the background loop."""
        return cast("testing.FakeElection", self._election)

    def win(self, role: str | None = None) -> None:
        """Lead one role, or all of them with None. Returns when the gate is open."""
        background.call(lambda: self.fake.win(role))

    def lose(self, role: str | None = None) -> None:
        """Another node begins a term of one role, or of all with None."""
        background.call(lambda: self.fake.lose(role))

    def pause(self, seconds: float) -> None:
        """This process stands still for so long. Nothing is heard of the database until `recover`."""
        self.fake.pause(seconds)

    def late(self) -> None:
        """No heartbeat is acknowledged in time. See `recover`."""
        self.fake.late()

    def database_gone(self) -> None:
        """The database cannot be reached: every role is lost. See `recover`."""
        background.call(self.fake.database_gone)

    def recover(self) -> None:
        """The database answers again, and this election has heard from it."""
        background.call(self.fake.recover)

    def advance(self, seconds: float) -> None:
        """Let time pass while heartbeats come as they should."""
        background.call(lambda: self.fake.advance(seconds))


class FakeLock(sync.LeaderLock):
    """A `pgleaderlock.sync.LeaderLock` without a database: see `pgleaderlock.testing.FakeLock`."""

    _aio = testing.FakeLock

    @property
    def fake(self) -> testing.FakeLock:
        """The same lock for code on the background loop."""
        return cast("testing.FakeLock", self._lock)

    def win(self) -> None:
        """Lead: the other session gives the lock up."""
        background.call(self.fake.win)

    def lose(self) -> None:
        """The server ends this lock's session, and another one has the lock."""
        background.call(self.fake.lose)

    def pause(self, seconds: float) -> None:
        """This process stands still for so long. See `recover`."""
        self.fake.pause(seconds)

    def late(self) -> None:
        """No probe is answered for as long as an answer is trusted. See `recover`."""
        self.fake.late()

    def database_gone(self) -> None:
        """The database cannot be reached. See `recover`."""
        background.call(self.fake.database_gone)

    def recover(self) -> None:
        """The database answers again."""
        background.call(self.fake.recover)

    def advance(self, seconds: float) -> None:
        """Let time pass while probes are answered as they should."""
        background.call(lambda: self.fake.advance(seconds))
