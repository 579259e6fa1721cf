"""`pgleaderlock run`: says everything, ends as asked, and gives up only on what waiting cannot mend."""

import asyncio
import inspect
import json
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import StartPooler, StartServer
from pgleaderlock import ExponentialBackoff, LeaderLock, key_pair
from pgleaderlock.cli.run import run
from support.program import command, running
from support.server_side import connections_named, frozen, terminate, until_held_by, until_waited_for
from support.servers import open_folder, throwaway

SECRET = "s3cret-Pa55"


@pytest.fixture
def name() -> str:
    """A lock that no other test knows."""
    return f"run-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def plain_role(dsn: str) -> Iterator[str]:
    """The DSN of a role that may do nothing but log in, with a password of its own."""
    role = f"run_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{SECRET}'")
    yield make_conninfo(dsn, user=role, password=SECRET)
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"DROP ROLE {role}")


# --- What it says


def test_each_change_of_state_and_each_callback_is_logged(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn) as leader:
        leader.until("on_acquired")
        with running("run", "--name", name, "--dsn", dsn) as follower:
            follower.until("on_acquire_failed")
        leader.signal(signal.SIGTERM)
        assert leader.end() == 0
    changes = re.findall(r"state_change from=(\w+) to=(\w+)", leader.err)
    assert changes == [
        ("stopped", "follower"),
        ("follower", "acquiring"),
        ("acquiring", "leader"),
        ("leader", "releasing"),
        ("releasing", "stopped"),
    ]
    assert re.findall(r"\bon_\w+", leader.err) == ["on_acquired", "on_released", "on_stopped"]
    key1, key2 = key_pair(name)
    assert f"key1={key1} key2={key2}" in leader.err
    assert leader.out == ""


def test_the_json_log_is_one_object_a_line_with_the_same_fields(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn, "--log-format", "json") as node:
        node.until("on_acquired")
        node.signal(signal.SIGTERM)
        assert node.end() == 0
    lines = [json.loads(line) for line in node.err.splitlines()]
    (acquired,) = [line for line in lines if line.get("event") == "on_acquired"]
    assert (acquired["level"], acquired["lock"]) == ("INFO", name)
    states = [line["to"] for line in lines if line.get("event") == "state_change"]
    assert states == ["follower", "acquiring", "leader", "releasing", "stopped"]


async def test_the_log_level_hides_what_is_below_it(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn, "--log-level", "warning", "--no-auto-reacquire") as node:
        await until_held_by(dsn, key_pair(name), 1)
        terminate(dsn, key_pair(name))
        assert node.end() == 76
    assert "on_lost" in node.err
    assert "INFO" not in node.err


def test_the_session_carries_the_locks_name(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn) as node:
        node.until("on_acquired")
        assert connections_named(dsn, f"pgleaderlock {name} %") == 1


def test_a_name_in_another_namespace_is_another_lock(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn) as one:
        one.until("on_acquired")
        with running("run", "--name", name, "--namespace", "other", "--dsn", dsn) as two:
            two.until("on_acquired")
        key1, key2 = key_pair(name)
        with running("run", "--key1", str(key1), "--key2", str(key2), "--dsn", dsn) as three:
            three.until("on_acquire_failed")


