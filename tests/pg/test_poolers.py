"""Which poolers are accepted or recognised by their words, and what the sessions of others look like after us.

PgBouncer is real. Of the others there is only what they answer to a client at its start, said by a stand-in.
"""

import asyncio
import contextlib
import itertools
import struct
import threading
import uuid
from collections.abc import Iterator
from socket import create_server
from typing import Any

import psycopg
import pytest

from conftest import StartPooler
from pgleaderlock import (
    FixedInterval,
    LeaderElection,
    LeaderLock,
    UnsafeSessionError,
    acquire_leadership,
)
from pgleaderlock._pg.explain import connect_error, hopeless
from pgleaderlock.errors import DatabaseError
from support.elections import STEADY, fresh_database, until
from support.fakes import captured_log
from support.pgbouncer import PoolMode
from support.program import command
from support.recorder import WAIT_S, Recorder

SESSIONS = 3
IGNORED = {"ignore_startup_parameters": "options,extra_float_digits"}
# The look takes so long that all of them are under way at once, each on a session of its own.
LOOK = """
SELECT pg_backend_pid(), array_agg(found ORDER BY found), pg_sleep(0.3) FROM (
    SELECT name || '=' || setting AS found FROM pg_settings
     WHERE name ~ 'timeout$|^default_transaction|^tcp_|^client_(min|conn|enc)|^search_path$|^synchronous_commit$'
    UNION ALL SELECT 'prepared ' || name FROM pg_prepared_statements
    UNION ALL SELECT 'listens ' || channel FROM pg_listening_channels() channel
    UNION ALL SELECT name || '=' || current_setting('pgleaderlock.' || name, true)
                FROM (VALUES ('mark'), ('session'), ('granted')) ours (name)
               WHERE current_setting('pgleaderlock.' || name, true) <> ''
    UNION ALL SELECT 'lock ' || objid FROM pg_locks WHERE locktype = 'advisory'
) everything
"""


async def seen_by_others(through: str) -> set[str]:
    """What the next clients of the pool find on its sessions, on all of them."""

    async def look() -> tuple[int, list[str]]:
        async with await psycopg.AsyncConnection.connect(through, autocommit=True, prepare_threshold=None) as conn:
            row = await (await conn.execute(LOOK)).fetchone()
            assert row is not None
            return row[0], row[1]

    async with asyncio.timeout(WAIT_S):
        while True:
            looks = await asyncio.gather(*(look() for _ in range(SESSIONS)))
            if len({pid for pid, _ in looks}) == SESSIONS:
                return set(itertools.chain.from_iterable(found for _, found in looks))


@pytest.mark.parametrize("pool_mode", ["session", "transaction", "statement"])
@pytest.mark.parametrize("allow_pooler", [True, False], ids=["allowed", "not allowed"])
@pytest.mark.parametrize("options", ["ignored", "refused"])
async def test_only_an_allowed_pool_in_session_mode_is_accepted_and_none_keeps_anything_of_ours(
    dsn: str, pgbouncer: StartPooler, pool_mode: PoolMode, allow_pooler: bool, options: str
) -> None:
    accepted = pool_mode == "session" and allow_pooler
    name = f"poolers-{uuid.uuid4()}"
    with fresh_database(dsn, ledger=True) as own, captured_log() as records:
        through = pgbouncer(
            own, pool_mode, default_pool_size=str(SESSIONS), **(IGNORED if options == "ignored" else {})
        )
        before = await seen_by_others(through)

        lock = LeaderLock.for_name(through, name, allow_pooler=allow_pooler, retry_strategy=FixedInterval(600))
        story = Recorder(lock)
        async with lock:
            await story.heard("acquired" if accepted else "error")
        assert [getattr(error, "reason", error) for error in story.errors] == ([] if accepted else ["pooler"])

        async with await psycopg.AsyncConnection.connect(through, autocommit=True) as conn:
            with contextlib.nullcontext() if accepted else pytest.raises(DatabaseError, match="pooler"):
                async with await acquire_leadership(conn, name, allow_pooler=allow_pooler) as guard:
                    assert await guard.check()

        async with LeaderElection(through, name, allow_pooler=allow_pooler, **STEADY) as election:
            if accepted:
                await until(lambda: election.gate(name).is_leader)
            else:
                await until(lambda: isinstance(election.last_error, UnsafeSessionError))
                await until(lambda: any(record.getMessage().startswith("listen_") for record in records))
        assert await seen_by_others(through) == before


# --- Poolers that are known by their words

