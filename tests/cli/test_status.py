"""`pgleaderlock status`: who holds a lock, as far as this role may see, on whatever answers."""

import asyncio
import contextlib
import datetime as dt
import json
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartPooler, StartServer
from pgleaderlock import key_pair
from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import ConnectionError
from support.elections import fresh_database
from support.program import command, running
from support.proxy import Proxy
from support.server_side import frozen
from support.servers import open_folder


@pytest.fixture
def name() -> str:
    """A lock that no other test knows."""
    return f"status-{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def held(dsn: str, keys: tuple[int, int], function: str = "pg_advisory_lock") -> Iterator[int]:
    """Somebody holds the lock; gives the backend's pid."""
    with psycopg.connect(dsn, autocommit=True, application_name="the holder") as holder:
        holder.execute(f"SELECT {function}(%s, %s)", keys)
        yield holder.info.backend_pid


def test_a_held_lock_exits_0_and_shows_who_where_and_since_when(dsn: str, name: str) -> None:
    with held(dsn, key_pair(name)) as pid:
        done = command("status", "--name", name, "--dsn", dsn)
    assert (done.code, done.err) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in done.out.splitlines() if len(line.split(maxsplit=1)) == 2)
    key1, key2 = key_pair(name)
    assert shown["lock"] == f"{name} ({key1} / {key2})"
    assert f"pid {pid}" in done.out
    assert shown["application"] == "the holder"
    assert shown["client"].startswith("127.0.0.1 port ")
    # Neither is when the lock was granted: each is called by what it is.
    assert "(backend_start)" in shown["session"]
    assert "(state_change)" in shown["last"]
    assert shown["waiting"] == "0 at the server"
    assert "not a promise" in done.out


def test_a_free_lock_exits_1(dsn: str, name: str) -> None:
    done = command("status", "--name", name, "--dsn", dsn)
    assert (done.code, done.err) == (1, "")
    assert "nobody" in done.out


def test_json_is_one_object_with_times_that_programs_can_read(dsn: str, name: str) -> None:
    before = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=1)
    with held(dsn, key_pair(name)) as pid:
        done = command("status", "--name", name, "--dsn", dsn, "--json")
    assert done.code == 0
    view = json.loads(done.out)
    assert (view["held"], view["standby"], view["waiting"], view["authoritative"]) == (True, False, 0, False)
    assert view["lock"] == dict(zip(("key1", "key2"), key_pair(name), strict=True)) | {
        "name": name,
        "namespace": "pgleaderlock",
    }
    (holder,) = view["holders"]
    assert (holder["pid"], holder["application_name"], holder["client_addr"]) == (pid, "the holder", "127.0.0.1")
    assert dt.datetime.fromisoformat(holder["backend_start"]) > before
    nobody = command("status", "--name", f"{name}-free", "--dsn", dsn, "--json")
    assert (nobody.code, json.loads(nobody.out)["held"], json.loads(nobody.out)["holders"]) == (1, False, [])


def test_those_who_wait_at_the_server_are_counted_and_shown(dsn: str, name: str) -> None:
    with held(dsn, key_pair(name)), contextlib.ExitStack() as waiters:
        pids = []
        for number in range(2):
            waiter = waiters.enter_context(
                contextlib.closing(psycopg.connect(dsn, autocommit=True, application_name=f"waiter {number}"))
            )
            pids.append(waiter.info.backend_pid)
            # Sent and not waited for.
            waiter.pgconn.send_query("SELECT pg_advisory_lock({}, {})".format(*key_pair(name)).encode())
            _until_waiting(dsn, name, number + 1)
        view = json.loads(command("status", "--name", name, "--dsn", dsn, "--json").out)
        assert [waiter["pid"] for waiter in view["waiters"]] == pids
        assert all(waiter["waitstart"] for waiter in view["waiters"])
        done = command("status", "--name", name, "--dsn", dsn)
        assert "2 at the server" in done.out
        assert "waitstart" in done.out
        assert "waiter 1" in done.out


