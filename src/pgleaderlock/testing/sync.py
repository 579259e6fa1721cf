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
        """This process is paused for this long. The database does not answer until `recover`."""
        self.fake.pause(seconds)

    def late(self) -> None:
        """No heartbeat is acknowledged in time. See `recover`."""
        self.fake.late()

    def database_gone(self) -> None:
        """The database cannot be reached: every role is lost. See `recover`."""
        background.call(self.fake.database_gone)

    def recover(self) -> None:
        """The database answers again. Returns once this election has an answer."""
        background.call(self.fake.recover)

    def advance(self, seconds: float) -> None:
        """Let time pass, with heartbeats acknowledged on time."""
        background.call(lambda: self.fake.advance(seconds))


class FakeLock(sync.LeaderLock):
    """A `pgleaderlock.sync.LeaderLock` without a database: see `pgleaderlock.testing.FakeLock`."""

    _aio = testing.FakeLock

    @property
    def fake(self) -> testing.FakeLock:
        """The same lock for code on the background loop."""
        return cast("testing.FakeLock", self._lock)

    def win(self) -> None:
        """Lead: the other session releases the lock."""
        background.call(self.fake.win)

    def lose(self) -> None:
        """The server ends this lock's session, and another one takes the lock."""
        background.call(self.fake.lose)

    def pause(self, seconds: float) -> None:
        """This process is paused for this long. See `recover`."""
        self.fake.pause(seconds)

    def late(self) -> None:
        """No probe is answered within the trust window. See `recover`."""
        self.fake.late()

    def database_gone(self) -> None:
        """The database cannot be reached. See `recover`."""
        background.call(self.fake.database_gone)

    def recover(self) -> None:
        """The database answers again."""
        background.call(self.fake.recover)

    def advance(self, seconds: float) -> None:
        """Let time pass, with probes answered on time."""
        background.call(lambda: self.fake.advance(seconds))
