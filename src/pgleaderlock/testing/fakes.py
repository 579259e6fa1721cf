"""`LeaderElection` and `LeaderLock` on a database in memory, with methods for what a test wants to happen.

Such a method returns once its effect has happened: `win` when this node may act, `lose` when it must no longer act. It
moves the clock as far as needed; otherwise only `advance`, `pause` and `late` move it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

from pgleaderlock._base.clock import Clock
from pgleaderlock._election.ledger import Identity, Ledger
from pgleaderlock._election.settings import Setup
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock._pg.session import Session
from pgleaderlock.election import ElectionOptions, LeaderElection
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import KeyPair
from pgleaderlock.lock import LeaderLock, LockOptions
from pgleaderlock.models import LockState
from pgleaderlock.testing.clock import ManualClock
from pgleaderlock.testing.database import FakeDatabase, FakeLedger, FakeSession

__all__ = ["FakeElection", "FakeLock"]

NO_DSN = "host=in-memory"
REAL_POLL_S = 0.01
# After this many iterations of the loop without an effect, let time pass on the clock.
TURNS = 50
STEPS_MAX = 1_000
# Settings for the connection and the heartbeat thread, which a fake accepts and ignores.
IGNORED = frozenset({"allow_pooler", "connect_fn", "heartbeat_thread", "listen_channel"})


class FakeElection(LeaderElection):
    """A `LeaderElection` without a database. It takes the same arguments, and never connects to the DSN.

    Alone on its database, it follows another node that leads every role until `win`. Elections that share a
    `FakeDatabase` in place of a DSN compete with each other, and the first one wins.
    """

    def __init__(
        self,
        dsn: Dsn | FakeDatabase,
        roles: str | Iterable[str] | Mapping[str, int],
        **options: Unpack[ElectionOptions],
    ) -> None:
        """Check the settings, as the real one does. `balance` is refused; settings of the connection have no effect."""
        if options.get("balance"):
            raise ConfigurationError("balance needs a ledger: leave it out in a fake")
        self.database = _database(dsn)
        self._clock = self.database.clock
        settings: dict[str, Any] = {"node_id": f"node-{next(self.database.pids)}", **_needed(options)}
        super().__init__(NO_DSN if isinstance(dsn, FakeDatabase) else dsn, roles, listen_channel=None, **settings)
        self.database.listen(self._wake)

    async def win(self, role: str | None = None) -> None:
        """Lead one role, or all of them with None: the other node releases it. Returns when the gate is open.

        The epoch is one higher than the last one. Does nothing to a role that this election leads.
        """
        self._find_running()
        self.database.answer()
        names = self._named(role)
        for name in names:
            self.database.rival_leaves(*self._of(name))
        self._wake("released")
        await _until(self._clock, lambda: all(self.gate(name).is_leader for name in names), "win", self._refusals)

    async def lose(self, role: str | None = None) -> None:
        """Another node begins a term of one role, or of all with None. Returns when this node has lost it."""
        self._find_running()
        self.database.answer()
        names = self._named(role)
        for name in names:
            self.database.rival_takes(*self._of(name))
        self._wake("requested")
        await _until(self._clock, lambda: all(self.gate(name).token is None for name in names), "lose", self._refusals)

    def pause(self, seconds: float) -> None:
        """This process is paused for this long, as in a suspend: the gates can be asked before the heartbeat has run.

        The database does not answer until `recover`. After more than T, another node leads by then.
        """
        clock = _manual(self._clock)
        self.database.stall()
        clock.jump(seconds)

    def late(self) -> None:
        """No heartbeat is acknowledged in time: every gate shuts, but every term goes on. See `recover`."""
        deadlines = [gate.deadline for gate in map(self.gate, self.roles) if gate.token is not None]
        self.pause(0)
        _manual(self._clock).jump_to(max(deadlines, default=0.0))

    async def database_gone(self) -> None:
        """The database cannot be reached: every session on it ends, every role is lost. See `recover`."""
        self.database.go()
        await _until(self._clock, lambda: self.heartbeat_age_s() is None, "database_gone", self._refusals)

    async def recover(self) -> None:
        """End a `pause`, `late` or `database_gone`: the database answers again. Returns once this election has an
        answer.

        A term that is not over goes on, and its gate is open again. For a lost role the election competes: see `win`.
        """
        since = self._clock.now()
        self.database.answer()
        if isinstance(self._clock, ManualClock):
            self._clock.wake()
        self._wake("requested")
        if self._run.running:
            await _until(self._clock, lambda: self._heard_since(since), "recover", self._refusals)

    async def advance(self, seconds: float) -> None:
        """Let time pass, with heartbeats acknowledged on time."""
        await _advance(_manual(self._clock), seconds, self._setup.heartbeat_interval_s / 4)

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Like the real one. A stalled database answers again, because the shutdown would wait for it."""
        self.database.unstall()
        await super().shutdown(timeout_s)

    # --- Inside

    async def _open_ledger(self, setup: Setup, identity: Identity, _previous: int | None) -> Ledger:
        return FakeLedger(await FakeSession.open(self.database, setup.lease_s), identity)

    def _wake(self, hint: str) -> None:
        if (engine := self._run.engine) is not None:
            engine.wake(hint)

    def _named(self, role: str | None) -> tuple[str, ...]:
        return self.roles if role is None else (self.gate(role).role,)

    def _of(self, name: str) -> tuple[KeyPair, tuple[str, str]]:
        return self._setup.keys[name], (self._setup.namespace, name)

    def _heard_since(self, since: float) -> bool:
        engine = self._run.engine
        return engine is None or (engine.acked_at is not None and engine.acked_at >= since)

    def _find_running(self) -> None:
        if not self._run.running:
            raise ConfigurationError("the election is not running: use `async with election:` first")

    def _refusals(self) -> str:
        return ", ".join(f"{name}: {self.gate(name).shut_because or 'open'}" for name in self.roles)