@pytest.mark.parametrize("command_name", ["run", "acquire", "status", "doctor"])
def test_every_option_is_in_the_documentation(command_name: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = text.split(f"\n## {command_name}\n")[1].split("\n## ")[0]
    shared = text.split("\n## Options of several commands\n")[1].split("\n## ")[0]
    listed = re.findall(r"--[a-z0-9-]+", command(command_name, "--help").out)
    assert listed
    assert [option for option in set(listed) - {"--help"} if f"`{option}`" not in section + shared] == []


def test_the_defaults_are_the_librarys() -> None:
    given = {option.name: option.default for option in run.params}
    ours = {name: parameter.default for name, parameter in inspect.signature(LeaderLock).parameters.items()}
    assert given["health_interval"] == ours["health_interval_s"]
    assert given["standby_wait"] == ours["standby_wait_s"]
    strategy = ExponentialBackoff()
    assert (given["retry_base"], given["retry_max"]) == (strategy.base_s, strategy.max_s)
    for option in ("health_timeout", "session_lease", "reconnect_grace"):
        assert given[option] is None or repr(given[option]).startswith("Sentinel")
        assert ours[f"{option}_s"] is None


# --- How it ends


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_releases_the_lock_and_exits_0(dsn: str, name: str, signum: signal.Signals) -> None:
    with running("run", "--name", name, "--dsn", dsn) as node:
        node.until("on_acquired")
        node.signal(signum)
        assert node.end() == 0
        assert "on_released" in node.err
    assert command("status", "--name", name, "--dsn", dsn).code == 1


def test_a_signal_ends_a_node_that_cannot_even_connect(name: str) -> None:
    with running("run", "--name", name, "--dsn", "host=127.0.0.1 port=1") as node:
        node.until("on_error")
        node.signal(signal.SIGTERM)
        assert node.end() == 0


def test_a_second_signal_ends_at_once_although_the_server_is_frozen(throwaway_postgres: StartServer, name: str) -> None:
    server = throwaway_postgres()
    # A probe or a release would wait ten minutes for the server's answer.
    slow = ("--health-interval", "10m", "--health-timeout", "10m")
    with running("run", "--name", name, "--dsn", server.dsn, *slow) as node:
        node.until("on_acquired")
        with frozen(server):
            node.signal(signal.SIGTERM)
            node.until("stopping")
            node.signal(signal.SIGINT)
            assert node.end() == 128 + signal.SIGINT
        assert "to=stopped" not in node.err


def test_a_loss_without_reacquiring_exits_76(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn, "--no-auto-reacquire") as node:
        node.until("on_acquired")
        terminate(dsn, key_pair(name))
        assert node.end() == 76
        assert "on_lost" in node.err


def test_a_loss_with_reacquiring_leads_to_a_second_term(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn) as node:
        node.until("on_acquired")
        terminate(dsn, key_pair(name))
        node.until("on_lost")
        node.until("on_acquired", times=2)
        node.signal(signal.SIGTERM)
        assert node.end() == 0


def test_within_the_grace_a_cut_is_no_loss(dsn: str, name: str) -> None:
    with running("run", "--name", name, "--dsn", dsn, "--reconnect-grace", "30s") as node:
        node.until("on_acquired")
        terminate(dsn, key_pair(name))
        node.until("leadership_recovered")
        assert "on_lost" not in node.err


def test_a_hot_standby_takes_over_from_a_killed_leader_without_another_try(dsn: str, name: str) -> None:
    patient = ("--retry-base", "1h", "--retry-max", "1h", "--standby-wait", "1h")
    with running("run", "--name", name, "--dsn", dsn) as leader:
        leader.until("on_acquired")
        with running("run", "--name", name, "--dsn", dsn, *patient) as standby:
            standby.until("on_acquire_failed")
            asyncio.run(until_waited_for(dsn, key_pair(name)))
            leader.signal(signal.SIGKILL)
            standby.until("on_acquired")
            assert standby.err.count("on_acquire_failed") == 1, "only the first try, which does not wait"


# --- Where the database is


def test_without_a_database_it_exits_2_and_says_what_to_do(name: str) -> None:
    done = command("run", "--name", name)
    assert done.code == 2
    assert all(word in done.err for word in ("--dsn", "PG_DSN", "PGHOST", "--embedded"))
    assert "Traceback" not in done.err


@pytest.mark.parametrize("how", ["PG_DSN", "libpq", "pasted"])
def test_the_database_comes_from_the_environment_and_from_a_sloppy_paste(dsn: str, name: str, how: str) -> None:
    parts = conninfo_to_dict(dsn)
    libpq = {f"PG{key.upper()}": str(parts[key]) for key in ("host", "port", "user", "password", "sslmode")}
    env = {"PG_DSN": {"PG_DSN": dsn}, "libpq": {**libpq, "PGDATABASE": str(parts["dbname"])}, "pasted": {}}[how]
    pasted = ("--dsn", f"  {dsn} \n") if how == "pasted" else ()
    with running("run", "--name", name, *pasted, env=env) as node:
        node.until("on_acquired")
        node.signal(signal.SIGTERM)
        assert node.end() == 0


def test_a_server_that_is_down_is_waited_for(name: str) -> None:
    with throwaway() as server:
        server.stop()
        with running("run", "--name", name, "--dsn", server.dsn, "--retry-base", "100ms", "--retry-max", "1s") as node:
            node.until("on_error")
            server.start()
            node.until("on_acquired")
            node.signal(signal.SIGTERM)
            assert node.end() == 0


def test_with_embedded_two_programs_share_a_private_server_that_ends_with_the_last(name: str) -> None:
    with open_folder() as folder:
        server = folder / "pg"
        # As root the folder is the machine's, and other programs may use it: this test takes one of its own.
        code = f"import pathlib, pgleaderlock.embedded as e; e.default_folder = lambda _: pathlib.Path({str(server)!r})"
        quick = ("--retry-base", "100ms", "--retry-max", "200ms")
        with running("run", "--name", name, "--embedded", code=code) as first:
            first.until("on_acquired")
            with running("run", "--name", name, "--embedded", *quick, code=code) as second:
                second.until("on_acquire_failed")
                first.signal(signal.SIGKILL)
                second.until("on_acquired")
                second.signal(signal.SIGTERM)
                assert second.end() == 0
        assert (server / "data").is_dir()
        assert not (server / "data" / "postmaster.pid").exists()


def test_embedded_and_dsn_exclude_each_other(dsn: str, name: str) -> None:
    done = command("run", "--name", name, "--embedded", "--dsn", dsn)
    assert done.code == 2
    assert "exclude each other" in done.err


# --- What no waiting mends


def test_a_wrong_password_exits_2_and_stays_secret(plain_role: str, name: str) -> None:
    _refused(name, make_conninfo(plain_role, password=f"wrong-{SECRET}"), "password")


def test_a_missing_database_exits_2(dsn: str, name: str) -> None:
    _refused(name, make_conninfo(dsn, dbname="no_such_database"), "check the database's name")


def test_no_right_to_connect_exits_2(dsn: str, plain_role: str, name: str) -> None:
    database = f"closed_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {database}")
        admin.execute(f"REVOKE CONNECT ON DATABASE {database} FROM PUBLIC")
    try:
        _refused(name, make_conninfo(plain_role, dbname=database), "GRANT CONNECT")
    finally:
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute(f"DROP DATABASE {database}")


