"""The fence on psycopg connections: what it lets through, what it refuses, what it holds up, what it leaves behind."""

import asyncio
import contextlib
import dataclasses
import re
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from conftest import StartPooler
from pgleaderlock._pg import statements as _sql
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import (
    ConfigurationError,
    ConnectionError,
    FenceLost,
    NotFenced,
    NotLeader,
    PgLeaderLockError,
    SchemaError,
    StaleEpoch,
)
from pgleaderlock.fence import fenced, meaning
from pgleaderlock.migrate import migrate
from pgleaderlock.models import LeaderToken
from support.fencing import Leader, database, ledger_database, plain_role, until_waiting

LEVELS = list(psycopg.IsolationLevel)[1:]
ABOVE_READ_COMMITTED = LEVELS[1:]
AsyncConn = psycopg.AsyncConnection[Any]


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    with ledger_database(postgres.dsn) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("CREATE TABLE written (what text NOT NULL)")
        yield dsn


@pytest.fixture
def leader(ledger: str) -> Iterator[Leader]:
    with Leader(ledger, "billing") as leading:
        yield leading


@pytest.fixture
def connect(ledger: str) -> Callable[..., Awaitable[AsyncConn]]:
    async def connected(**options: Any) -> AsyncConn:
        return await psycopg.AsyncConnection.connect(ledger, **{"autocommit": True, **options})

    return connected


def written(dsn: str) -> list[str]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        return [row[0] for row in conn.execute("SELECT what FROM written ORDER BY what").fetchall()]


async def write(conn: AsyncConn, what: str) -> None:
    await conn.execute("INSERT INTO written VALUES (%s)", (what,))


# --- What it lets through, and what it refuses


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
async def test_the_current_epoch_commits_and_a_stale_one_writes_nothing(
    ledger: str, leader: Leader, connect: Callable[..., Awaitable[AsyncConn]], level: Any
) -> None:
    async with await connect() as conn:
        await conn.set_isolation_level(level)
        token = leader.win()
        async with fenced(conn, token) as same:
            assert same is conn
            await write(conn, "current")
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert written(ledger) == ["current"]
        leader.win()
        with pytest.raises(StaleEpoch, match="epoch 1 of role billing is stale: the current one is 2"):
            async with fenced(conn, token):
                await write(conn, "stale")
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert written(ledger) == ["current"]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
async def test_writers_of_one_term_do_not_wait_for_each_other(
    ledger: str, leader: Leader, connect: Callable[..., Awaitable[AsyncConn]], level: Any
) -> None:
    async with await connect() as one, await connect() as two:
        for conn in (one, two):
            await conn.set_isolation_level(level)
            await conn.execute("SET lock_timeout = '3s'")
        token = leader.win()
        async with fenced(one, token), fenced(two, token):
            await write(two, "two")
            await write(one, "one")
    assert written(ledger) == ["one", "two"]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_the_same_name_serves_blocking_connections(ledger: str, leader: Leader, level: Any) -> None:
    with psycopg.connect(ledger, autocommit=True) as conn:
        conn.isolation_level = level
        token = leader.win()
        with fenced(conn, token) as same:
            assert same is conn
            conn.execute("INSERT INTO written VALUES ('current')")
        leader.win()
        with pytest.raises(StaleEpoch) as caught, fenced(conn, token):
            conn.execute("INSERT INTO written VALUES ('stale')")
        assert isinstance(caught.value.__cause__, psycopg.Error)
        with conn.transaction(), pytest.raises(StaleEpoch), fenced(conn, token):
            pass
        conn.rollback()
    assert written(ledger) == ["current"]


