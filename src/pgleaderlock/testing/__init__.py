"""For the tests of applications: an election and a lock without a database, with the real gate and a manual clock.

`FakeElection` and `FakeLock` are `LeaderElection` and `LeaderLock` on a database in memory: states, gates, epochs,
works and callbacks are the real ones. `pgleaderlock.testing.sync` has both for threads. The pytest plugin offers them
as fixtures, as well as real ones on an embedded PostgreSQL.

What it does not do: it runs no SQL, so a fence, a guard and the ledger's history need a real server.
"""

from pgleaderlock.testing.clock import ManualClock
from pgleaderlock.testing.database import FakeDatabase
from pgleaderlock.testing.fakes import FakeElection, FakeLock

__all__ = ["FakeDatabase", "FakeElection", "FakeLock", "ManualClock"]
