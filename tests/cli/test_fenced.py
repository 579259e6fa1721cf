"""`run --fenced`, `exec --fenced`, and what `status` shows of the ledger. Real programs on a real server."""

import asyncio
import json
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgleaderlock import LeaderElection, LeaderLock, key_pair
from support.elections import HASTY, PATIENT, STEADY, SilentLeader, admin, fresh_database, ledger_dsns, one, opens
from support.program import Program, command, running
from support.server_side import holders, terminate
from support.servers import open_folder

# T is ten minutes: whoever has to wait for it does not open within a test.
SLOW = ("--health-interval", "100ms", "--late-threshold", "500s", "--session-lease", "600s")
QUICK = ("--health-interval", "100ms", "--late-threshold", "600ms", "--session-lease", "1s")


@pytest.fixture
def plain(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
def empty(dsn: str) -> Iterator[str]:
    """A database without a ledger."""
    with fresh_database(dsn) as found:
        yield found


@pytest.fixture
def name() -> str:
    return f"cli-{uuid.uuid4().hex[:12]}"


# --- run


def test_run_fenced_logs_epoch_and_gate_and_releases_cleanly(plain: str, superuser: str, name: str) -> None:
    with running("run", "--fenced", "--name", name, "--dsn", plain, *SLOW) as node:
        node.until("gate_open epoch=1")
        assert "on_acquired epoch=1" in node.err
        node.signal(signal.SIGTERM)
        assert node.end() == 0
    assert re.findall(r"\bon_\w+", node.err) == ["on_acquired", "on_released", "on_stopped"]
    assert "gate_shut reason=released" in node.err
    row = one(superuser, "SELECT epoch, clean, ended FROM pgleaderlock.leaders WHERE role = %s", name)
    assert row == {"epoch": 1, "clean": True, "ended": True}


def test_run_fenced_hands_over_at_once_and_says_who_leads(plain: str, name: str) -> None:
    args = ("run", "--fenced", "--name", name, "--dsn", plain, *SLOW)
    with running(*args) as first:
        first.until("gate_open")
        with running(*args) as second:
            second.until("gate_shut reason=never_led epoch=1")
            first.signal(signal.SIGTERM)
            assert first.end() == 0
            second.until("gate_open epoch=2")


def test_run_fenced_leads_but_waits_after_a_kill(plain: str, name: str) -> None:
    args = ("run", "--fenced", "--name", name, "--dsn", plain, *SLOW)
    with running(*args) as first:
        first.until("gate_open")
        with running(*args) as second:
            second.until("gate_shut")
            first.process.kill()
            second.until("on_acquired epoch=2")
            second.until("gate_shut reason=waiting epoch=2")
            second.signal(signal.SIGTERM)
            assert second.end() == 0
    assert "gate_open" not in second.err


@pytest.mark.parametrize("args", [("run",), ("exec", "--wait", "5s")])
def test_without_a_ledger_it_says_migrate_and_exits_2(empty: str, name: str, args: tuple[str, ...]) -> None:
    tail = ("--", "echo", "ran") if args[0] == "exec" else ()
    done = command(*args, "--fenced", "--name", name, "--dsn", empty, *tail)
    assert (done.code, done.out) == (2, "")
    assert "pgleaderlock migrate" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name", "n", "--health-timeout", "1s"), "--health-timeout"),
        (("--name", "n", "--retry-base", "1s"), "--retry-base"),
        (("--name", "n", "--retry-max", "1s"), "--retry-max"),
        (("--name", "n", "--reconnect-grace", "1s"), "--reconnect-grace"),
        (("--name", "n", "--no-auto-reacquire"), "--no-auto-reacquire"),
        (("--key1", "1", "--key2", "2"), "--name"),
        (("--name", "n", "--late-threshold", "1s"), "--late-threshold"),
        (("--name", "n", "--session-lease", "2s"), "--session-lease"),
        (("--name", "n", "--late-threshold", "0"), "zero"),
    ],
)
def test_options_that_do_not_fit_a_fenced_run_are_refused_by_name(options: tuple[str, ...], said: str) -> None:
    done = command("run", "--fenced", "--dsn", "host=127.0.0.1 port=1", *options)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize("args", [("run",), ("exec",)])