async def test_an_epoch_that_was_never_issued_is_refused(leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(StaleEpoch):
            async with fenced(conn, dataclasses.replace(token, epoch=token.epoch + 1)):
                pass


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
async def test_no_newer_epoch_begins_while_a_fenced_transaction_is_open(
    leader: Leader, connect: Any, level: Any
) -> None:
    token = leader.win()
    async with await connect() as conn:
        await conn.set_isolation_level(level)
        async with fenced(conn, token):
            assert leader.bumped() == ("busy", None)
            await write(conn, "x")
            assert leader.bumped() == ("busy", None)
        assert leader.bumped() == ("won", 2)


async def test_a_waiting_bump_begins_when_the_writer_has_committed(ledger: str, leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn:
        async with fenced(conn, token):
            bump = asyncio.create_task(asyncio.to_thread(leader.win))
            await until_waiting(ledger)
            await write(conn, "before the bump")
        assert (await bump).epoch == 2
        with pytest.raises(StaleEpoch):
            async with fenced(conn, token):
                pass


async def test_a_writer_that_comes_behind_a_waiting_bump_is_refused(ledger: str, leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as first, await connect() as second:

        async def late() -> None:
            async with fenced(second, token):
                await write(second, "late")

        async with fenced(first, token):
            bump = asyncio.create_task(asyncio.to_thread(leader.win))
            await until_waiting(ledger)
            waiting = asyncio.create_task(late())
            await until_waiting(ledger, 2)
        await bump
        with pytest.raises(StaleEpoch):
            await waiting
    assert written(ledger) == []


async def test_one_role_does_not_fence_another(ledger: str, leader: Leader, connect: Any) -> None:
    token = leader.win()
    with Leader(ledger, "billing", namespace="shop") as elsewhere:
        other = elsewhere.win()
        async with await connect() as conn:
            async with fenced(conn, token):
                assert elsewhere.bumped() == ("won", 2)
            leader.win()
            # Two roles in one transaction: the fence of each counts.
            with pytest.raises(StaleEpoch, match="role billing"):
                async with fenced(conn, elsewhere.token(2)), fenced(conn, token):
                    pass
        assert other.epoch == 1


# --- The transaction is the caller's


async def test_it_costs_one_statement_more(leader: Leader, connect: Any, tmp_path: Path) -> None:
    token = leader.win()

    async def messages(conn: AsyncConn, *, with_fence: bool) -> int:
        """What the client sends that the server answers: each is a round trip."""
        log = tmp_path / "trace"
        with log.open("w") as file:
            conn.pgconn.trace(file.fileno())
            async with fenced(conn, token) if with_fence else conn.transaction():
                await write(conn, "x")
            conn.pgconn.untrace()
        return len(re.findall(r"F\t\d+\t(?:Query|Sync)\b", log.read_text()))

    async with await connect() as conn:
        plain = await messages(conn, with_fence=False)
        assert plain == 3
        assert await messages(conn, with_fence=True) == plain + 1


async def test_an_exception_in_the_block_rolls_back_as_in_any_transaction(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the story is the claim
            async with fenced(conn, token):
                await write(conn, "x")
                raise ZeroDivisionError
        async with fenced(conn, token):
            await write(conn, "y")
            raise psycopg.Rollback
        assert leader.bumped()[0] == "won"  # the fence is gone, too
    assert written(ledger) == []


async def test_a_transaction_block_that_is_open_is_joined_and_not_ended(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    async with await connect() as conn:
        async with conn.transaction():
            await write(conn, "before")
            async with fenced(conn, token):
                await write(conn, "within")
            assert written(ledger) == []
            assert leader.bumped() == ("busy", None)  # fenced until the transaction ends, not only the block
        assert written(ledger) == ["before", "within"]
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the story is the claim
            async with conn.transaction(), fenced(conn, token):
                await write(conn, "never")
                raise ZeroDivisionError
    assert written(ledger) == ["before", "within"]


async def test_an_implicit_transaction_is_joined_and_cannot_be_ended_inside_the_block(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    async with await connect(autocommit=False) as conn:
        await write(conn, "before")
        async with fenced(conn, token):
            await write(conn, "within")
            # What followed would be fenced by nothing.
            with pytest.raises(psycopg.ProgrammingError, match="commit"):
                await conn.commit()
            with pytest.raises(psycopg.ProgrammingError, match="rollback"):
                await conn.rollback()
        assert leader.bumped() == ("busy", None)
        assert written(ledger) == []
        await conn.commit()
        assert written(ledger) == ["before", "within"]


async def test_a_refusal_in_an_implicit_transaction_leaves_it_usable(ledger: str, leader: Leader, connect: Any) -> None:
    token = leader.win()
    leader.win()
    async with await connect(autocommit=False) as conn:
        await write(conn, "unfenced")
        with pytest.raises(StaleEpoch):
            async with fenced(conn, token):
                await write(conn, "stale")
        await conn.commit()
    assert written(ledger) == ["unfenced"]


async def test_a_savepoint_inside_the_block_keeps_the_fence(ledger: str, leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn, fenced(conn, token):
        with contextlib.suppress(ZeroDivisionError):
            async with conn.transaction():
                await write(conn, "undone")
                raise ZeroDivisionError
        await write(conn, "kept")
        assert leader.bumped() == ("busy", None)
    assert written(ledger) == ["kept"]


async def test_a_rollback_by_hand_to_an_older_savepoint_takes_the_fence_back_and_the_block_says_so(
    leader: Leader, connect: Any
) -> None:
    # PostgreSQL's rule, said in the documentation: this is why a fenced table fences again.
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(FenceLost, match="older savepoint"):  # noqa: PT012 - the story is the claim
            async with conn.transaction():
                await conn.execute("SAVEPOINT older")
                async with fenced(conn, token):
                    await conn.execute("ROLLBACK TO older")
                    assert leader.bumped() == ("won", 2)


# --- The transaction ends inside the block

ENDINGS = ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "COMMIT AND CHAIN", "ROLLBACK AND CHAIN"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", ["own", "joined", "implicit"])
async def test_a_transaction_that_ends_inside_the_block_is_an_error(
    leader: Leader, connect: Any, ending: str, way: str
) -> None:
    token = leader.win()
    async with await connect(autocommit=way != "implicit") as conn:
        if way == "implicit":
            await write(conn, "before")
        with pytest.raises(FenceLost, match="role 'billing', epoch 1"):  # noqa: PT012 - the story is the claim
            async with conn.transaction() if way == "joined" else contextlib.nullcontext(), fenced(conn, token):
                await write(conn, "fenced")
                await conn.execute(ending.encode())
                await write(conn, "after")
        await conn.rollback()
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("joined", [False, True])
def test_the_same_on_a_blocking_connection(ledger: str, leader: Leader, ending: str, joined: bool) -> None:
    token = leader.win()
    with psycopg.connect(ledger, autocommit=True) as conn:
        with (
            pytest.raises(FenceLost),
            conn.transaction() if joined else contextlib.nullcontext(),
            fenced(conn, token),
        ):
            conn.execute(ending.encode())
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def test_a_name_that_is_set_behind_a_lost_fence_does_not_hide_the_loss(leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(FenceLost):
            async with fenced(conn, token):
                await conn.execute("COMMIT; BEGIN; SET application_name = 'another'")


async def test_what_was_written_behind_a_lost_fence_is_rolled_back_where_it_still_can_be(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(FenceLost):  # noqa: PT012 - the story is the claim
            async with fenced(conn, token):
                await write(conn, "fenced")
                await conn.execute("COMMIT AND CHAIN")
                await write(conn, "unfenced")
    assert written(ledger) == ["fenced"]


async def test_a_second_fence_after_a_commit_does_not_stand_in_for_the_first(leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(FenceLost):  # noqa: PT012 - the story is the claim
            async with fenced(conn, token):
                await conn.execute("COMMIT; BEGIN")
                async with fenced(conn, token):
                    pass


async def test_an_error_of_the_block_is_not_masked_by_the_loss_of_the_fence(leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the story is the claim
            async with fenced(conn, token):
                await conn.execute("COMMIT")
                raise ZeroDivisionError


@pytest.mark.parametrize(
    "statement", ["SET LOCAL application_name = 'x'", "SET application_name = 'x'", "RESET application_name"]
)
async def test_a_name_that_is_set_inside_the_block_is_no_loss(
    ledger: str, leader: Leader, connect: Any, statement: str
) -> None:
    token = leader.win()
    async with await connect() as conn, fenced(conn, token):
        await write(conn, "kept")
        await conn.execute(statement.encode())
    assert written(ledger) == ["kept"]


async def test_fences_within_each_other_and_a_failed_savepoint_lose_nothing(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    name = "an application with a name that fills all of its sixty-three bytes"[:63]
    async with await connect(application_name=name) as conn:
        async with fenced(conn, token):
            for _ in range(5):  # more than the name has room for
                async with conn.transaction(), fenced(conn, token):
                    await write(conn, "kept")
            with contextlib.suppress(psycopg.errors.DivisionByZero):
                async with conn.transaction(), fenced(conn, token):
                    await conn.execute("SELECT 1/0")
        assert conn.info.parameter_status("application_name") == name
    assert written(ledger) == ["kept"] * 5


async def test_a_block_that_ends_in_a_failed_transaction_commits_nothing_and_is_no_loss(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    async with await connect() as conn:
        async with fenced(conn, token):
            await write(conn, "never")
            with contextlib.suppress(psycopg.errors.DivisionByZero):
                await conn.execute("SELECT 1/0")
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert written(ledger) == []


async def test_behind_a_pooler_in_transaction_mode_an_end_inside_the_block_is_an_error_too(
    ledger: str, leader: Leader, pgbouncer: StartPooler
) -> None:
    token = leader.win()
    pooled = pgbouncer(ledger, "transaction")
    async with await psycopg.AsyncConnection.connect(pooled, autocommit=True, prepare_threshold=None) as conn:
        async with fenced(conn, token):
            await write(conn, "fenced")
        with pytest.raises(FenceLost):
            async with fenced(conn, token):
                await conn.execute("COMMIT; BEGIN")
    assert written(ledger) == ["fenced"]


async def test_cancelling_a_writer_that_waits_for_its_fence_leaves_its_connection_clean(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    async with await connect() as conn, await connect() as blocker:

        async def waits() -> None:
            async with fenced(conn, token):
                await write(conn, "never")

        async with blocker.transaction():
            await blocker.execute("SELECT pgleaderlock.advance_epoch('billing', 'pgleaderlock', 'test')")
            task = asyncio.create_task(waits())
            await until_waiting(ledger)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            raise psycopg.Rollback
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        async with fenced(conn, token):
            await write(conn, "later")
    assert written(ledger) == ["later"]


@pytest.mark.parametrize(
    "options",
    [
        {"row_factory": dict_row},
        {"cursor_factory": psycopg.AsyncRawCursor},
        {"cursor_factory": psycopg.AsyncClientCursor},
        {"prepare_threshold": None},
        {"prepare_threshold": 0},
    ],
    ids=["dict rows", "raw cursors", "client cursors", "never prepared", "always prepared"],
)
async def test_the_connections_own_cursors_and_rows_do_not_matter(leader: Leader, connect: Any, options: Any) -> None:
    token = leader.win()
    async with await connect(**options) as conn:
        for _ in range(2):
            async with fenced(conn, token):
                await conn.execute("SELECT 1")


# --- A silent writer does not hold up the next leader


async def _idle_timeout(conn: AsyncConn) -> str:
    row = await (await conn.execute("SELECT current_setting('idle_in_transaction_session_timeout')")).fetchone()
    return str(row[0]) if row else ""


@pytest.mark.parametrize(
    ("before", "inside"), [("0", "10s"), ("20s", "10s"), ("2h", "10s"), ("1500ms", "1500ms"), ("9s", "9s")]
)
async def test_the_shorter_idle_limit_counts_and_only_in_this_transaction(
    leader: Leader, connect: Any, before: str, inside: str
) -> None:
    token = leader.win()
    async with await connect(options=f"-c idle_in_transaction_session_timeout={before}") as conn:
        async with fenced(conn, token):
            assert await _idle_timeout(conn) == inside
        assert await _idle_timeout(conn) == before


async def test_the_server_ends_a_writer_that_falls_silent(ledger: str, leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn:
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):  # noqa: PT012 - the story is the claim
            async with fenced(conn, token, idle_timeout_s=0.05):
                await write(conn, "never")
                # Waits until the server has ended the writer.
                assert (await asyncio.to_thread(leader.win, wait_ms=20000)).epoch == 2
                await write(conn, "after the end")
    assert written(ledger) == []


# --- Above READ COMMITTED


@pytest.mark.parametrize("level", ABOVE_READ_COMMITTED, ids=lambda level: level.name)
async def test_a_snapshot_that_is_older_than_the_bump_is_refused_when_the_transaction_is_the_callers(
    ledger: str, leader: Leader, connect: Any, level: Any
) -> None:
    token = leader.win()
    async with await connect() as conn:
        await conn.set_isolation_level(level)
        for settled_before in (False, True):  # other changes of the row in between must not hide it
            with pytest.raises(StaleEpoch, match="begin a new one") as caught:  # noqa: PT012 - the story is the claim
                async with conn.transaction():
                    await conn.execute("SELECT 1")
                    if settled_before:
                        leader.settle()
                    newer = leader.win()
                    async with fenced(conn, token):
                        await write(conn, "stale")
            assert isinstance(caught.value.__cause__, psycopg.errors.SerializationFailure)
            token = newer
        async with fenced(conn, token):
            await write(conn, "a new transaction")
    assert written(ledger) == ["a new transaction"]


@pytest.mark.parametrize("level", ABOVE_READ_COMMITTED, ids=lambda level: level.name)
async def test_overtaken_between_snapshot_and_fence_our_own_transaction_gets_a_definite_answer(
    ledger: str, leader: Leader, connect: Any, level: Any
) -> None:
    old = leader.win()

    async def attempt(conn: AsyncConn, token: LeaderToken) -> None:
        await conn.set_isolation_level(level)
        async with fenced(conn, token):
            await write(conn, str(token.epoch))

    async with await connect() as stale, await connect() as current:
        with leader.conn.transaction():
            assert leader.bumped() == ("won", 2)
            # Both snapshots are older than the bump's commit, and both wait for its lock.
            attempts = [asyncio.create_task(attempt(stale, old))]
            attempts.append(asyncio.create_task(attempt(current, leader.token(2))))
            await until_waiting(ledger, 2)
        with pytest.raises(StaleEpoch, match="epoch 1 of role billing is stale: the current one is 2"):
            await attempts[0]
        await attempts[1]
    assert written(ledger) == ["2"]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
async def test_a_fenced_transaction_does_not_hold_up_the_leaders_heartbeat_nor_does_that_refuse_it(
    ledger: str, leader: Leader, connect: Any, level: Any
) -> None:
    token = leader.win()
    leader.conn.execute("SET statement_timeout = '10s'")
    async with await connect() as conn:
        await conn.set_isolation_level(level)
        async with conn.transaction():
            await conn.execute("SELECT 1")
            leader.settle()
            async with fenced(conn, token):
                leader.settle()
                await write(conn, "x")
    assert written(ledger) == ["x"]


async def test_a_serialization_failure_of_the_callers_own_stays_what_it_is(leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect() as conn, await connect() as other:
        await conn.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await write(conn, "x")
        with pytest.raises(psycopg.errors.SerializationFailure):  # noqa: PT012 - the story is the claim
            async with fenced(conn, token):
                await conn.execute("SELECT 1")
                await other.execute("UPDATE written SET what = 'y'")
                await conn.execute("UPDATE written SET what = 'z'")


# --- Bad input: a clear error, nothing changed


@pytest.mark.parametrize(
    ("token", "options", "complaint"),
    [
        (("billing", 1), {}, "takes the LeaderToken of the term"),
        (LeaderToken("billing", -1, ""), {}, "epoch is -1"),
        (LeaderToken("billing", True, ""), {}, "epoch is True"),
        (LeaderToken("billing", 2**63, ""), {}, "epoch is"),
        (LeaderToken("billing", 1, ""), {"idle_timeout_s": 0}, "idle_timeout_s=0 is out of range"),
        (LeaderToken("billing", 1, ""), {"idle_timeout_s": float("inf")}, "idle_timeout_s=inf"),
        (LeaderToken("billing", 1, ""), {"idle_timeout_s": float("nan")}, "idle_timeout_s=nan"),
        (LeaderToken("billing", 1, ""), {"idle_timeout_s": 3e6}, "idle_timeout_s=3"),
    ],
)
async def test_a_bad_token_or_limit_is_refused_before_anything_is_sent(
    connect: Any, token: Any, options: Any, complaint: str
) -> None:
    async with await connect() as conn:
        with pytest.raises(ConfigurationError, match=complaint):
            fenced(conn, token, **options)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.mark.parametrize("wrong", ["postgresql://x", None, sqlite3])
def test_what_is_no_psycopg_connection_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="open psycopg connection, not"):
        fenced(wrong, LeaderToken("billing", 1, ""))


def test_something_of_sqlalchemy_is_told_where_its_fence_is() -> None:
    from sqlalchemy.orm import Session

    with pytest.raises(ConfigurationError, match=r"pgleaderlock\.contrib\.sqlalchemy"):
        fenced(Session(), LeaderToken("billing", 1, ""))  # type: ignore[call-overload]


async def _refused(conn: AsyncConn, token: LeaderToken) -> PgLeaderLockError:
    entered = False
    with pytest.raises(PgLeaderLockError) as caught:
        async with fenced(conn, token):
            entered = True
    assert not entered
    return caught.value


async def test_a_connection_whose_owner_believes_that_a_transaction_is_open_is_left_alone(
    ledger: str, leader: Leader, connect: Any
) -> None:
    token = leader.win()
    async with await connect() as conn:
        await conn.set_autocommit(False)  # nothing is sent: the transaction begins with the owner's next statement
        with pytest.raises(
            ConfigurationError, match=r"connect with autocommit=True.*`with conn.transaction\(\), fenced"
        ):
            async with fenced(conn, token):
                await write(conn, "committed behind the owner's back")
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        await conn.rollback()
        async with conn.transaction(), fenced(conn, token):
            await write(conn, "the remedy")
    assert written(ledger) == ["the remedy"]


def test_inside_djangos_atomic_the_remedy_is_djangos(ledger: str, leader: Leader) -> None:
    # What atomic() does to its connection: autocommit off, nothing sent, and a rollback if the block raises.
    cursors = type("Cursor", (psycopg.ClientCursor,), {"__module__": "django.db.backends.postgresql.base"})
    token = leader.win()
    with psycopg.connect(ledger, autocommit=True, cursor_factory=cursors) as conn:
        conn.autocommit = False
        with pytest.raises(ConfigurationError, match=r"use pgleaderlock\.contrib\.django\.fenced"), fenced(conn, token):
            conn.execute("INSERT INTO written VALUES ('committed behind the back of atomic')")
        conn.execute("SELECT 1")
        with fenced(conn, token):
            conn.execute("INSERT INTO written VALUES ('rolled back')")
        conn.rollback()
    assert written(ledger) == []


async def test_a_closed_connection(leader: Leader, connect: Any) -> None:
    conn = await connect()
    await conn.close()
    error = await _refused(conn, leader.win())
    assert isinstance(error, ConnectionError)
    assert "closed" in str(error)


async def test_a_failed_transaction_is_left_as_it_is(leader: Leader, connect: Any) -> None:
    async with await connect(autocommit=False) as conn:
        with contextlib.suppress(psycopg.Error):
            await conn.execute("SELECT 1 / 0")
        error = await _refused(conn, leader.win())
        assert isinstance(error, ConfigurationError)
        assert "failed transaction: roll it back first" in str(error)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR


async def test_a_pipeline(leader: Leader, connect: Any) -> None:
    async with await connect() as conn, conn.pipeline():
        error = await _refused(conn, leader.win())
        assert isinstance(error, ConfigurationError)
        assert "pipeline" in str(error)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
async def test_a_read_only_transaction(leader: Leader, connect: Any, level: Any) -> None:
    token = leader.win()
    async with await connect() as conn:
        # The second time the holder is not compared any more: that is the short way through the fence.
        for before in (False, True):
            if before:
                async with fenced(conn, token):
                    pass
            await conn.set_read_only(True)
            await conn.set_isolation_level(level)
            error = await _refused(conn, token)
            assert isinstance(error, ConfigurationError)
            assert "READ WRITE" in str(error)
            await conn.set_read_only(None)
            await conn.set_isolation_level(None)
    assert leader.bumped() == ("won", 2)


async def test_a_database_without_a_ledger(postgres: EmbeddedPostgres, leader: Leader) -> None:
    with database(postgres.dsn) as elsewhere:
        async with await psycopg.AsyncConnection.connect(elsewhere, autocommit=True) as conn:
            error = await _refused(conn, leader.win())
            assert isinstance(error, SchemaError)
            assert "run `pgleaderlock migrate`" in str(error)
            assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def test_another_database_with_a_ledger_of_its_own(postgres: EmbeddedPostgres, leader: Leader) -> None:
    token = leader.win()
    with database(postgres.dsn) as elsewhere:
        await migrate(elsewhere)
        async with await psycopg.AsyncConnection.connect(elsewhere, autocommit=True) as conn:
            error = await _refused(conn, token)
            assert isinstance(error, NotLeader)
            assert (error.role, error.reason) == ("billing", "never_led")
            assert "is this the database that elected the leader?" in str(error)
            # The same role, and even the same number: but another leader.
            with Leader(elsewhere, "billing", node="stranger") as stranger:
                assert stranger.win().epoch == token.epoch
                error = await _refused(conn, token)
                assert isinstance(error, ConfigurationError)
                assert "connect to the database that elected the leader" in str(error)
                assert stranger.bumped() == ("won", 2)


async def test_a_role_without_the_grants(ledger: str, leader: Leader) -> None:
    with plain_role(ledger) as dsn:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            error = await _refused(conn, leader.win())
        assert isinstance(error, SchemaError)
        assert "GRANTs" in str(error)


async def test_the_documented_grants_for_a_writer_are_enough(ledger: str, leader: Leader) -> None:
    with plain_role(ledger) as dsn, psycopg.connect(ledger, autocommit=True) as admin:
        (role,) = (psycopg.conninfo.conninfo_to_dict(dsn)["user"],)
        grants = _sql.statement("grants_fence_only").decode().replace("{role}", f'"{role}"')
        admin.execute(grants.encode())
        token = leader.win()
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            for _ in range(2):  # the holder is compared once, and then the short way serves
                async with fenced(conn, token):
                    pass
            leader.win()
            assert isinstance(await _refused(conn, token), StaleEpoch)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await conn.execute("SELECT * FROM pgleaderlock.leaders")


async def test_a_timeout_of_the_callers_own_stays_what_it_is(ledger: str, leader: Leader, connect: Any) -> None:
    token = leader.win()
    async with await connect(options="-c lock_timeout=50ms") as conn:
        with leader.conn.transaction():
            leader.bumped()
            with pytest.raises(psycopg.errors.LockNotAvailable):
                async with fenced(conn, token):
                    pass


@pytest.mark.parametrize(
    ("sqlstate", "kind"), [("PGL04", NotFenced), ("PGL02", StaleEpoch), ("40001", None), ("23505", None)]
)
def test_an_error_of_the_callers_own_statement_has_a_meaning_too(sqlstate: str, kind: type[Exception] | None) -> None:
    error = psycopg.Error("text")
    error.sqlstate = sqlstate
    found = meaning(error)
    assert found is None if kind is None else type(found) is kind


# --- Stores that only take a number


def _documented(name: str) -> str:
    """The example of this name in docs/fence.md."""
    page = (Path(__file__).parents[2] / "docs" / "fence.md").read_text()
    found = re.search(rf"<!-- tested: {name} -->\n```(?:python|sql)\n(.*?)```", page, re.DOTALL)
    assert found is not None, name
    return found[1]


def test_the_documented_sqlite_store_takes_no_older_number() -> None:
    names: dict[str, Any] = {}
    exec(_documented("sqlite"), names)
    store = names["Store"](sqlite3.connect(":memory:", isolation_level=None))
    store.put("a", "one", epoch=5)
    store.put("a", "two", epoch=5)
    store.put("a", "three", epoch=7)
    with pytest.raises(StaleEpoch):
        store.put("a", "stale", epoch=6)
    with pytest.raises(StaleEpoch):  # another key of the same store: one leader for all of it
        store.put("b", "stale", epoch=6)
    assert store.get("a") == "three"
    assert store.get("b") is None


def test_the_documented_update_takes_no_older_number(ledger: str) -> None:
    statements = _documented("update").split(";")
    with psycopg.connect(ledger, autocommit=True) as conn:
        conn.execute(statements[0].encode())
        conn.execute("INSERT INTO remote_state (id, value, last_epoch) VALUES (1, 'zero', 0)")

        def update(value: str, epoch: int) -> int:
            return conn.execute(statements[1].encode(), {"id": 1, "value": value, "epoch": epoch}).rowcount

        assert [update("one", 5), update("two", 5), update("three", 7), update("stale", 6)] == [1, 1, 1, 0]
        assert conn.execute("SELECT value, last_epoch FROM remote_state").fetchall() == [("three", 7)]
