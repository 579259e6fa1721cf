"""The ledger's schema: made once by many, never half, never over a newer one; and a role with run-time rights only."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock import key_pair
from pgleaderlock import migrate as migrations
from pgleaderlock._pg import statements
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import (
    ConfigurationError,
    ConnectionError,
    SchemaError,
    StaleEpoch,
    UnsafeSessionError,
)
from pgleaderlock.fence import fenced
from pgleaderlock.migrate import LEDGER_VERSION, advance_epoch, check_schema, migrate, pending
from support.counts import count
from support.fencing import Leader, database, ledger_database, plain_role, until_waiting
from support.ledger_node import eventually
from support.program import command

NODES = 20
VERSIONS = list(range(1, LEDGER_VERSION + 1))
# What a run-time role may call; everything else of the ledger is refused to it.
RUN_TIME = {
    "open_session",
    "beat",
    "bump",
    "end_term",
    "close_session",
    "note_eviction",
    "request_step_down",
    "finish_request",
    "describe_session",
    "tick",
    "note_drain",
    "heartbeat",
    "request_drain",
    "request_resume",
    "reserve",
    "settle_request",
    "prune",
    "tick_of",
    "claim_slot",
    "finish_slot",
    "report_gates",
    "lease_open",
    "lease_begin",
    "lease_done",
    "lease_lock",
    "end_silent_leases",
    "declare_roles",
    "request_drain_within",
    "forget_role",
    "fence",
    "fence_strictly",
    "fence_key",
}


@pytest.fixture
def empty(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    """A database without a ledger."""
    with database(postgres.dsn) as dsn:
        yield dsn


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    """A database with a ledger."""
    with ledger_database(postgres.dsn) as dsn:
        yield dsn


@pytest.fixture
def runtime(ledger: str) -> Iterator[str]:
    """The ledger, for a role that was given what `--grant-to` gives."""
    with plain_role(ledger) as dsn:
        asyncio.run(migrate(ledger, grant_to=user(dsn)))
        yield dsn


def user(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["user"])


def rows(dsn: str, sql: str, *params: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        return conn.execute(sql.encode(), params or None).fetchall()


def has_schema(dsn: str) -> bool:
    return bool(rows(dsn, "SELECT 1 FROM pg_namespace WHERE nspname = 'pgleaderlock'"))


def versions(dsn: str) -> list[int]:
    return [row[0] for row in rows(dsn, "SELECT version FROM pgleaderlock.schema_version ORDER BY version")]


def add_version(dsn: str, version: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("INSERT INTO pgleaderlock.schema_version (version) VALUES (%s)", (version,))


def next_version(monkeypatch: pytest.MonkeyPatch) -> int:
    """The library as it will be one day: with another migration."""
    version = LEDGER_VERSION + 1
    text = f"CREATE TABLE pgleaderlock.next (); INSERT INTO pgleaderlock.schema_version (version) VALUES ({version});"
    files = {**migrations._migrations(), version: text}
    monkeypatch.setattr(migrations, "_migrations", lambda: files)
    monkeypatch.setattr(migrations, "LEDGER_VERSION", version)
    return version


# --- Made once, never half


async def test_the_first_run_makes_the_ledger_and_the_next_finds_nothing_to_do(empty: str) -> None:
    assert await pending(empty) == VERSIONS
    assert await migrate(empty) == VERSIONS
    assert await pending(empty) == []
    assert await migrate(empty) == []
    assert versions(empty) == VERSIONS


async def test_of_twenty_nodes_that_start_at_once_exactly_one_applies_each_version(empty: str) -> None:
    for _ in range(count(2, 10)):
        answers = await asyncio.gather(*(migrate(empty) for _ in range(NODES)))
        assert sorted(version for applied in answers for version in applied) == VERSIONS
        with psycopg.connect(empty, autocommit=True) as conn:
            conn.execute("DROP SCHEMA pgleaderlock CASCADE")


async def test_whoever_comes_second_waits_and_then_finds_it_done(empty: str) -> None:
    async with await psycopg.AsyncConnection.connect(empty) as first:
        await first.execute("SELECT pg_advisory_xact_lock(%s, %s)", migrations._LOCK)
        others = [asyncio.ensure_future(migrate(empty)) for _ in range(2)]
        await until_waiting(empty, 2)
        assert not has_schema(empty)
        await first.rollback()
        answers = [await other for other in others]
        assert sorted(version for applied in answers for version in applied) == VERSIONS


async def test_a_migration_that_fails_leaves_nothing_behind(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {1: migrations._migrations()[1] + "SELECT 1 / 0;"}
    monkeypatch.setattr(migrations, "_migrations", lambda: files)
    with pytest.raises(SchemaError, match=r"migration 1 failed, and nothing of it was applied: division by zero"):
        await migrate(empty)
    assert not has_schema(empty)


async def test_versions_are_applied_in_order_and_only_those_that_are_missing(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await migrate(empty) == VERSIONS
    version = next_version(monkeypatch)
    assert await pending(empty) == [version]
    assert await migrate(empty) == [version]
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute("DROP SCHEMA pgleaderlock CASCADE")
    assert await migrate(empty) == [*VERSIONS, version]
    assert versions(empty) == [*VERSIONS, version]


async def test_a_later_version_that_fails_leaves_the_earlier_ones_as_they_were(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = next_version(monkeypatch)
    migrations._migrations()[version] = "DROP TABLE pgleaderlock.terms; SELECT 1 / 0;"
    with pytest.raises(SchemaError, match=f"migration {version} failed"):
        await migrate(empty)
    assert versions(empty) == VERSIONS
    assert rows(empty, "SELECT count(*) FROM pgleaderlock.terms") == [(0,)]


async def test_the_dbas_defaults_do_not_matter(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn:
        name = conn.info.dbname
        for setting in ("default_transaction_read_only = on", "default_transaction_isolation = 'serializable'"):
            conn.execute(f'ALTER DATABASE "{name}" SET {setting}'.encode())
    answers = await asyncio.gather(*(migrate(empty) for _ in range(5)))
    assert sorted(version for applied in answers for version in applied) == VERSIONS


# --- One version apart, in both directions


@pytest.mark.parametrize("version", [None, LEDGER_VERSION - 2])
def test_a_missing_or_older_ledger_is_refused_with_what_to_run(version: int | None) -> None:
    with pytest.raises(SchemaError, match="run `pgleaderlock migrate`"):
        check_schema(version)


@pytest.mark.parametrize("version", [LEDGER_VERSION - 1, LEDGER_VERSION, LEDGER_VERSION + 1])
def test_one_version_apart_is_served_in_both_directions(version: int) -> None:
    check_schema(version)


def test_a_ledger_that_is_two_versions_newer_asks_for_a_newer_library() -> None:
    with pytest.raises(SchemaError, match="upgrade the library"):
        check_schema(LEDGER_VERSION + 2)


async def test_a_ledger_one_version_newer_is_left_alone(ledger: str) -> None:
    add_version(ledger, LEDGER_VERSION + 1)
    assert await migrate(ledger) == []
    assert versions(ledger) == [*VERSIONS, LEDGER_VERSION + 1]


async def test_a_much_newer_ledger_is_refused_and_not_touched(ledger: str) -> None:
    add_version(ledger, LEDGER_VERSION + 2)
    for attempt in (migrate(ledger), pending(ledger), migrate(ledger, grant_to="pg_monitor")):
        with pytest.raises(SchemaError, match=f"version is {LEDGER_VERSION + 2}.*upgrade the library"):
            await attempt
    assert versions(ledger) == [*VERSIONS, LEDGER_VERSION + 2]
    assert rows(ledger, "SELECT has_schema_privilege('pg_monitor', 'pgleaderlock', 'USAGE')") == [(False,)]


# --- Who may


async def test_a_role_that_may_not_create_a_schema_is_told_who_should(empty: str) -> None:
    with plain_role(empty) as dsn:
        with pytest.raises(SchemaError, match=r"may not create a schema in database .*--print"):
            await migrate(dsn)
        assert await pending(dsn) == VERSIONS
    assert not has_schema(empty)


async def test_a_schema_of_a_stranger_is_not_filled(empty: str) -> None:
    with plain_role(empty) as dsn:
        with psycopg.connect(empty, autocommit=True) as conn:
            conn.execute(f'CREATE SCHEMA pgleaderlock AUTHORIZATION "{user(dsn)}"'.encode())
        with pytest.raises(SchemaError, match=f"belongs to role {user(dsn)}, and this is 'postgres'"):
            await migrate(empty)
        assert rows(empty, "SELECT relname FROM pg_class WHERE relnamespace = 'pgleaderlock'::regnamespace") == []
        assert await migrate(dsn) == VERSIONS  # its owner may


async def test_an_owner_without_special_rights_serves_another_plain_role(empty: str) -> None:
    with plain_role(empty) as owner, plain_role(empty) as node:
        with psycopg.connect(empty, autocommit=True) as conn:
            conn.execute(f'CREATE SCHEMA pgleaderlock AUTHORIZATION "{user(owner)}"'.encode())
        assert await migrate(owner, grant_to=user(node)) == VERSIONS
        with Leader(node, "plain") as leader, psycopg.connect(node, autocommit=True) as conn:
            token = leader.win()
            leader.settle()
            with fenced(conn, token):
                assert leader.bumped() == ("busy", None)


async def test_a_role_without_rights_to_the_ledger_is_told_about_the_grants(ledger: str) -> None:
    with plain_role(ledger) as dsn, pytest.raises(SchemaError, match=r"GRANTs in docs/ledger\.md"):
        await migrate(dsn)


async def test_a_run_time_role_may_ask_whether_anything_is_to_be_done(runtime: str) -> None:
    assert await migrate(runtime) == []


def test_a_standby_is_refused() -> None:
    seen = {"version": None, "in_recovery": True, "owner": None, "may_create": True, "is_owner": None}
    with pytest.raises(UnsafeSessionError, match="standby"):
        migrations._todo(seen)


async def test_a_server_that_is_away_is_a_connection_error_without_secrets() -> None:
    with pytest.raises(ConnectionError) as caught:
        await migrate("host=127.0.0.1 port=1 user=x password=sesame")
    assert "sesame" not in str(caught.value)


async def test_only_the_owner_can_grant(ledger: str, runtime: str) -> None:
    with pytest.raises(SchemaError, match="may not grant"):
        await migrate(runtime, grant_to="pg_monitor")
    assert rows(ledger, "SELECT has_schema_privilege('pg_monitor', 'pgleaderlock', 'USAGE')") == [(False,)]


@pytest.mark.parametrize("role", ["", "x" * 64, "a\0b", "\udcff"])
async def test_what_cannot_be_a_role_is_refused_before_connecting(role: str) -> None:
    with pytest.raises(ConfigurationError, match="name of a role"):
        await migrate("host=127.0.0.1 port=1", grant_to=role)


async def test_a_role_that_does_not_exist_is_named_and_the_name_is_only_a_name(ledger: str) -> None:
    nasty = 'x" ; DROP SCHEMA pgleaderlock; --'
    with pytest.raises(SchemaError, match="does not exist: create the role first"):
        await migrate(ledger, grant_to=nasty)
    with plain_role(ledger, nasty) as dsn:
        await migrate(ledger, grant_to=nasty)
        assert await migrate(dsn) == []
    assert versions(ledger) == VERSIONS


@pytest.mark.parametrize("option", ["grant_to", "grant_lock_server_to", "grant_reader_to"])
async def test_where_a_role_does_not_exist_nothing_is_applied(empty: str, option: Any) -> None:
    with pytest.raises(SchemaError, match='"nobody of this name" does not exist: create the role first'):
        await migrate(empty, **{option: "nobody of this name"})
    assert not has_schema(empty)


# --- What a run-time role can and cannot do


def test_a_run_time_role_may_call_exactly_the_run_time_functions_and_read(ledger: str, runtime: str) -> None:
    may = rows(
        ledger,
        "SELECT proname FROM pg_proc WHERE pronamespace = 'pgleaderlock'::regnamespace"
        " AND has_function_privilege(%s, oid, 'EXECUTE')",
        user(runtime),
    )
    assert {name for (name,) in may} == RUN_TIME
    tables = rows(
        ledger,
        "SELECT relname, has_table_privilege(%(role)s, oid, 'SELECT'),"
        " has_table_privilege(%(role)s, oid, 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER'),"
        " has_any_column_privilege(%(role)s, oid, 'INSERT, UPDATE, REFERENCES')"
        " FROM pg_class WHERE relnamespace = 'pgleaderlock'::regnamespace AND relkind IN ('r', 'v')".replace(
            "%(role)s", f"'{user(runtime)}'"
        ),
    )
    assert {name for name, *_ in tables} >= {"sessions", "leaders", "terms", "events", "requests", "leader_state"}
    # Of a lock server's tables it may not even read one: whoever can read a lease's id can act as its holder.
    theirs = {name for name, *_ in tables if name.startswith("lock_")}
    assert {tuple(rest) for name, *rest in tables if name not in theirs} == {(True, False, False)}
    assert {tuple(rest) for name, *rest in tables if name in theirs} == {(False, False, False)}
    assert rows(ledger, "SELECT has_schema_privilege(%s, 'pgleaderlock', 'CREATE')", user(runtime)) == [(False,)]


def test_a_role_without_grants_may_call_nothing(ledger: str) -> None:
    with plain_role(ledger) as dsn:
        callable_ = rows(
            ledger,
            "SELECT proname FROM pg_proc WHERE pronamespace = 'pgleaderlock'::regnamespace"
            " AND has_function_privilege(%s, oid, 'EXECUTE')",
            user(dsn),
        )
        assert callable_ == []
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            rows(dsn, "SELECT pgleaderlock.fence('x', 1)")


def test_a_run_time_role_can_do_everything_that_a_node_does(ledger: str, runtime: str) -> None:
    with Leader(runtime, "plain") as leader:
        token = leader.win()
        leader.settle()
        with psycopg.connect(runtime, autocommit=True) as conn, fenced(conn, token):
            conn.execute("SELECT 1")
        request = leader.one("SELECT pgleaderlock.request_step_down('plain', 'pgleaderlock', NULL, 'test')")
        leader.one("SELECT pgleaderlock.finish_request(%s, %s)", leader.session_id, request)
        with Leader(runtime, "plain", node="other") as gone:
            gone_id, gone_pid = gone.session_id, gone.conn.info.backend_pid
        there = "SELECT count(*) FROM pg_stat_get_activity(%s)"
        eventually(lambda: leader.one(there, gone_pid) == 0)  # the server notices the closed connection a moment later
        leader.one("SELECT pgleaderlock.note_eviction(%s, %s)", leader.session_id, gone_id)
        ended = leader.one(
            "SELECT pgleaderlock.end_term(%s, '{plain}', %s, '{true}', 'released')", leader.session_id, [token.epoch]
        )
        assert ended == "plain"
        leader.one("SELECT pgleaderlock.close_session(%s)", leader.session_id)
    for relation in ("leader_state", "sessions", "leaders", "terms", "events", "requests", "schema_version"):
        assert rows(runtime, f"SELECT count(*) > 0 FROM pgleaderlock.{relation}") == [(True,)]


@pytest.mark.parametrize(
    "attempt",
    [
        "UPDATE pgleaderlock.leaders SET epoch = 7",
        "INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2) VALUES ('n', 'r', 1, 2)",
        "DELETE FROM pgleaderlock.leaders",
        "TRUNCATE pgleaderlock.leaders",
        "SELECT * FROM pgleaderlock.leaders FOR UPDATE",
        "UPDATE pgleaderlock.leader_state SET epoch = 7",
        "DELETE FROM pgleaderlock.sessions",
        "DELETE FROM pgleaderlock.terms",
        "DELETE FROM pgleaderlock.events",
        "SELECT pgleaderlock.advance_epoch('plain', 'pgleaderlock', 'test')",
        "CREATE FUNCTION pgleaderlock.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE RULE mine AS ON UPDATE TO pgleaderlock.leaders DO INSTEAD NOTHING",
        "ALTER TABLE pgleaderlock.leaders DISABLE TRIGGER ALL",
        "DROP FUNCTION pgleaderlock.fence",
    ],
)
def test_a_run_time_role_can_change_nothing_by_hand(ledger: str, runtime: str, attempt: str) -> None:
    with Leader(ledger, "plain") as leader:
        leader.win()
        with (
            psycopg.connect(runtime, autocommit=True) as conn,
            pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.ObjectNotInPrerequisiteState)),
        ):
            conn.execute(attempt.encode())
    assert rows(ledger, "SELECT epoch FROM pgleaderlock.leaders") == [(1,)]


def test_without_the_lock_a_bump_is_not_held_and_changes_nothing(runtime: str) -> None:
    with Leader(runtime, "plain") as holder, Leader(runtime, "plain", node="other") as other:
        assert other.bumped() == ("not_held", None)
        holder.win()
        assert other.bumped() == ("not_held", None)
        assert rows(runtime, "SELECT epoch FROM pgleaderlock.leaders") == [(1,)]


@pytest.mark.parametrize(
    "attempt",
    [
        "SELECT * FROM pgleaderlock.bump({session}, '{{plain}}', '{{{key1}}}', '{{{key2}}}', 0, 'test')",
        "SELECT * FROM pgleaderlock.beat({session}, '{{plain}}')",
        "SELECT * FROM pgleaderlock.end_term({session}, '{{plain}}', '{{1}}', '{{true}}', 'released')",
        "SELECT pgleaderlock.note_eviction({session}, {session})",
    ],
)
def test_another_backends_session_is_refused(runtime: str, attempt: str) -> None:
    key1, key2 = key_pair("plain")
    with Leader(runtime, "plain") as leader, psycopg.connect(runtime, autocommit=True) as other:
        leader.win()
        with pytest.raises(psycopg.Error) as caught:
            other.execute(attempt.format(session=leader.session_id, key1=key1, key2=key2).encode())
        assert caught.value.sqlstate == "PGL03"
        assert rows(runtime, "SELECT epoch, ended, clean FROM pgleaderlock.leaders") == [(1, False, False)]


def test_nothing_of_the_callers_can_be_slipped_in(ledger: str, runtime: str) -> None:
    with psycopg.connect(ledger, autocommit=True) as admin:
        admin.execute(f'CREATE SCHEMA mine AUTHORIZATION "{user(runtime)}"'.encode())
    with Leader(runtime, "plain") as leader, psycopg.connect(runtime, autocommit=True) as conn:
        stale, current = leader.win(), leader.win()
        # Functions, operators and tables with the names that the ledger uses, where the caller would find them first.
        conn.execute("""
            CREATE FUNCTION mine.pg_advisory_xact_lock_shared(bigint) RETURNS void LANGUAGE sql AS 'SELECT NULL::void';
            CREATE FUNCTION mine.current_setting(text) RETURNS text LANGUAGE sql AS $$SELECT 'off'$$;
            CREATE FUNCTION mine.yes(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
            CREATE OPERATOR mine.= (LEFTARG = text, RIGHTARG = text, FUNCTION = mine.yes);
            CREATE TEMP TABLE leaders AS TABLE pgleaderlock.leaders;
            UPDATE leaders SET epoch = 1;
            SET search_path = mine, pg_temp, pg_catalog;
        """)
        with pytest.raises(StaleEpoch), fenced(conn, stale):
            pass
        with fenced(conn, current):
            assert leader.bumped() == ("busy", None)  # the real lock is held
        with pytest.raises(psycopg.Error) as caught:
            conn.execute("SELECT pgleaderlock.fence('another', 1)")  # its equality would find this one, too
        assert caught.value.sqlstate == "PGL01"


@pytest.mark.parametrize(
    ("last", "issued_in", "here", "then"),
    [
        (7, (1, 1), (1, 1), 8),  # the same history
        (7, (1, 1), (1, 2), 2**32),  # promoted
        (7, (1, 1), (1, 3), 2 * 2**32),  # promoted twice: what the second issued may be lost without a trace
        (2**32 + 4, (1, 2), (1, 3), 2 * 2**32),
        (7, (1, 2), (1, 1), 2**32),  # a copy from before a promotion
        (7, (1, 1), (9, 1), 2**32),  # another cluster
        (7, (1, 3), (9, 2), 2 * 2**32),
    ],
)
def test_a_new_history_leaves_every_number_of_the_old_ones_behind(
    ledger: str, last: int, issued_in: tuple[int, int], here: tuple[int, int], then: int
) -> None:
    asked = "SELECT pgleaderlock.next_number(%s::bigint, %s::bigint, %s::integer, %s::bigint, %s::integer)"
    with psycopg.connect(ledger) as conn:
        assert conn.execute(asked, (last, *issued_in, *here)).fetchone() == (then,)


@pytest.mark.parametrize(
    "name", ["grants", "grants_fence_only", "grants_table_owner", "grants_lock_server", "grants_reader"]
)
def test_the_documented_grants_are_the_real_ones(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
    found = re.search(rf"<!-- sql: {name} -->\n```sql\n(.*?);\n```", page, re.DOTALL)
    assert found is not None
    assert found[1] == statements.statement(name).decode()


# --- The command line


def test_migrate_says_what_it_did(empty: str) -> None:
    with plain_role(empty) as dsn:
        first = command("migrate", "--dsn", empty, "--grant-to", user(dsn))
        assert (first.code, first.err) == (0, "")
        assert (
            first.out
            == "".join(f"applied version {version}\n" for version in VERSIONS)
            + f"granted run-time rights to {user(dsn)}\n"
        )
        again = command("migrate", env={"PG_DSN": dsn})
        assert (again.code, again.out) == (0, f"nothing to do: the ledger has version {LEDGER_VERSION} or newer\n")


def test_a_lock_servers_role_is_given_its_rights_by_the_command(empty: str) -> None:
    with plain_role(empty) as dsn:
        done = command("migrate", "--dsn", empty, "--grant-lock-server-to", user(dsn))
        assert (done.code, done.err) == (0, "")
        assert done.out.endswith(f"granted a lock server's rights to {user(dsn)}\n")
        with psycopg.connect(dsn) as conn:
            conn.execute("SELECT * FROM pgleaderlock.lock_apply('server', '[]', 1)")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("SELECT * FROM pgleaderlock.bump(1, '{}', '{}', '{}', 0, 'c')")


def test_print_needs_no_database_and_makes_the_same_ledger(empty: str) -> None:
    with plain_role(empty) as dsn:
        done = command("migrate", "--print", "--grant-to", user(dsn), env={"PG_DSN": "host=127.0.0.1 port=1"})
        assert (done.code, done.err) == (0, "")
        with psycopg.connect(empty, autocommit=True) as conn:
            conn.execute(done.out.encode())
        assert command("migrate", "--dsn", dsn).out.startswith("nothing to do")
        with psycopg.connect(empty, autocommit=True) as conn, pytest.raises(psycopg.Error, match="already exists"):
            conn.execute(done.out.encode())
        assert versions(empty) == VERSIONS


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["migrate"], "no database given"),
        (["migrate", "--dsn", "host=127.0.0.1 port=1"], "cannot connect"),
        (["migrate", "--print", "--grant-to", ""], "name of a role"),
        (["epoch", "advance", "--dsn", "host=127.0.0.1 port=1"], "which roles? Name them, or give --all"),
        (["epoch", "advance", "x"], "no database given"),
        (["epoch", "advance", "", "--dsn", "host=127.0.0.1 port=1"], "name must not be empty"),
        (["epoch", "advance", "x", "--dsn", "host=127.0.0.1 port=1"], "cannot connect"),
    ],
)
def test_bad_input_exits_2_with_one_line_that_says_why(args: list[str], complaint: str) -> None:
    done = command(*args)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_migrate_exits_2_when_the_role_may_not(empty: str) -> None:
    with plain_role(empty) as dsn:
        done = command("migrate", "--dsn", dsn)
    assert (done.code, done.out) == (2, "")
    assert "may not create a schema" in done.err


# --- epoch advance


def test_advance_moves_the_epoch_beyond_a_lost_history_and_fences_everybody_out(ledger: str) -> None:
    with Leader(ledger, "plain") as leader, psycopg.connect(ledger, autocommit=True) as conn:
        token = leader.win()
        done = command("epoch", "advance", "plain", "--dsn", ledger)
        assert (done.code, done.out, done.err) == (0, f"plain: epoch 1 -> {2**20}\n", "")
        with pytest.raises(StaleEpoch), fenced(conn, token):
            pass
        assert rows(ledger, "SELECT ended, session_id, clean FROM pgleaderlock.leaders") == [(True, None, False)]
        assert rows(ledger, "SELECT reason FROM pgleaderlock.terms") == [("superseded",)]
        assert rows(ledger, "SELECT kind, epoch FROM pgleaderlock.events ORDER BY event_id DESC LIMIT 1") == [
            ("advanced", 2**20)
        ]
        assert leader.win().epoch == 2**20 + 1
        assert command("epoch", "advance", "plain", "--dsn", ledger).out == f"plain: epoch {2**20 + 1} -> {2**21}\n"


def test_advance_is_for_one_namespace(ledger: str) -> None:
    with Leader(ledger, "plain") as one, Leader(ledger, "plain", namespace="shop") as other:
        one.win()
        other.win()
        assert command("epoch", "advance", "plain", "--namespace", "shop", "--dsn", ledger).code == 0
        assert rows(ledger, "SELECT namespace, epoch FROM pgleaderlock.leaders ORDER BY 1") == [
            ("pgleaderlock", 1),
            ("shop", 2**20),
        ]


def test_advance_wakes_the_nodes(ledger: str) -> None:
    with Leader(ledger, "plain") as leader, psycopg.connect(ledger, autocommit=True) as conn:
        leader.win()
        conn.execute("LISTEN elsewhere")
        assert command("epoch", "advance", "plain", "--channel", "elsewhere", "--dsn", ledger).code == 0
        assert [notice.payload for notice in conn.notifies(timeout=5, stop_after=1)] == ["advanced"]


def test_advance_of_an_unknown_role_names_it_and_changes_nothing(ledger: str) -> None:
    done = command("epoch", "advance", "nobody", "--dsn", ledger)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: role nobody is not known in namespace pgleaderlock\n"
    assert rows(ledger, "SELECT count(*) FROM pgleaderlock.leaders") == [(0,)]


def test_advance_without_a_ledger_says_migrate(empty: str) -> None:
    done = command("epoch", "advance", "plain", "--dsn", empty)
    assert (done.code, done.out) == (2, "")
    assert "run `pgleaderlock migrate`" in done.err


def test_advance_by_a_run_time_role_is_refused(ledger: str, runtime: str) -> None:
    with Leader(ledger, "plain") as leader:
        leader.win()
        done = command("epoch", "advance", "plain", "--dsn", runtime)
    assert (done.code, done.out) == (2, "")
    assert "permission denied for function advance_epoch" in done.err
    assert rows(ledger, "SELECT epoch FROM pgleaderlock.leaders") == [(1,)]


async def test_advance_gives_up_on_a_fenced_transaction_that_does_not_end(
    ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(statements._all(), "epoch_patience", b"SELECT set_config('lock_timeout', '50ms', true)")
    with Leader(ledger, "plain") as leader, psycopg.connect(ledger, autocommit=True) as conn:
        with fenced(conn, leader.win()), pytest.raises(SchemaError, match="held the lock for too long"):
            await advance_epoch(ledger, "plain", namespace="pgleaderlock", channel="test")
        assert await advance_epoch(ledger, "plain", namespace="pgleaderlock", channel="test") == (1, 2**20)


async def test_migrate_through_other_connection_settings_still_names_its_own_database(empty: str) -> None:
    # A DSN may be a callable, asked when it is needed.
    assert await migrate(lambda: make_conninfo(empty, application_name="mine")) == VERSIONS