def test_the_late_threshold_belongs_to_fenced(args: tuple[str, ...], name: str) -> None:
    tail = ("--", "true") if args[0] == "exec" else ()
    done = command(*args, "--name", name, "--dsn", "host=127.0.0.1 port=1", "--late-threshold", "5s", *tail)
    assert done.code == 2
    assert "--fenced" in done.err


def test_what_only_a_person_can_change_ends_a_fenced_run(dsn: str, name: str) -> None:
    wrong = make_conninfo(dsn, dbname="there_is_no_such_database")
    done = command("run", "--fenced", "--name", name, "--dsn", wrong)
    assert done.code == 2
    assert "does not exist" in done.err


def test_a_server_that_is_away_is_retried_until_a_signal(name: str) -> None:
    with running("run", "--fenced", "--name", name, "--dsn", "host=127.0.0.1 port=1") as node:
        node.until("on_error", times=2)
        node.signal(signal.SIGINT)
        assert node.end() == 0


@pytest.mark.parametrize("args", [("run",), ("exec",)])
def test_with_an_embedded_server_the_ledger_is_made_by_itself(name: str, args: tuple[str, ...]) -> None:
    with open_folder() as folder:
        # As root the folder is the machine's, and other programs may use it: this test takes one of its own.
        server = str(folder / "pg")
        code = f"import pathlib, pgleaderlock.embedded as e; e.default_folder = lambda _: pathlib.Path({server!r})"
        tail = ("--", "sh", "-c", "echo gate_open epoch=$PGLEADERLOCK_EPOCH >&2") if args[0] == "exec" else ()
        with running(*args, "--fenced", "--embedded", "--name", name, *tail, code=code) as node:
            node.until("gate_open epoch=1")
            if not tail:
                node.signal(signal.SIGTERM)
            assert node.end() == 0


# --- exec


def exec_(dsn: str, name: str, *args: str, timing: tuple[str, ...] = SLOW) -> tuple[str, ...]:
    return ("exec", "--fenced", "--dsn", dsn, "--name", name, *timing, *args)


def test_the_command_gets_role_and_epoch(plain: str, superuser: str, name: str) -> None:
    for epoch in ("1", "2"):
        done = command(
            *exec_(plain, name), "--", "sh", "-c", 'echo "$PGLEADERLOCK_ROLE $PGLEADERLOCK_EPOCH $PGLEADERLOCK_NAME"'
        )
        assert (done.code, done.out, done.err) == (0, f"{name} {epoch} {name}\n", "")
    assert one(superuser, "SELECT clean FROM pgleaderlock.leaders WHERE role = %s", name)["clean"] is True
    assert holders(superuser, key_pair(name)) == []


def test_the_commands_exit_code_is_ours(plain: str, name: str) -> None:
    assert command(*exec_(plain, name), "--", "sh", "-c", "exit 7").code == 7


def test_the_epoch_that_it_gets_passes_the_fence(plain: str, superuser: str, name: str) -> None:
    """The epoch is good for a fenced write while the command runs, and no longer when the next one leads."""
    script = (
        "import os, psycopg\n"
        "with psycopg.connect(os.environ['DSN']) as conn:\n"
        "    conn.execute('SELECT pgleaderlock.fence(%s, %s)',\n"
        "                 (os.environ['PGLEADERLOCK_ROLE'], int(os.environ['PGLEADERLOCK_EPOCH'])))\n"
        "print('written')\n"
    )
    done = command(*exec_(plain, name), "--", "python3", "-c", script, env={"DSN": plain, "PATH": _path()})
    assert (done.code, done.out) == (0, "written\n"), done.err
    assert command(*exec_(plain, name), "--", "true").code == 0
    with psycopg.connect(plain) as conn, pytest.raises(psycopg.Error) as refused:
        conn.execute("SELECT pgleaderlock.fence(%s, 1)", (name,))
    assert refused.value.sqlstate == "PGL02"


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


async def test_while_another_node_leads_the_command_is_not_run(plain: str, name: str) -> None:
    async with LeaderElection(plain, name, **STEADY) as leader:
        await opens(leader, name)
        done = await asyncio.to_thread(command, *exec_(plain, name), "--", "echo", "ran")
        assert (done.code, done.out) == (75, "")
        assert "not won" in done.err
        assert "pid" in done.err
        waited = await asyncio.to_thread(command, *exec_(plain, name, "--wait", "300ms"), "--", "echo", "ran")
        assert (waited.code, waited.out) == (75, "")


