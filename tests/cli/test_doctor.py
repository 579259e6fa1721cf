"""`pgleaderlock doctor`: each thing that would break the promise is found, and nothing is changed by looking."""

import asyncio
import contextlib
import json
import os
import pty
import re
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import StartPooler, StartServer
from pgleaderlock._config.timing import LockTiming
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.cli import app
from pgleaderlock.cli.doctor import (
    Finding,
    Setting,
    Verdict,
    check_clock,
    check_encryption,
    check_engine,
    check_lease,
    check_round_trip,
    check_timeouts,
    check_version,
)
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.migrate import migrate
from support.pgbouncer import PoolMode
from support.program import command, environment
from support.proxy import Proxy
from support.servers import open_folder, throwaway, wait_until_nothing_left

SOUND = {"fsync": "on", "full_page_writes": "on"}
TIMING = LockTiming(health_interval_s=5, health_timeout_s=5, lease_s=15)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server with nothing to complain about, unlike the usual ones of the tests."""
    with throwaway(SOUND) as running:
        yield running


@pytest.fixture
def sound(server: EmbeddedPostgres) -> Iterator[str]:
    """Its DSN; fails a test whose doctor leaves a session or a lock behind."""
    yield server.dsn
    assert wait_until_nothing_left(server.dsn) == []


@pytest.fixture
def role(server: EmbeddedPostgres) -> Iterator[str]:
    """A plain role; gives its DSN."""
    name = f"doctor_{uuid.uuid4().hex[:12]}"
    run_sql(server.dsn, f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    yield make_conninfo(server.dsn, user=name, password="x")
    run_sql(server.dsn, f"DROP ROLE {name}")


def run_sql(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        for statement in statements:
            admin.execute(statement)


def name_of(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["user"])


def examine(dsn: str, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the findings by check."""
    done = command("doctor", "--dsn", dsn, "--json", *options)
    assert done.err == ""
    report = json.loads(done.out)
    findings = {finding["check"]: finding for finding in report["findings"]}
    assert len(findings) == len(report["findings"])
    assert all(finding["remedy"] for finding in findings.values() if finding["verdict"] != "ok")
    worst = {finding["verdict"] for finding in findings.values()}
    assert report["verdict"] == next(verdict for verdict in ("unsafe", "warning", "ok") if verdict in worst)
    assert (done.code == 1) == (report["verdict"] == "unsafe")
    return done.code, findings


# --- A sound database


def test_a_sound_database_exits_0_with_nothing_to_complain_about(sound: str) -> None:
    code, findings = examine(sound)
    assert code == 0
    assert {finding["verdict"] for finding in findings.values()} == {"ok"}
    assert "taken, probed and released" in findings["rehearsal"]["found"]
    assert "connected in" in findings["reachable"]["found"]


def test_a_plain_role_on_a_sound_database_is_told_what_it_cannot_see(role: str) -> None:
    code, findings = examine(role)
    assert code == 0
    assert {finding["verdict"] for finding in findings.values()} == {"ok"}
    assert "pg_read_all_stats" in findings["may see locks"]["found"]


# --- What a DBA can set


def test_fsync_off_is_unsafe_and_full_page_writes_off_a_warning(dsn: str) -> None:
    code, findings = examine(dsn)
    assert (code, findings["fsync"]["verdict"]) == (1, "unsafe")
    assert findings["full_page_writes"]["verdict"] == "warning"


def test_synchronous_commit_off_is_a_warning_that_names_its_origin(role: str, server: EmbeddedPostgres) -> None:
    run_sql(server.dsn, f"ALTER ROLE {name_of(role)} SET synchronous_commit = off")
    code, findings = examine(role)
    assert (code, findings["synchronous_commit"]["verdict"]) == (0, "warning")
    assert "ALTER ROLE" in findings["synchronous_commit"]["found"]


@pytest.mark.parametrize(
    "timeout", ["idle_session_timeout", "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"]
)
def test_a_timeout_of_the_dba_that_ours_overrides_is_only_mentioned(
    role: str, server: EmbeddedPostgres, timeout: str
) -> None:
    run_sql(server.dsn, f"ALTER ROLE {name_of(role)} SET {timeout} = '7s'")
    code, findings = examine(role)
    assert code == 0
    assert findings[timeout]["verdict"] == "ok"
    assert findings[timeout]["found"] == "7 s, set by ALTER ROLE; ours overrides it"


