"""A database with a ledger, leaders made of the ledger's own functions, and a role with run-time rights only.

No election is needed to prove the fence: a leader is a session that holds the lock and has bumped. Imports psycopg,
`migrate`, `keys`, `models` and the standard library.
"""

import asyncio
import contextlib
import functools
import secrets
import time
import uuid
from collections.abc import Iterator
from typing import Any, Self

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier, Literal

from pgleaderlock.keys import DEFAULT_NAMESPACE, key_pair
from pgleaderlock.migrate import migrate
from pgleaderlock.models import LeaderToken

__all__ = ["Leader", "database", "ledger_database", "ledger_template", "plain_role", "take_out", "until_waiting"]

WAIT_S = 20.0
POLL_S = 0.02


def _admin(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, application_name="pgleaderlock-test-look")


@contextlib.contextmanager
def database(dsn: str, template: str = "template1") -> Iterator[str]:
    """An empty database of the test's own. Whoever leaves a session in it fails when it is dropped."""
    name = Identifier(f"fencing_{secrets.token_hex(6)}")
    with _admin(dsn) as admin:
        admin.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(name, Identifier(template)))
    try:
        yield make_conninfo(dsn, dbname=name.as_string(None).strip('"'))
    finally:
        deadline = time.monotonic() + WAIT_S
        with _admin(dsn) as admin:
            while True:  # a server notices a closed connection a moment later, unannounced
                try:
                    admin.execute(SQL("DROP DATABASE {}").format(name))
                    break
                except psycopg.errors.ObjectInUse:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(POLL_S)


@contextlib.contextmanager
def ledger_database(dsn: str) -> Iterator[str]:
    """The same with a ledger in it."""
    with database(dsn, ledger_template(dsn)) as own:
        yield own


@functools.cache
def ledger_template(dsn: str) -> str:
    """The name of a database with a ledger, made once per server: to copy it is quicker than to migrate again."""
    name = "ledger_template"
    with _admin(dsn) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    asyncio.run(migrate(make_conninfo(dsn, dbname=name)))
    with _admin(dsn) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    return name


def take_out(dsn: str, function: str, text: str) -> None:
    """Break a function of the ledger in this database: whatever relies on it must be seen to fail."""
    with _admin(dsn) as admin:
        row = admin.execute("SELECT pg_get_functiondef(to_regproc(%s))", (f"pgleaderlock.{function}",)).fetchone()
        assert row is not None
        assert row[0].count(text) == 1
        admin.execute(row[0].replace(text, "").encode())


@contextlib.contextmanager
def plain_role(dsn: str, name: str | None = None) -> Iterator[str]:
    """A role that may log in and nothing else; gives the DSN with it. Dropped with what it owns in this database."""
    role, password = Identifier(name or f"plain_{secrets.token_hex(6)}"), secrets.token_hex(8)
    with _admin(dsn) as admin:
        admin.execute(SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, Literal(password)))
    try:
        yield make_conninfo(dsn, user=role.as_string(None)[1:-1].replace('""', '"'), password=password)
    finally:
        with _admin(dsn) as admin:
            admin.execute(SQL("DROP OWNED BY {}").format(role))
            admin.execute(SQL("DROP ROLE {}").format(role))


class Leader:
    """A session of the ledger that takes locks and bumps, statement by statement. Use as a context manager."""

    def __init__(self, dsn: str, role: str, *, namespace: str = DEFAULT_NAMESPACE, node: str = "node") -> None:
        self.role, self.namespace = role, namespace
        self.keys = key_pair(role, namespace)
        self.instance = uuid.uuid4()
        self.holder = f"{node}-host-1-{self.instance}"
        self.conn: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True, application_name=f"leader {node}")
        try:
            self.session_id = self.one(
                "SELECT session_id FROM pgleaderlock.open_session(%s, %s, %s, 'host', 1, %s, 2, 3, true, 'test')",
                namespace,
                self.instance,
                node,
                self.holder,
            )
        except psycopg.Error:
            self.conn.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.conn.close()

    def one(self, sql: str, *params: object) -> Any:
        """The first column of the only row."""
        row = self.conn.execute(sql.encode(), params).fetchone()
        assert row is not None
        return row[0]

    def lock(self) -> None:
        self.conn.execute("SELECT pg_advisory_lock(%s, %s)", self.keys)

    def unlock(self) -> None:
        self.conn.execute("SELECT pg_advisory_unlock(%s, %s)", self.keys)

    def bumped(self, *, wait_ms: int = 0) -> tuple[str, int | None]:
        """Outcome and epoch of one bump, the lock being held or not."""
        row = self.conn.execute(
            "SELECT outcome, epoch FROM pgleaderlock.bump(%s, %s, %s, %s, %s, 'test')",
            (self.session_id, [self.role], [self.keys[0]], [self.keys[1]], wait_ms),
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    def win(self, *, wait_ms: int = 5000) -> LeaderToken:
        """Take the lock if need be, and begin a term."""
        if not self.one("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')"):
            self.lock()
        outcome, epoch = self.bumped(wait_ms=wait_ms)
        assert outcome == "won", outcome
        assert epoch is not None
        return self.token(epoch)

    def token(self, epoch: int) -> LeaderToken:
        return LeaderToken(self.role, epoch, self.holder, self.namespace)

    def settle(self) -> None:
        """A heartbeat that says that the predecessor has been waited out: it changes the role's row."""
        self.conn.execute("SELECT * FROM pgleaderlock.beat(%s, %s)", (self.session_id, [self.role]))


async def until_waiting(dsn: str, sessions: int = 1) -> None:
    """Poll until so many sessions wait for an advisory lock of this database: nothing announces that."""
    deadline = time.monotonic() + WAIT_S
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as look:
        while True:
            row = await (
                await look.execute(
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
            ).fetchone()
            assert row is not None
            if row[0] >= sessions:
                return
            assert time.monotonic() < deadline, f"{row[0]} sessions wait, not {sessions}"
            await asyncio.sleep(POLL_S)