# PgBouncer's are seen in the table above; the others' are from their documentation or source.
REFUSALS = {
    "PgBouncer": "unsupported startup parameter: options",
    "PgBouncer 1.20": "unsupported startup parameter in options: idle_session_timeout",
    "RDS Proxy": "Feature not supported: RDS Proxy currently doesn't support command-line options.",
    "RDS Proxy and an option": "Feature not supported: RDS Proxy currently doesn't support the option lock_timeout.",
    "RDS Proxy without secrets": (
        "This RDS Proxy has no credentials for the role app. Check the credentials for this role and try again."
    ),
    "pgcat": 'No pool configured for database: "app", user: "app"',
    "Odyssey": "odyssey: c5f1e0a3b9d27: route for 'app.app' is not found",
    "Supavisor": "Tenant or user not found",
    "Supavisor without a tenant": "no tenant identifier provided (external_id or sni_hostname required)",
    "Supavisor in session mode": (
        "MaxClientsInSessionMode: max clients reached - in Session mode max clients are limited to pool_size"
    ),
    "PgDog": 'password for user "app" and database "app" is wrong, or the database does not exist',
}


@pytest.mark.parametrize("said", REFUSALS.values(), ids=REFUSALS)
def test_what_a_pooler_says_is_recognised_and_told_with_the_remedy(said: str) -> None:
    error = connect_error(psycopg.OperationalError(f"connection failed: FATAL:  {said}"), {})
    assert isinstance(error, UnsafeSessionError)
    assert error.reason == "pooler"
    assert "connect to PostgreSQL itself" in str(error)
    assert hopeless(error)


@pytest.mark.parametrize("name", ["pgbouncer", "RDS Proxy", "odyssey", "pgcat", "supavisor", "pgdog"])
def test_a_database_that_is_called_like_a_pooler_is_none(name: str) -> None:
    error = connect_error(psycopg.OperationalError(f'FATAL:  database "{name}" does not exist'), {})
    assert not isinstance(error, UnsafeSessionError)


def test_where_a_pooler_is_allowed_its_refusal_of_settings_is_about_the_users_own() -> None:
    refusal = psycopg.OperationalError(REFUSALS["RDS Proxy"])
    error = connect_error(refusal, {}, allow_pooler=True)
    assert hopeless(error)
    assert "PGOPTIONS" in str(error)
    busy = psycopg.OperationalError(REFUSALS["Supavisor in session mode"])
    assert not hopeless(connect_error(busy, {}, allow_pooler=True))


@contextlib.contextmanager
def saying(text: str) -> Iterator[str]:
    """A server that answers every startup packet with this FATAL error; gives its DSN."""
    fields = b"".join(kind + value.encode() + b"\0" for kind, value in ((b"S", "FATAL"), (b"C", "0A000"), (b"M", text)))
    refusal = b"E" + struct.pack("!I", len(fields) + 5) + fields + b"\0"
    with create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # closed: the test is over
                while True:
                    client: Any = listener.accept()[0]
                    with client:
                        client.recv(4096)
                        client.sendall(refusal)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            host, port = listener.getsockname()
            yield f"host={host} port={port} user=app dbname=app sslmode=disable gssencmode=disable"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(2)
            thread.join(WAIT_S)


@pytest.mark.parametrize("pooler", ["RDS Proxy", "pgcat", "Odyssey", "Supavisor", "PgDog"])
@pytest.mark.parametrize("fenced", [[], ["--fenced"]], ids=["run", "run --fenced"])
def test_run_ends_with_2_where_a_pooler_refuses_it(pooler: str, fenced: list[str]) -> None:
    with saying(REFUSALS[pooler]) as dsn:
        done = command("run", *fenced, "--name", "poolers", "--dsn", dsn, "--log-level", "critical")
    assert done.code == 2
    assert "connection pooler" in done.err
    assert "--allow-pooler" in done.err


@pytest.mark.parametrize(
    ("pooler", "remedy"),
    [("RDS Proxy", "remove `options`"), ("pgcat", "check the database's name"), ("PgDog", "check user and password")],
)
def test_a_lease_that_a_pooler_refuses_is_not_told_to_hold_by_a_lease(pooler: str, remedy: str) -> None:
    with saying(REFUSALS[pooler]) as dsn:
        fenced = ("run", "--fenced", "--hold", "lease")
        done = command(*fenced, "--name", "poolers", "--dsn", dsn, "--log-level", "critical")
    assert done.code == 2
    assert remedy in done.err
    assert "--hold" not in done.err
    assert "--allow-pooler" not in done.err