def _until_waiting(dsn: str, name: str, wanted: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as look:
        for _ in range(1000):
            row = look.execute(
                "SELECT count(*), pg_sleep(0.01) FROM pg_locks WHERE NOT granted AND waitstart IS NOT NULL"
                " AND locktype = 'advisory' AND objid::bigint = %s",
                (key_pair(name)[1] & 0xFFFFFFFF,),
            ).fetchone()
            assert row is not None
            if row[0] == wanted:
                return
    pytest.fail("nobody waits")


@pytest.mark.parametrize("keys", [(-1, -2147483648), (2147483647, 0)])
def test_keys_at_the_ends_of_the_range_are_found(dsn: str, keys: tuple[int, int]) -> None:
    with held(dsn, keys) as pid:
        done = command("status", "--key1", str(keys[0]), "--key2", str(keys[1]), "--dsn", dsn, "--json")
    assert done.code == 0
    assert json.loads(done.out)["holders"][0]["pid"] == pid


def test_the_same_number_as_one_big_key_is_another_lock(dsn: str, name: str) -> None:
    key1, key2 = key_pair(name)
    with psycopg.connect(dsn, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(%s::bigint)", ((key1 << 32) | (key2 & 0xFFFFFFFF),))
        assert command("status", "--name", name, "--dsn", dsn).code == 1


def test_a_lock_of_another_database_is_not_shown(dsn: str, name: str) -> None:
    with held(make_conninfo(dsn, dbname="template1"), key_pair(name)):
        assert command("status", "--name", name, "--dsn", dsn).code == 1


def test_all_holders_of_a_shared_lock_are_shown_as_such(dsn: str, name: str) -> None:
    keys = key_pair(name)
    with held(dsn, keys, "pg_advisory_lock_shared") as one, held(dsn, keys, "pg_advisory_lock_shared") as two:
        done = command("status", "--name", name, "--dsn", dsn)
    assert f"pid {one} (shared)" in done.out
    assert f"pid {two} (shared)" in done.out


def test_a_plain_role_sees_who_holds_it_and_is_told_what_is_hidden(dsn: str, name: str) -> None:
    role = f"status_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        try:
            with held(dsn, key_pair(name)) as pid:
                done = command("status", "--name", name, "--dsn", make_conninfo(dsn, user=role, password="x"))
        finally:
            admin.execute(f"DROP ROLE {role}")
    assert done.code == 0
    assert f"pid {pid}" in done.out
    assert "the holder" in done.out
    assert done.out.count("pg_read_all_stats") == 3


@pytest.mark.parametrize("mode", ["session", "transaction", "statement"])
def test_it_answers_through_a_pooler(dsn: str, name: str, pgbouncer: StartPooler, mode: str) -> None:
    through = pgbouncer(dsn, mode)  # type: ignore[arg-type]
    with held(dsn, key_pair(name)) as pid:
        done = command("status", "--name", name, "--dsn", through)
    assert done.code == 0
    assert f"pid {pid}" in done.out


async def test_a_standby_says_that_it_is_one_and_does_not_answer_nobody(
    throwaway_postgres: StartServer, name: str
) -> None:
    primary = throwaway_postgres()
    with open_folder() as folder:
        replica = await asyncio.to_thread(primary.make_replica, Path(folder) / "replica")
        try:
            with held(primary.dsn, key_pair(name)):
                done = command("status", "--name", name, "--dsn", replica.dsn)
                view = json.loads(command("status", "--name", name, "--dsn", replica.dsn, "--json").out)
        finally:
            await asyncio.to_thread(replica.close)
    assert done.code == 2
    assert "standby" in done.out
    assert "nobody" not in done.out
    assert "ask the primary" in done.err
    assert (view["standby"], view["held"]) == (True, None)


def test_a_frozen_server_is_not_waited_for_for_ever(throwaway_postgres: StartServer, name: str) -> None:
    server = throwaway_postgres()
    with frozen(server):
        done = command("status", "--name", name, "--dsn", make_conninfo(server.dsn, connect_timeout="2"))
    assert done.code == 2
    assert "does not answer" in done.err


@pytest.mark.parametrize("columns", ["60", "80"])
def test_no_line_is_wider_than_the_terminal_and_none_is_padded(dsn: str, name: str, columns: str) -> None:
    with held(dsn, key_pair(name)):
        done = command("status", "--name", name, "--dsn", dsn, env={"COLUMNS": columns})
    table = done.out[: done.out.index("A look")].splitlines()
    assert max(map(len, table)) <= int(columns)
    assert all(line == line.rstrip() for line in table)
    assert "\x1b" not in done.out


def test_what_comes_from_the_database_is_not_taken_as_markup(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True, application_name="[bold]x[/] :smile:") as holder:
        holder.execute("SELECT pg_advisory_lock(%s, %s)", key_pair(name))
        assert "[bold]x[/] :smile:" in command("status", "--name", name, "--dsn", dsn).out


async def test_a_server_that_falls_silent_in_mid_question_is_given_up(dsn: str, proxy: Proxy) -> None:
    async with await PlainConnection.open(proxy.dsn_for(dsn), "status test") as look:
        look.answer_timeout_s = 0.2
        proxy.cut()
        with pytest.raises(ConnectionError, match=r"did not answer within 0\.2 s"):
            await look.rows("probe")
        # A question that went on waiting would hold up the end of the program.
        assert not [task for task in asyncio.all_tasks() if "execute" in repr(task.get_coro())]
    proxy.heal()


EVIL = "a\x1b[31mred\u202e\x07"


def test_what_the_ledger_says_cannot_write_to_the_terminal(postgres: EmbeddedPostgres, name: str) -> None:
    with fresh_database(postgres.dsn, ledger=True) as ledger:
        with psycopg.connect(ledger, autocommit=True) as conn:
            conn.execute(
                "INSERT INTO pgleaderlock.slots (namespace, name, slot, epoch, holder_identity, outcome, detail)"
                " VALUES ('pgleaderlock.once', %s, %s, 1, %s, 'failed', %s)",
                (name, EVIL, EVIL, EVIL),
            )
            conn.execute(
                "INSERT INTO pgleaderlock.leaders (namespace, role, epoch, ended, clean)"
                " VALUES ('pgleaderlock', %s, 1, true, true)",
                (EVIL,),
            )
            conn.execute(
                "INSERT INTO pgleaderlock.events (kind, namespace, role, detail)"
                " VALUES ('expired', 'pgleaderlock', %s, %s)",
                (EVIL, EVIL),
            )
        for args in (("status", "--name", name), ("history", "--slots"), ("roles",), ("events",), ("watch",)):
            said = watched(ledger) if args == ("watch",) else command(*args, "--dsn", ledger).out
            assert "red" in said, args
            assert not set(said) & {"\x1b", "\u202e", "\x07"}, args


def watched(dsn: str) -> str:
    with running("watch", "--dsn", dsn) as program:
        program.until("red", "out")
        program.signal(signal.SIGINT)
        program.end()
        return program.out