async def test_a_bare_lock_of_the_same_name_keeps_it_out_too(plain: str, name: str) -> None:
    async with LeaderLock.for_name(plain, name) as lock:
        assert await lock.wait_for_leadership(20)
        done = await asyncio.to_thread(command, *exec_(plain, name), "--", "echo", "ran")
    assert (done.code, done.out) == (75, "")


async def test_it_waits_for_the_leader_to_go(plain: str, name: str) -> None:
    leader = LeaderElection(plain, name, **PATIENT)
    await leader.start()
    await opens(leader, name)
    args = (*exec_(plain, name, "--wait", "60s", "--log-level", "info"), "--", "sh", "-c", "echo $PGLEADERLOCK_EPOCH")
    with running(*args) as node:
        await asyncio.to_thread(node.until, "to=follower")
        await leader.shutdown()
        assert await asyncio.to_thread(node.end) == 0
    assert node.out == "2\n"


def test_the_command_waits_for_the_gate_and_not_only_for_the_lock(plain: str, superuser: str, name: str) -> None:
    """The predecessor was lost, and its time is not over for ten minutes."""
    SilentLeader(plain, name, lease_s=600.0).conn.close()
    with running(*exec_(plain, name, "--log-level", "info"), "--", "echo", "ran") as node:
        node.until("to=leader")
        node.until("lock_acquired")
        node.signal(signal.SIGTERM)
        assert node.end() == 128 + signal.SIGTERM
    assert node.out == ""


def test_the_command_runs_when_the_predecessors_time_is_over(plain: str, name: str) -> None:
    SilentLeader(plain, name, lease_s=1.0).conn.close()
    done = command(*exec_(plain, name, timing=QUICK), "--", "sh", "-c", "echo $PGLEADERLOCK_EPOCH")
    assert (done.code, done.out) == (0, "2\n")


def ready(node: Program) -> None:
    node.until("ready", "out")


UNTIL_TOLD = ("--", "sh", "-c", "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.05; done")


def test_a_loss_of_the_session_stops_the_command(plain: str, superuser: str, name: str) -> None:
    with running(*exec_(plain, name), *UNTIL_TOLD) as node:
        ready(node)
        terminate(superuser, key_pair(name))
        assert node.end() == 76
    assert "told" in node.out
    assert "terminating connection" in node.err


def test_a_heartbeat_that_hangs_stops_the_command(plain: str, superuser: str, name: str) -> None:
    """The session lives and the lock is held; only the clock says that another node may lead by now."""
    with running(*exec_(plain, name, timing=QUICK), *UNTIL_TOLD) as node:
        ready(node)
        with admin(superuser) as conn:
            conn.execute("BEGIN")
            conn.execute(
                "SELECT FROM pgleaderlock.sessions WHERE session_id ="
                " (SELECT session_id FROM pgleaderlock.leaders WHERE role = %s) FOR UPDATE",
                (name,),
            )
            node.until("told", "out")
            conn.execute("ROLLBACK")
        assert node.end() == 76
    assert "lost leadership" in node.err


def test_a_request_to_step_down_stops_the_command(plain: str, superuser: str, name: str) -> None:
    with running(*exec_(plain, name), *UNTIL_TOLD) as node:
        ready(node)
        one(plain, "SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', NULL, 'pgleaderlock')", name)
        assert node.end() == 76
    assert "told" in node.out
    assert one(superuser, "SELECT clean FROM pgleaderlock.leaders WHERE role = %s", name)["clean"] is True


def test_a_signal_is_passed_on_and_its_end_is_ours(plain: str, name: str) -> None:
    with running(*exec_(plain, name), *UNTIL_TOLD) as node:
        ready(node)
        node.signal(signal.SIGTERM)
        assert node.end() == 0
    assert "told" in node.out


def test_a_signal_before_the_command_has_started_ends_the_wait(plain: str, superuser: str, name: str) -> None:
    with psycopg.connect(superuser, autocommit=True, application_name="holder") as holder:
        holder.execute("SELECT pg_advisory_lock(%s, %s)", key_pair(name))
        args = exec_(plain, name, "--wait", "60s", "--log-level", "info")
        with running(*args, "--", "echo", "ran") as node:
            node.until("to=follower")
            node.signal(signal.SIGINT)
            assert node.end() == 128 + signal.SIGINT
    assert node.out == ""