def test_a_timeout_that_ours_does_not_reach_is_unsafe() -> None:
    dba = {"idle_session_timeout": Setting("7000", "ms", "user")}
    (finding,) = check_timeouts(dba, dba, TIMING)
    assert finding.verdict is Verdict.UNSAFE


def test_a_transaction_timeout_shorter_than_a_statement_is_unsafe(role: str, server: EmbeddedPostgres) -> None:
    if int(server.version.split(".")[0]) < 17:
        (finding,) = check_timeouts({"transaction_timeout": Setting("1000", "ms", "user")}, {}, TIMING)
        assert finding.verdict is Verdict.UNSAFE
        return
    run_sql(server.dsn, f"ALTER ROLE {name_of(role)} SET transaction_timeout = '1s'")
    code, findings = examine(role)
    assert (code, findings["transaction_timeout"]["verdict"]) == (1, "unsafe")
    code, findings = examine(role, "--health-interval", "800ms", "--health-timeout", "800ms")
    assert (code, findings["transaction_timeout"]["verdict"]) == (0, "ok")


def test_a_timeout_in_the_dsn_that_cuts_off_a_slow_answer_is_a_warning(sound: str) -> None:
    code, findings = examine(make_conninfo(sound, options="-c statement_timeout=100"))
    assert (code, findings["statement_timeout"]["verdict"]) == (0, "warning")
    assert "DSN" in findings["statement_timeout"]["found"]


def test_a_tiny_deadlock_timeout_makes_hot_standbys_poll(role: str, server: EmbeddedPostgres) -> None:
    run_sql(server.dsn, f"ALTER ROLE {name_of(role)} SET deadlock_timeout = '20ms'")
    assert examine(role)[1]["deadlock_timeout"]["verdict"] == "warning"


# --- Rights and room


