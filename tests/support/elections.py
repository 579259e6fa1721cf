"""A database with a ledger, two roles to use it with, and notebooks for elections.

The database is one of its own in the server of this test process, so that tests which need one without a ledger find
it. Every test uses role names of its own. Imports pgleaderlock, psycopg and the standard library.
"""

import asyncio
import contextlib
import dataclasses
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from pgleaderlock import LeaderElection, LeaderStateChanged, LockState, key_pair
from pgleaderlock._config.timing import Timing
from pgleaderlock._election.settings import Setup
from pgleaderlock.migrate import migrate, sql
from support.server_side import holders
from support.servers import hash_quickly

__all__ = [
    "EVERYTHING",
    "HASTY",
    "KEY_COLUMNS",
    "PATIENT",
    "STEADY",
    "Story",
    "admin",
    "beat",
    "beat_turns",
    "beats_on",
    "end_leader",
    "end_session",
    "fresh_database",
    "holding",
    "last_session",
    "leader_row",
    "ledger_dsns",
    "one",
    "running",
    "somebody_acts",
    "terms",
    "until",
]

# A bound against hanging, never a measure.
WAIT_S = 60.0
POLL_S = 0.01
PLAIN_ROLE = "election_plain"
PASSWORD = "plain"

_QUICK: dict[str, Any] = {"heartbeat_interval_s": 0.1, "acquire_delay_s": (0.02, 0.05)}
STEADY: dict[str, Any] = {**_QUICK, "late_threshold_s": 5.0, "session_lease_s": 6.0}
"""Beats often, and is not impressed by a busy machine."""
PATIENT: dict[str, Any] = {**_QUICK, "late_threshold_s": 500.0, "session_lease_s": 600.0}
"""Whoever has to wait T here waits longer than the test: what opens has not waited."""
HASTY: dict[str, Any] = {**_QUICK, "late_threshold_s": 1.0, "session_lease_s": 1.5}
"""A T that a test can wait for."""


@functools.cache
def ledger_dsns(superuser_dsn: str) -> dict[str, str]:
    """The database with a ledger, made once a server: DSNs of its superuser and of a role with `grants.sql` alone."""
    database = "elections"
    with psycopg.connect(superuser_dsn, autocommit=True) as conn:
        hash_quickly(conn)
        conn.execute(f"CREATE DATABASE {database}")
        conn.execute(f"CREATE ROLE {PLAIN_ROLE} LOGIN PASSWORD '{PASSWORD}'")
        conn.execute(f"REVOKE ALL ON DATABASE {database} FROM PUBLIC")
        conn.execute(f"GRANT CONNECT ON DATABASE {database} TO {PLAIN_ROLE}")
    superuser = make_conninfo(superuser_dsn, dbname=database)
    _superusers[conninfo_to_dict(superuser)["port"]] = superuser
    asyncio.run(migrate(superuser, grant_to=PLAIN_ROLE))
    return {"superuser": superuser, "plain": make_conninfo(superuser, user=PLAIN_ROLE, password=PASSWORD)}


_superusers: dict[object, str] = {}
"""The superuser's DSN of each database with a ledger, by its port."""


def end_leader(dsn: str, role: str, namespace: str = "pgleaderlock") -> None:
    """End the session that leads a role, as the server does, or its lease, as another node does."""
    superuser = _superusers[conninfo_to_dict(dsn)["port"]]
    leader = one(
        superuser,
        "SELECT s.session_id FROM pgleaderlock.leaders l JOIN pgleaderlock.sessions s USING (session_id)"
        " WHERE l.role = %s AND l.namespace = %s",
        role,
        namespace,
    )
    end_session(superuser, leader["session_id"])


def end_session(superuser: str, session_id: int) -> None:
    """End a session, as the server does, or a lease, as another node does."""
    session = one(superuser, "SELECT hold, backend_pid FROM pgleaderlock.sessions WHERE session_id = %s", session_id)
    if session["hold"] == "session":
        one(superuser, "SELECT pg_terminate_backend(%s)", session["backend_pid"])
    else:
        ended = (
            "UPDATE pgleaderlock.sessions SET ended_at = clock_timestamp() WHERE session_id = %s RETURNING session_id"
        )
        one(superuser, ended, session_id)


def last_session(superuser: str, node_id: str, namespace: str = "pgleaderlock") -> int:
    """The session or lease that a node has opened last; it may have ended."""
    last = "SELECT max(session_id) AS id FROM pgleaderlock.sessions WHERE node_id = %s AND namespace = %s"
    return int(one(superuser, last, node_id, namespace)["id"])