def test_a_pooler_exits_2_and_names_the_option(dsn: str, name: str, pgbouncer: StartPooler) -> None:
    _refused(name, pgbouncer(dsn, "session"), "--allow-pooler")


def _refused(name: str, dsn: str, *words: str) -> None:
    done = command("run", "--name", name, "--dsn", dsn, "--log-level", "critical")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1
    assert all(word in done.err for word in words)
    assert SECRET not in done.out + done.err
    assert str(conninfo_to_dict(dsn)["password"]) not in done.err


def test_an_allowed_pooler_in_session_mode_is_used(dsn: str, name: str, pgbouncer: StartPooler) -> None:
    with running("run", "--name", name, "--dsn", pgbouncer(dsn, "session"), "--allow-pooler") as node:
        node.until("on_acquired")
        node.signal(signal.SIGTERM)
        assert node.end() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--name", "x", "--key1", "1", "--key2", "2"], "exclude each other"),
        (["--key1", "1"], "--key1 and --key2 belong together"),
        (["--key1", "2147483648", "--key2", "1"], "2147483647"),
        (["--key1", "x", "--key2", "1"], "not a valid integer"),
        ([], "--name NAME"),
        (["--name", ""], "must not be empty"),
        (["--name", "x", "--health-interval", "0"], "longer than zero"),
        (["--name", "x", "--health-interval", "5 parsecs"], "not a duration"),
        (["--name", "x", "--retry-base", "-1"], "not a duration"),
        (["--name", "x", "--retry-base", "3", "--retry-max", "2"], "--retry-max"),
        (["--name", "x", "--session-lease", "3s"], "--session-lease=3 must be longer than --health-interval"),
        (["--name", "x", "--log-format", "xml"], "'xml' is not one of"),
        (["--name", "x", "--log-level", "loud"], "is not one of"),
        (["--name", "x", "--no-such-option"], "No such option"),
        (["--name", "x", "--dsn", f"postgresql://u:{SECRET}@@h/d"], "%40"),
        (["--name", "x", "--dsn", f"host=h password={SECRET} nonsense"], "cannot be parsed"),
        (["--name", "x", "--dsn", "   "], "empty"),
        (["--name", "x", "--dsn", "host=h target_session_attrs=standby"], "standby"),
    ],
)
def test_bad_options_exit_2_and_say_what_is_right(options: list[str], words: str) -> None:
    done = command("run", *options, env={} if "--dsn" in options else {"PG_DSN": "host=127.0.0.1 port=1"})
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.lower().startswith("error: ")
    assert words in last
    assert SECRET not in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--name", "x", f"postgresql://user:{SECRET}@host/db"],
        ["run", "--name", "x", f"postgresql://user:a@b/{SECRET}@host/db"],
        ["run", "--name", "x", f"postgresql://host/db?password={SECRET}&user=x"],
        ["run", "--name", "x", "--dsn", "host=h", f"password={SECRET}", "dbname=d"],
        ["run", "--name", "x", f"host=h password='{SECRET} {SECRET}'"],
        [f"postgresql://user:{SECRET}@host/db"],
        ["run", "--name", "x", "--health-interval", f"postgresql://user:{SECRET}@host/db"],
        # The message cuts this one off within the password.
        ["run", "--name", "x", "--health-interval", f"postgresql://user:{SECRET}-and-much-more@host/db"],
    ],
)
def test_a_dsn_in_the_wrong_place_is_refused_without_its_password(words: list[str]) -> None:
    done = command(*words)
    assert done.code == 2
    assert "***" in done.err
    assert SECRET not in done.err