@contextlib.contextmanager
def revoked(dsn: str, function: str) -> Iterator[None]:
    run_sql(dsn, f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC")
    try:
        yield
    finally:
        run_sql(dsn, f"GRANT EXECUTE ON FUNCTION {function} TO PUBLIC")


def test_a_role_that_may_not_lock_is_unsafe_and_the_rehearsal_shows_it(role: str, server: EmbeddedPostgres) -> None:
    with revoked(server.dsn, "pg_try_advisory_lock(int, int)"):
        code, findings = examine(role)
    assert (code, findings["may take locks"]["verdict"]) == (1, "unsafe")
    assert f'TO "{name_of(role)}"' in findings["may take locks"]["remedy"]
    assert "permission denied" in findings["rehearsal"]["found"]


def test_a_role_that_may_not_end_its_own_session_is_warned(role: str, server: EmbeddedPostgres) -> None:
    with revoked(server.dsn, "pg_terminate_backend(int, bigint)"):
        code, findings = examine(role)
    assert (code, findings["may end own sessions"]["verdict"]) == (0, "warning")


def test_a_role_without_room_for_a_second_connection_is_unsafe(role: str, server: EmbeddedPostgres) -> None:
    run_sql(server.dsn, f"ALTER ROLE {name_of(role)} CONNECTION LIMIT 1")
    code, findings = examine(role)
    assert (code, findings["connections"]["verdict"]) == (1, "unsafe")
    assert "the role" in findings["connections"]["found"]


def test_a_lock_table_that_is_nearly_full_is_unsafe(throwaway_postgres: StartServer) -> None:
    small = throwaway_postgres(**SOUND, max_locks_per_transaction="10", max_connections="20")
    with psycopg.connect(small.dsn, autocommit=True) as hoarder:
        hoarder.execute("SELECT pg_advisory_lock(number) FROM generate_series(1, 190) number")
        code, findings = examine(small.dsn)
        assert (code, findings["lock slots"]["verdict"]) == (1, "unsafe")
        hoarder.execute("SELECT pg_advisory_unlock_all()")
        assert examine(small.dsn)[1]["lock slots"]["verdict"] == "ok"


# --- The way there


@pytest.mark.parametrize("mode", ["session", "transaction", "statement"])
def test_a_pooler_is_diagnosed_in_every_mode(sound: str, mode: PoolMode, pgbouncer: StartPooler) -> None:
    code, findings = examine(pgbouncer(sound, mode))
    assert (code, findings["pooler"]["verdict"]) == (1, "unsafe")
    assert "startup options are refused" in findings["pooler"]["found"]
    assert "protocol's pid" in findings["pooler"]["found"]
    assert ("backends are shared" in findings["pooler"]["found"]) == (mode != "session")
    # The rest of the report is there all the same.
    assert findings["fsync"]["found"] == "on"
    assert "rehearsal" not in findings


def test_a_pooler_that_drops_our_settings_in_silence_is_found_by_its_pid(sound: str, pgbouncer: StartPooler) -> None:
    code, findings = examine(pgbouncer(sound, "transaction", ignore_startup_parameters="options"))
    assert (code, findings["pooler"]["verdict"]) == (1, "unsafe")
    assert "startup options" not in findings["pooler"]["found"]


def test_an_allowed_pooler_is_rehearsed_in_session_mode_and_unsafe_otherwise(
    sound: str, pgbouncer: StartPooler
) -> None:
    code, findings = examine(pgbouncer(sound, "session"), "--allow-pooler")
    assert (code, findings["pooler"]["verdict"], findings["rehearsal"]["verdict"]) == (0, "warning", "ok")
    code, findings = examine(pgbouncer(sound, "transaction"), "--allow-pooler")
    assert (code, findings["pooler"]["verdict"]) == (1, "unsafe")


def test_nothing_is_changed_on_a_backend_that_others_will_use(sound: str, pgbouncer: StartPooler) -> None:
    through = pgbouncer(sound, "transaction", default_pool_size="2")

    def settings() -> set[tuple[str, str]]:
        # Two transactions at once: both backends of the pool.
        with psycopg.connect(through) as one, psycopg.connect(through) as two:
            return {
                (name, str(value))
                for connection in (one, two)
                for name, value in connection.execute(
                    "SELECT name, setting FROM pg_settings WHERE name ~ 'timeout$|^default_transaction'"
                ).fetchall()
            }

    before = settings()
    examine(through, "--allow-pooler")
    assert settings() == before


async def test_a_standby_is_unsafe(throwaway_postgres: StartServer) -> None:
    primary = throwaway_postgres(**SOUND)
    with open_folder() as folder:
        replica = await asyncio.to_thread(primary.make_replica, Path(folder) / "replica")
        try:
            code, findings = examine(replica.dsn)
        finally:
            await asyncio.to_thread(replica.close)
    assert (code, findings["primary"]["verdict"]) == (1, "unsafe")
    assert "primary" in findings["primary"]["remedy"]


async def test_a_round_trip_slower_than_the_health_timeout_is_unsafe(
    sound: str, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(sound)
    proxy.delay_s = 0.03
    quick = ("--health-interval", "1s", "--health-timeout", "50ms")
    code, findings = await asyncio.to_thread(examine, proxy.dsn_for(sound), *quick)
    assert (code, findings["round trip"]["verdict"]) == (1, "unsafe")


@pytest.mark.parametrize(
    ("slowest_s", "verdict"),
    [(1.2, Verdict.OK), (1.25, Verdict.WARNING), (4.9, Verdict.WARNING), (5.0, Verdict.UNSAFE)],
)
def test_the_slowest_round_trip_is_compared_with_the_health_timeout(slowest_s: float, verdict: Verdict) -> None:
    assert check_round_trip([0.001, slowest_s, 0.001], TIMING).verdict is verdict


@pytest.mark.parametrize(
    ("address", "encrypted", "sslmode", "verdict"),
    [
        ("192.0.2.1", False, None, Verdict.WARNING),
        ("192.0.2.1", True, None, Verdict.WARNING),
        ("192.0.2.1", True, "prefer", Verdict.WARNING),
        ("192.0.2.1", True, "verify-full", Verdict.OK),
        ("fe80::1%eth0", False, None, Verdict.WARNING),
        ("127.0.0.1", False, None, Verdict.OK),
        ("::1", False, None, Verdict.OK),
        ("", False, None, Verdict.OK),
    ],
)
def test_only_a_connection_that_leaves_the_machine_needs_encryption(
    address: str, encrypted: bool, sslmode: str | None, verdict: Verdict
) -> None:
    assert check_encryption(address=address, encrypted=encrypted, sslmode=sslmode).verdict is verdict


def test_it_works_through_a_socket(server: EmbeddedPostgres) -> None:
    code, findings = examine(server.socket_dsn)
    assert code == 0
    assert "stays on this machine" in findings["encryption"]["found"]


def test_a_server_before_14_is_unsafe() -> None:
    assert check_version({"version": "13.18", "version_num": 130018}).verdict is Verdict.UNSAFE
    assert check_version({"version": "14.0", "version_num": 140000}) == Finding("version", "PostgreSQL 14.0")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"port": "1"}, "refused"),
        ({"host": "no-such-host.invalid"}, "dns"),
        ({"password": "wrong"}, "password"),
        ({"dbname": "no_such_database"}, "database"),
        ({"user": "no_such_role"}, "password"),
        ({"sslmode": "require"}, "tls"),
    ],
)
def test_a_database_that_cannot_be_reached_exits_2_with_the_reason(
    dsn: str, change: dict[str, str], reason: str
) -> None:
    broken = make_conninfo(dsn, **change)
    done = command("doctor", "--dsn", broken, "--json")
    assert (done.code, done.err) == (2, "")
    report = json.loads(done.out)
    assert (report["verdict"], report["reason"]) == ("unreachable", reason)
    done = command("doctor", "--dsn", broken)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line == f"error: {report['error']}"
    assert str(conninfo_to_dict(dsn)["password"]) not in line