class FakeLock(LeaderLock):
    """A `LeaderLock` without a database. It takes the same arguments, and never connects to the DSN.

    Alone on its database, it follows another session that holds the lock until `win`. Locks that share a
    `FakeDatabase` in place of a DSN compete with each other.
    """

    def __init__(self, dsn: Dsn | FakeDatabase | None, key1: int, key2: int, **options: Unpack[LockOptions]) -> None:
        """Check the settings, as the real one does. Settings of the connection have no effect."""
        self.database = _database(dsn)
        self._clock = self.database.clock
        own = NO_DSN if dsn is None or isinstance(dsn, FakeDatabase) else dsn
        super().__init__(own, key1, key2, **_needed(options))

    async def win(self) -> None:
        """Lead: the other session releases the lock. Returns when this lock leads."""
        self._find_running()
        self.database.answer()
        self.database.rival_leaves(self._settings.keys)
        await _until(self._clock, lambda: self.is_leader, "win", self._said)

    async def lose(self) -> None:
        """The server ends this lock's session, and another one takes the lock. Returns when this lock has noticed."""
        self._find_running()
        self.database.answer()
        holder = self.database.locks.get(self._settings.keys)
        self.database.rival_takes(self._settings.keys)
        if holder is not None and holder is not self.database.rival:
            holder.end("terminating connection due to administrator command")
        await _until(self._clock, lambda: self.state is not LockState.LEADER, "lose", self._said)

    def pause(self, seconds: float) -> None:
        """This process is paused for this long: `is_leader` can be asked before the next probe. See `recover`."""
        clock = _manual(self._clock)
        self.database.stall()
        clock.jump(seconds)

    def late(self) -> None:
        """No probe is answered within the trust window, so this lock must not act. See `recover`."""
        self.pause(0)
        if self._run is not None:
            _manual(self._clock).jump_to(self._run.trusted_until)

    async def database_gone(self) -> None:
        """The database cannot be reached: every session on it ends. See `recover`."""
        self.database.go()
        await _until(self._clock, lambda: self.state is not LockState.LEADER, "database_gone", self._said)

    async def recover(self) -> None:
        """End a `pause`, `late` or `database_gone`: the database answers again. Leads on, unless the lock was lost."""
        self.database.answer()
        if isinstance(self._clock, ManualClock):
            self._clock.wake()
        await _until(self._clock, lambda: self.is_leader or self.state is not LockState.LEADER, "recover", self._said)

    async def advance(self, seconds: float) -> None:
        """Let time pass, with probes answered on time."""
        await _advance(_manual(self._clock), seconds, self._settings.health_interval_s / 4)

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Like the real one. A stalled database answers again, because the shutdown would wait for it."""
        self.database.unstall()
        await super().shutdown(timeout_s)

    async def _connect(self) -> Session:
        return await FakeSession.open(self.database, self._timing.lease_s)

    def _find_running(self) -> None:
        if self.state is LockState.STOPPED:
            raise ConfigurationError("the lock is not running: use `async with lock:` first")

    def _said(self) -> str:
        return str(self.state)


def _database(dsn: object) -> FakeDatabase:
    return dsn if isinstance(dsn, FakeDatabase) else FakeDatabase(rival=True)


def _needed(options: Any) -> Any:
    return {name: value for name, value in options.items() if name not in IGNORED}


def _manual(clock: Clock) -> ManualClock:
    if not isinstance(clock, ManualClock):
        raise ConfigurationError("this turns the clock: give the FakeDatabase no clock, or a ManualClock")
    return clock


async def _advance(clock: ManualClock, seconds: float, step_s: float) -> None:
    """Advance in steps, each with time for the tasks that are due, so that heartbeats are sent before a gate shuts."""
    until = clock.now() + seconds
    while (left_s := until - clock.now()) > 0:
        clock.advance(min(left_s, max(step_s, clock.next_s() or 0.0)))
        for _ in range(TURNS):
            await asyncio.sleep(0)


async def _until(clock: Clock, condition: Callable[[], bool], what: str, state: Callable[[], str]) -> None:
    """Run the loop until the condition holds; if that changes nothing, advance the clock to the next due time."""
    for _ in range(STEPS_MAX):
        for _ in range(TURNS):
            if condition():
                return
            await asyncio.sleep(0)
        if isinstance(clock, ManualClock):
            clock.advance(clock.next_s() or 0.0)
        else:
            await asyncio.sleep(REAL_POLL_S)
    raise AssertionError(f"{what} did not happen ({state()}): drained, disabled, or held by another election?")