def holding(dsn: str, role: str, namespace: str = "pgleaderlock") -> int:
    """How many nodes hold a role: sessions by its lock, and leases by the ledger.

    A lease that tries for a role takes the lock, too, for the length of its transaction: that is no holder.
    """
    superuser = _superusers[conninfo_to_dict(dsn)["port"]]
    by_hold = one(
        superuser,
        "SELECT coalesce(array_agg(backend_pid) FILTER (WHERE hold = 'session'), '{}') AS sessions,"
        " count(*) FILTER (WHERE hold = 'lease' AND ended_at IS NULL AND session_id IN"
        "   (SELECT session_id FROM pgleaderlock.leaders WHERE role = %s AND namespace = %s AND NOT ended)) AS leases"
        " FROM pgleaderlock.sessions",
        role,
        namespace,
    )
    by_lock = set(holders(superuser, key_pair(role, namespace))) & set(by_hold["sessions"])
    return int(by_hold["leases"]) + len(by_lock)


@contextlib.contextmanager
def fresh_database(superuser_dsn: str, *, ledger: bool = False) -> Iterator[str]:
    """A database that belongs to one test."""
    name = f"fresh_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(superuser_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
    dsn = make_conninfo(superuser_dsn, dbname=name)
    try:
        if ledger:
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(sql().encode())
        yield dsn
    finally:
        with psycopg.connect(superuser_dsn, autocommit=True) as conn:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextlib.contextmanager
def admin(dsn: str) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    """A superuser's look at the ledger, and hand in it."""
    with psycopg.connect(dsn, autocommit=True, application_name="pgleaderlock-test-look", row_factory=dict_row) as conn:
        yield conn


def one(dsn: str, query: str, *params: object) -> dict[str, Any]:
    """The one row of a query."""
    with admin(dsn) as conn:
        (row,) = conn.execute(query.encode(), params).fetchall()
    return row


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Poll for what nobody announces: a change in the server, or one that a thread makes."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    while not condition():
        assert loop.time() < deadline, f"did not happen in {WAIT_S:g} s: {what or condition}"
        await asyncio.sleep(POLL_S)