def test_settings_that_contradict_each_other_exit_2(dsn: str) -> None:
    done = command("doctor", "--dsn", dsn, "--session-lease", "1s")
    assert done.code == 2
    assert "--session-lease=1 must be longer" in done.err


# --- How it looks


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_table_fits_the_terminal_and_shows_each_remedy(dsn: str, columns: int) -> None:
    done = command("doctor", "--dsn", dsn, env={"COLUMNS": str(columns)})
    assert done.code == 1
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in done.out
    words = " ".join(done.out.split())
    assert "set fsync = on" in words
    assert re.search(r"1 unsafe, \d+ warnings?, \d+ ok", words)


@pytest.mark.parametrize(("env", "coloured"), [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)])
def test_colour_is_for_terminals_without_no_color(dsn: str, env: dict[str, str], coloured: bool) -> None:
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", _in_terminal(["doctor", "--dsn", dsn], env))) == coloured


def _in_terminal(args: list[str], env: dict[str, str]) -> str:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "pgleaderlock", *args], environment(env))
    said = b""
    # The end of the other side is an error on this one.
    with contextlib.suppress(OSError):
        while chunk := os.read(terminal, 4096):
            said += chunk
    os.close(terminal)
    os.waitpid(pid, 0)
    return said.decode()


# -- exclusion, and the nodes of a configuration ----------------------------------------------------------------------


def test_a_second_session_is_really_refused(sound: str) -> None:
    assert examine(sound)[1]["exclusion"]["found"] == "a second session was refused the same lock"