def test_a_server_that_is_away_is_an_error_and_not_a_no(name: str) -> None:
    for options in ((), ("--wait", "300ms")):
        done = command(*exec_("host=127.0.0.1 port=1", name, *options), "--", "echo", "ran")
        assert (done.code, done.out) == (2, ""), options
        assert "refused" in done.err


def test_a_command_that_cannot_be_found_takes_no_lock(plain: str, superuser: str, name: str) -> None:
    assert command(*exec_(plain, name), "--", "there-is-no-such-command").code == 127
    assert one(superuser, "SELECT count(*) AS n FROM pgleaderlock.leaders WHERE role = %s", name)["n"] == 0


# --- status


async def test_status_shows_epoch_leader_heartbeat_and_candidates(plain: str, name: str) -> None:
    namespace = f"ns-{uuid.uuid4().hex[:8]}"
    args = ("status", "--name", name, "--namespace", namespace, "--dsn", plain)
    leads, stands_by = (LeaderElection(plain, name, namespace=namespace, node_id=node, **STEADY) for node in ("a", "b"))
    watches = LeaderElection(plain, name, namespace=namespace, node_id="c", candidate=False, **STEADY)
    async with leads:
        await opens(leads, name)
        async with stands_by, watches:
            done = await asyncio.to_thread(command, *args)
            as_json = await asyncio.to_thread(command, *args, "--json")
        identity = leads.gate(name).holder_identity
    assert (done.code, done.err) == (0, "")
    shown = dict(
        re.split(r"\s{2,}", line, maxsplit=1) for line in done.out.splitlines() if re.search(r"\S\s{2,}\S", line)
    )
    assert shown["epoch"] == "1"
    assert shown["leader"] == identity
    assert "ago (last_heartbeat)" in shown["heartbeat"]
    assert shown["candidates"] == "2 (a, b)"
    ledger = json.loads(as_json.out)["ledger"]
    assert (ledger["role"], ledger["namespace"], ledger["epoch"], ledger["led"]) == (name, namespace, 1, True)
    assert (ledger["holder_identity"], ledger["node_id"]) == (identity, "a")
    assert ledger["heartbeat_age_s"] >= 0
    assert [node["node_id"] for node in ledger["candidates"]] == ["a", "b"]

    after = await asyncio.to_thread(command, *args)
    assert after.code == 1
    assert re.search(r"^epoch +1$", after.out, re.MULTILINE)
    assert "nobody, by the ledger" in after.out
    assert re.search(r"^candidates +0$", after.out, re.MULTILINE)


async def test_status_by_keys_finds_the_role_of_that_key(plain: str, name: str) -> None:
    async with LeaderElection(plain, name, **HASTY) as election:
        await opens(election, name)
        key1, key2 = map(str, key_pair(name))
        done = await asyncio.to_thread(command, "status", "--key1", key1, "--key2", key2, "--dsn", plain, "--json")
    assert json.loads(done.out)["ledger"]["role"] == name


def test_status_of_a_role_that_was_never_led(plain: str, name: str) -> None:
    done = command("status", "--name", name, "--dsn", plain)
    assert done.code == 1
    assert "nobody has led it" in done.out
    assert json.loads(command("status", "--name", name, "--dsn", plain, "--json").out)["ledger"]["epoch"] is None


def test_status_works_without_a_ledger(empty: str, name: str) -> None:
    done = command("status", "--name", name, "--dsn", empty)
    assert (done.code, done.err) == (1, "")
    assert "epoch" not in done.out
    assert json.loads(command("status", "--name", name, "--dsn", empty, "--json").out)["ledger"] is None


def test_status_works_for_a_role_that_may_not_read_the_ledger(dsn: str, name: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        ledger_dsns(dsn)  # makes the plain role, which has no rights in this database but to connect
        stranger = make_conninfo(own, user="election_plain", password="plain")
        done = command("status", "--name", name, "--dsn", stranger)
        assert (done.code, done.err) == (1, "")
        assert "not readable" in done.out
        assert json.loads(command("status", "--name", name, "--dsn", stranger, "--json").out)["ledger"] is None