class Story:
    """What one election told its callbacks, in order: `("on_acquired", "billing")`."""

    def __init__(self, election: LeaderElection) -> None:
        self.election = election
        self.calls: list[tuple[Any, ...]] = []
        self.errors: list[Exception] = []
        self._grown = asyncio.Event()
        election.on_acquired(lambda role: self._note("on_acquired", role))
        election.on_released(lambda role: self._note("on_released", role))
        election.on_lost(lambda role: self._note("on_lost", role))
        election.on_state_change(lambda role, old, new: self._note("on_state_change", role, old, new))
        election.on_stopped(lambda: self._note("on_stopped"))
        election.on_error(self._error)

    @property
    def events(self) -> list[tuple[Any, ...]]:
        """The same without the changes of state."""
        return [call for call in self.calls if call[0] != "on_state_change"]

    def states(self, role: str) -> list[LockState]:
        return [call[3] for call in self.calls if call[:2] == ("on_state_change", role)]

    async def heard(self, *call: object, times: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            while sum(entry[: len(call)] == call for entry in self.calls) < times:
                self._grown.clear()
                await self._grown.wait()

    def _note(self, *call: object) -> None:
        self.calls.append(call)
        self._grown.set()

    def _error(self, error: Exception) -> None:
        self.errors.append(error)
        self._note("on_error")


class Changes:
    """Reads `changes()` of one election from now on."""

    def __init__(self, election: LeaderElection) -> None:
        self.seen: list[LeaderStateChanged] = []
        self._grown = asyncio.Event()
        self._task = asyncio.ensure_future(self._read(election))

    async def _read(self, election: LeaderElection) -> None:
        async for change in election.changes():
            self.seen.append(change)
            self._grown.set()

    async def until(self, condition: Callable[[LeaderStateChanged], bool]) -> LeaderStateChanged:
        async with asyncio.timeout(WAIT_S):
            while not (self.seen and condition(self.seen[-1])):
                self._grown.clear()
                await self._grown.wait()
        return self.seen[-1]

    async def ended(self) -> None:
        """Return when the iteration has ended by itself."""
        async with asyncio.timeout(WAIT_S):
            await self._task

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@contextlib.asynccontextmanager
async def reading(election: LeaderElection) -> AsyncIterator[Changes]:
    changes = Changes(election)
    await asyncio.sleep(0)  # now it listens
    try:
        yield changes
    finally:
        await changes.close()


async def somebody_acts(elections: Sequence[LeaderElection], role: str) -> LeaderElection:
    """The one whose gate opens first. There must be no second one."""
    waits = [asyncio.ensure_future(election.gate(role).wait_open(WAIT_S)) for election in elections]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    acting = [election for election in elections if election.gate(role).is_leader]
    assert len(acting) == 1, f"{len(acting)} gates are open"
    return acting[0]


async def opens(election: LeaderElection, role: str) -> None:
    assert await election.gate(role).wait_open(WAIT_S), f"the gate of {role} did not open"


async def bounded(work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await work


class SilentLeader:
    """A session that has won the role and recorded itself, and now sits in a transaction, where no lease ends it."""

    def __init__(self, dsn: str, role: str, lease_s: float) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True, application_name="pgleaderlock-test-silent")
        keys = key_pair(role)
        row = self.conn.execute(
            "SELECT session_id FROM pgleaderlock.open_session('pgleaderlock', gen_random_uuid(), 'silent', 'h', 1,"
            " 'silent-h-1', %s, %s, true, 'test',"
            " (SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid())))",
            (lease_s / 2, lease_s),
        ).fetchone()
        assert row is not None
        self.session_id: int = row[0]
        self.conn.execute("SELECT pg_advisory_lock(%s, %s)", keys)
        won = self.conn.execute(
            "SELECT outcome FROM pgleaderlock.bump(%s, ARRAY[%s], ARRAY[%s], ARRAY[%s], 0, 'pgleaderlock')",
            (self.session_id, role, *keys),
        ).fetchone()
        assert won == ("won",)
        self.conn.execute("BEGIN")
        self.conn.execute("SELECT 1")


# Every variable of the environment that `LeaderElection.from_env` reads.
EVERYTHING = {
    "PG_CONN_STRING": "postgresql://app@db.example/app",
    "HEARTBEAT_INTERVAL_MS": "2000",
    "HEARTBEAT_LATE_THRESHOLD_MS": "5000",
    "ACQUIRE_BACKOFF_MS_MIN": "100",
    "ACQUIRE_BACKOFF_MS_MAX": "300",
    "EPOCH_STALE_THRESHOLD_MS": "9000",
    "PG_LISTEN_CHANNEL": "msp_leader_change",
    "MSP_LEADER_ENABLED": "true",
    "LEADER_HOLD": "lease",
    "LEADER_LOCK_KEY": "-9223372036854775808",
    "PGLEADERLOCK_NAMESPACE": "shop",
}


KEY_COLUMNS = "l.namespace = 'pgleaderlock' AND l.role = %s"


@contextlib.asynccontextmanager
async def running(*elections: LeaderElection) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for election in elections:
            await stack.enter_async_context(election)
        yield


def leader_row(superuser: str, role: str) -> dict[str, Any]:
    return one(superuser, f"SELECT * FROM pgleaderlock.leaders l WHERE {KEY_COLUMNS}", role)


def terms(superuser: str, role: str) -> list[dict[str, Any]]:
    with admin(superuser) as conn:
        return conn.execute("SELECT * FROM pgleaderlock.terms WHERE role = %s ORDER BY epoch", (role,)).fetchall()


def beat(superuser: str, role: str) -> int:
    found = one(
        superuser,
        f"SELECT beat FROM pgleaderlock.leaders l JOIN pgleaderlock.sessions USING (session_id) WHERE {KEY_COLUMNS}",
        role,
    )
    return int(found["beat"])


async def beats_on(superuser: str, role: str, beats: int = 2) -> None:
    """Return once the leader has been heard again."""
    before = beat(superuser, role)
    await until(lambda: beat(superuser, role) >= before + beats, "the leader's heartbeat")


async def beat_turns(election: LeaderElection, role: str) -> None:
    """Let the engine take a few turns: for claims that something does NOT happen in them."""
    deadline = election.gate(role).deadline
    await until(lambda: election.gate(role).deadline > deadline or election.gate(role).token is None)


def timing_of(setup: Setup) -> Timing:
    """The part of an election's settings that is its timing."""
    return Timing(*(getattr(setup, field.name) for field in dataclasses.fields(Timing)))