def test_a_server_whose_locks_exclude_nobody_is_unsafe(
    sound: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def granted(*_: object) -> bool:
        return True

    monkeypatch.setattr(DedicatedSession, "take", granted)
    monkeypatch.setattr(DedicatedSession, "unlock", granted)
    assert app.run(["doctor", "--json", "--dsn", sound]) == 1
    found = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert (found["exclusion"]["verdict"], "granted the same lock" in found["exclusion"]["found"]) == ("unsafe", True)


def configured(tmp_path: Path, dsn: str, more: str = "") -> dict[str, Any]:
    file = tmp_path / "node.toml"
    file.touch(mode=0o600)
    file.write_text(f"[cluster.leader_election]\ndsn = {json.dumps(dsn)}\n{more}[roles.billing]\n", encoding="utf-8")
    done = command("doctor", "--json", "--config", str(file))
    assert done.code in (0, 1), done
    return {finding["check"]: finding for finding in json.loads(done.out)["findings"]}


def test_with_a_configuration_ledger_grants_timing_and_clock_are_checked(
    role: str, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    name = name_of(role)
    without = configured(tmp_path, role)
    assert (without["ledger"]["verdict"], "no ledger" in without["ledger"]["found"]) == ("unsafe", True)
    asyncio.run(migrate(server.dsn, grant_to=name))
    try:
        found = configured(tmp_path, role, 'refresh_interval = "2s"\n')
        assert {found[check]["verdict"] for check in ("ledger", "grants", "timing", "clock", "exclusion")} == {"ok"}
        assert found["timing"]["found"] == "heartbeat every 2 s, G 4 s, T 5 s"
        assert "health every 2 s" in found["round trip"]["found"]
        run_sql(server.dsn, f"REVOKE EXECUTE ON FUNCTION pgleaderlock.heartbeat FROM {name}")
        less = configured(tmp_path, role)
        assert (less["grants"]["verdict"], less["grants"]["found"]) == ("unsafe", f"{name} may not call heartbeat")
        assert f"--grant-to {name}" in less["grants"]["remedy"]
    finally:
        run_sql(server.dsn, f"DROP SCHEMA pgleaderlock CASCADE; DROP OWNED BY {name}")


def test_a_configuration_that_holds_by_leases_is_rehearsed_with_two_of_them_through_a_transaction_pooler(
    role: str, server: EmbeddedPostgres, tmp_path: Path, pgbouncer: StartPooler
) -> None:
    name, pooled = name_of(role), pgbouncer(role, "transaction")
    asyncio.run(migrate(server.dsn, grant_to=name))
    try:
        found = configured(tmp_path, pooled, 'hold = "lease"\n')
        assert {found[check]["verdict"] for check in ("pooler", "ledger", "grants", "rehearsal")} == {"ok"}
        assert "hold=lease needs no session" in found["pooler"]["found"]
        assert "a second one was refused it" in found["rehearsal"]["found"]
        assert "PgBouncer, `pool_mode = transaction`" in found["engine"]["found"]
        with psycopg.connect(server.dsn) as admin:
            left = "SELECT count(*) FROM pgleaderlock.sessions UNION ALL SELECT count(*) FROM pgleaderlock.leaders"
            assert admin.execute(left).fetchall() == [(0,), (0,)]
        session = configured(tmp_path, pooled)
        assert (session["pooler"]["verdict"], "hold=lease" in session["pooler"]["remedy"]) == ("unsafe", True)
        run_sql(server.dsn, "DELETE FROM pgleaderlock.schema_version WHERE version = 5")
        old = configured(tmp_path, pooled, 'hold = "lease"\n')
        assert (old["ledger"]["verdict"], "needs version 5" in old["ledger"]["remedy"]) == ("unsafe", True)
        assert "rehearsal" not in old
    finally:
        run_sql(server.dsn, f"DROP SCHEMA pgleaderlock CASCADE; DROP OWNED BY {name}")


def test_leases_that_exclude_nobody_are_unsafe() -> None:
    assert check_lease(None, ["won", "won"], 0.1).verdict is Verdict.UNSAFE
    assert check_lease("no", [], 0.1).verdict is Verdict.UNSAFE


@pytest.mark.parametrize(
    ("version", "families", "row"),
    [
        ("PostgreSQL 18.1 on x86_64-pc-linux-gnu", [], "PostgreSQL 18"),
        ("PostgreSQL 15.14 (Debian 15.14-0+deb12u1)", ["plpgsql"], "PostgreSQL 15"),
        ("PostgreSQL 17.5", [], "PostgreSQL 14, 16, 17"),
        ("PostgreSQL 16.4", ["rds"], "Amazon RDS for PostgreSQL"),
        ("PostgreSQL 16.4", ["aurora", "rds"], "Amazon Aurora PostgreSQL"),
        ("PostgreSQL 16.4", ["cloudsql"], "Google Cloud SQL, AlloyDB"),
        ("PostgreSQL 16.4", ["azure"], "Azure Database for PostgreSQL"),
        ("PostgreSQL 17.5", ["neon"], "Neon, direct address"),
        ("PostgreSQL 17.5", ["citus"], "Citus"),
        ("PostgreSQL 15.2-YB-2.25.0.0-b0", ["yb"], "YugabyteDB"),
        ("CockroachDB CCL v25.1.0", [], "CockroachDB, Aurora DSQL"),
    ],
)
def test_the_engine_is_named_as_in_the_page_of_engines(version: str, families: list[str], row: str) -> None:
    assert check_engine(version, families, None).found == f"see docs/engines.md, {row}"
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"\n| {row} |" in page
    assert "PgBouncer, `pool_mode = session`" in check_engine(version, families, "session").found


def test_timing_is_given_once(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("[cluster.leader_election]\n")
    args = ("--config", str(tmp_path / "node.toml"), "--health-interval", "1s", "--dsn", "host=127.0.0.1 port=1")
    done = command("doctor", *args)
    assert (done.code, "--health-interval is what the configuration says" in done.err) == (2, True)


@pytest.mark.parametrize(("ahead_s", "verdict"), [(0.3, "ok"), (-0.9, "ok"), (5.0, "warning"), (-5.0, "warning")])
def test_a_clock_that_differs_is_a_warning(ahead_s: float, verdict: str) -> None:
    finding = check_clock(ahead_s, 0.01)
    assert finding.verdict == verdict
    assert ("ahead" if ahead_s > 0 else "behind") in finding.found
