"""Once per tick: of all who come, one runs the work, and what became of it is remembered."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgleaderlock import (
    ConfigurationError,
    LeaderToken,
    LockError,
    NotLeader,
    SchemaError,
    fenced,
    key_pair,
    once,
)
from pgleaderlock import gate as gate_module
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import KeyPair
from pgleaderlock.migrate import migrate
from pgleaderlock.slots import slot_namespace
from support.counts import count
from support.elections import HASTY, PATIENT, STEADY, admin, fresh_database, ledger_dsns, until
from support.ledger_node import eventually
from support.program import command, running
from support.server_side import terminate

WAIT_S = 60.0
TICKS: tuple[Any, ...] = ({"slot": "s"}, {"every": "1d"})


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> str:
    return ledger_dsns(postgres.dsn)["superuser"]


@pytest.fixture
def node_dsn(postgres: EmbeddedPostgres, nothing_left: None) -> str:
    """For a role that has what `migrate --grant-to` gives."""
    return ledger_dsns(postgres.dsn)["plain"]


@pytest.fixture
def name() -> str:
    return f"once-{uuid.uuid4().hex[:12]}"


def slots(dsn: str, name: str) -> list[tuple[Any, ...]]:
    with admin(dsn) as conn:
        query = "SELECT slot, attempts, outcome FROM pgleaderlock.slots WHERE name = %s ORDER BY claimed_at"
        return [tuple(row.values()) for row in conn.execute(query, (name,)).fetchall()]


class Work:
    def __init__(self) -> None:
        self.tokens: list[LeaderToken] = []

    async def __call__(self, token: LeaderToken) -> int:
        self.tokens.append(token)
        return len(self.tokens)


async def test_of_all_who_come_one_runs_it_and_the_others_hear_that_it_is_done(
    node_dsn: str, ledger: str, name: str
) -> None:
    work = Work()
    calls = (once(node_dsn, name, work, slot="monday", node_id=f"n{number}", **STEADY) for number in range(5))
    results = await asyncio.gather(*calls)
    assert Counter((each.ran, each.value, each.outcome) for each in results) == {
        (True, 1, "done"): 1,
        (False, None, "done"): 4,
    }
    assert (await once(node_dsn, name, work, slot="monday", **STEADY)).ran is False
    assert (await once(node_dsn, name, work, slot="tuesday", **STEADY)).value == 2
    assert slots(ledger, name) == [("monday", 1, "done"), ("tuesday", 1, "done")]


@pytest.mark.parametrize(("on_failure", "again"), [("retry", True), ("keep", False)])
async def test_a_work_that_fails_is_run_again_or_not_as_was_said(
    node_dsn: str, ledger: str, name: str, on_failure: Any, again: bool
) -> None:
    async def fails(token: LeaderToken) -> None:
        raise KeyError(token.role)

    with pytest.raises(KeyError):
        await once(node_dsn, name, fails, slot="s", on_failure=on_failure, **STEADY)
    assert slots(ledger, name) == [("s", 1, "failed")]
    result = await once(node_dsn, name, Work(), slot="s", on_failure=on_failure, **STEADY)
    assert (result.ran, result.outcome) == (again, "done" if again else "failed")
    assert slots(ledger, name) == [("s", 2, "done") if again else ("s", 1, "failed")]


@pytest.mark.parametrize(("on_failure", "again"), [("retry", True), ("keep", False)])
async def test_a_runner_that_is_cancelled_in_mid_run_leaves_a_slot_that_is_taken_over_or_not(
    node_dsn: str, ledger: str, name: str, on_failure: Any, again: bool
) -> None:
    begun = asyncio.Event()

    async def hangs(_: LeaderToken) -> None:
        begun.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(once(node_dsn, name, hangs, slot="s", on_failure=on_failure, **STEADY))
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert slots(ledger, name) == [("s", 1, None)]
    result = await once(node_dsn, name, Work(), slot="s", on_failure=on_failure, **STEADY)
    assert (result.ran, result.outcome) == ((True, "done") if again else (False, "claimed"))


async def test_a_follower_waits_while_another_runs_it_and_takes_over_when_that_fails(
    node_dsn: str, ledger: str, name: str
) -> None:
    begun, fail = asyncio.Event(), asyncio.Event()

    async def fails_late(_: LeaderToken) -> None:
        begun.set()
        await fail.wait()
        raise KeyError

    async with asyncio.timeout(WAIT_S):
        first = asyncio.ensure_future(once(node_dsn, name, fails_late, slot="s", node_id="first", **STEADY))
        await begun.wait()
        second = asyncio.ensure_future(once(node_dsn, name, Work(), slot="s", node_id="second", **STEADY))
        await until(lambda: _sessions(ledger, name) == 2, "the follower competes")
        fail.set()
        with pytest.raises(KeyError):
            await first
        assert (await second).ran
    assert slots(ledger, name) == [("s", 2, "done")]


def _sessions(dsn: str, name: str) -> int:
    with admin(dsn) as conn:
        query = "SELECT count(*) FROM pgleaderlock.sessions"
        query += " WHERE namespace = %s AND ended_at IS NULL AND node_id = ANY (%s)"
        (row,) = conn.execute(query, (slot_namespace("pgleaderlock"), ["first", "second"])).fetchall()
    return int(row["count"])


async def test_with_keep_whoever_finds_it_claimed_returns_at_once(node_dsn: str, name: str) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    async def waits(_: LeaderToken) -> None:
        begun.set()
        await end.wait()

    async with asyncio.timeout(WAIT_S):
        first = asyncio.ensure_future(once(node_dsn, name, waits, slot="s", on_failure="keep", **STEADY))
        await begun.wait()
        second = await once(node_dsn, name, Work(), slot="s", on_failure="keep", node_id="second", **STEADY)
        assert (second.ran, second.outcome) == (False, "claimed")
        end.set()
        assert (await first).ran


async def test_the_token_fences_the_writes_of_the_work(ledger: str, name: str) -> None:
    tokens: list[LeaderToken] = []

    async def writes(token: LeaderToken) -> None:
        tokens.append(token)
        async with await psycopg.AsyncConnection.connect(ledger, autocommit=True) as conn, fenced(conn, token):
            await conn.execute("SELECT 1")

    assert (await once(ledger, name, writes, slot="1", **STEADY)).ran
    assert (await once(ledger, name, writes, slot="2", **STEADY)).ran
    assert tokens[0].epoch < tokens[1].epoch


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"every": "1h", "slot": "s"},
        {"every": "7h"},
        {"every": "36h"},
        {"every": "100ms"},
        {"every": "soon"},
        {"slot": "s", "on_failure": "never"},
        {"slot": ""},
        {"slot": 4711},
        {"slot": "a\0b"},
        {"slot": "a\udcff"},
        {"slot": "x" * 513},
        {"every": "1d", "time_zone": "\0"},
        {"every": "1d", "time_zone": ""},
        {"slot": "s", "enabled": False},
        {"slot": "s", "standalone": True},
    ],
    ids=str,
)
async def test_what_makes_no_slot_is_refused_with_the_remedy(wrong: Any) -> None:
    with pytest.raises(ConfigurationError):
        await once("host=127.0.0.1 port=1", "name", Work(), **wrong)


@pytest.mark.parametrize("there", ["nothing", "version 4"])
async def test_a_database_without_slots_is_told_with_the_remedy(postgres: EmbeddedPostgres, there: str) -> None:
    with fresh_database(postgres.dsn, ledger=there != "nothing") as dsn:
        if there != "nothing":
            with admin(dsn) as conn:
                conn.execute("DROP TABLE pgleaderlock.slots")
                conn.execute("DROP FUNCTION pgleaderlock.tick_of(timestamptz, interval, text)")
        for when in TICKS:
            with pytest.raises(SchemaError, match="run `pgleaderlock migrate`"):
                await once(dsn, "name", Work(), **when)


async def test_a_role_without_the_grants_is_told_of_them(postgres: EmbeddedPostgres) -> None:
    stranger = f"stranger_{uuid.uuid4().hex[:8]}"
    with fresh_database(postgres.dsn, ledger=True) as dsn, admin(dsn) as conn:
        conn.execute(f"CREATE ROLE {stranger} LOGIN PASSWORD 'a-password'".encode())
        try:
            for when in TICKS:
                with pytest.raises(SchemaError, match="GRANTs"):
                    await once(make_conninfo(dsn, user=stranger, password="a-password"), "name", Work(), **when)
        finally:
            conn.execute(f"DROP ROLE {stranger}".encode())


async def test_a_time_zone_that_there_is_not_is_named(node_dsn: str, name: str) -> None:
    with pytest.raises(Exception, match="Middle/Earth"):
        await once(node_dsn, name, Work(), every="1d", time_zone="Middle/Earth")


# --- Terms that end in mid-run, and a database that is away


def keys(name: str) -> KeyPair:
    return key_pair(name, slot_namespace("pgleaderlock"))


class Stubborn:
    """A work that goes on when it is cancelled, until the moment that it was made with, as a thread would."""

    def __init__(self, until_when: Callable[[LeaderToken], object]) -> None:
        self.runs = 0
        self._until_when = until_when

    async def __call__(self, token: LeaderToken) -> str:
        self.runs += 1
        with contextlib.suppress(asyncio.CancelledError):
            self.begin(token)
            await asyncio.Event().wait()
        await until(lambda: self._until_when(token), "the work may end")
        return f"run {self.runs}"

    def begin(self, token: LeaderToken) -> None: ...


def epoch(dsn: str, name: str) -> int:
    with admin(dsn) as conn:
        query = "SELECT epoch FROM pgleaderlock.leaders WHERE role = %s"
        (row,) = conn.execute(query, (name,)).fetchall()
    return int(row["epoch"])


@pytest.mark.parametrize("on_failure", ["retry", "keep"])
@pytest.mark.parametrize("then", ["its term is over", "a later term of its own has begun"])
async def test_a_work_that_ends_after_its_term_has_run_here_and_is_recorded(
    node_dsn: str, ledger: str, name: str, on_failure: Any, then: str
) -> None:
    class Cut(Stubborn):
        def begin(self, token: LeaderToken) -> None:
            terminate(ledger, keys(name))

    work = Cut(lambda token: epoch(ledger, name) > token.epoch if then.startswith("a later") else True)
    async with asyncio.timeout(WAIT_S):
        result = await once(node_dsn, name, work, slot="s", on_failure=on_failure, **STEADY)
    assert (result.ran, result.value, result.outcome, work.runs) == (True, "run 1", "done", 1)
    assert slots(ledger, name) == [("s", 1, "done")]


async def test_a_work_that_was_taken_over_says_so_when_it_ends(node_dsn: str, ledger: str, name: str) -> None:
    class Cut(Stubborn):
        def begin(self, token: LeaderToken) -> None:
            terminate(ledger, keys(name))

    work = Cut(lambda token: slots(ledger, name) == [("s", 2, "done")])
    async with asyncio.timeout(WAIT_S):
        first = asyncio.ensure_future(once(node_dsn, name, work, slot="s", node_id="first", **STEADY))
        await until(lambda: work.runs, "the first one runs it")
        # It does not compete again while its work goes on: the second one takes over.
        assert (await once(node_dsn, name, Work(), slot="s", node_id="second", **STEADY)).ran
        with pytest.raises(LockError, match="claimed by another"):
            await first
    assert slots(ledger, name) == [("s", 2, "done")]


async def test_a_work_that_has_ended_is_not_run_again_because_the_database_restarts(
    throwaway_postgres: Any, name: str
) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)
    restarting: list[asyncio.Task[None]] = []
    work = Work()

    async def stops_the_server(token: LeaderToken) -> int:
        server.stop("immediate")  # in the same turn of the loop, so that nothing can interrupt the work any more
        restarting.append(asyncio.create_task(restart()))
        return await work(token)

    async def restart() -> None:
        await asyncio.sleep(2 * HASTY["late_threshold_s"])  # the gate shuts meanwhile
        await asyncio.to_thread(server.start)

    async with asyncio.timeout(WAIT_S):
        result = await once(server.dsn, name, stops_the_server, slot="s", **HASTY)
        await restarting[0]
    assert (result.ran, len(work.tokens)) == (True, 1)
    assert slots(server.dsn, name) == [("s", 1, "done")]


@pytest.mark.parametrize(("on_failure", "again"), [("retry", True), ("keep", False)])
async def test_a_work_that_was_interrupted_is_run_again_in_the_same_term_or_not(
    node_dsn: str, ledger: str, name: str, on_failure: Any, again: bool
) -> None:
    """The gate shuts and opens again, as after a late heartbeat: nobody else can have run it."""
    tokens: list[LeaderToken] = []

    async def is_interrupted_once(token: LeaderToken) -> None:
        tokens.append(token)
        if len(tokens) > 1:
            return
        (gate,) = [gate for gate in gate_module._gates if gate.role == name]
        gate.disable()
        try:
            await asyncio.Event().wait()
        finally:
            gate.enable(token)

    async with asyncio.timeout(WAIT_S):
        result = await once(node_dsn, name, is_interrupted_once, slot="s", on_failure=on_failure, **PATIENT)
    assert {token.epoch for token in tokens} == {1}
    assert (result.ran, result.outcome) == ((True, "done") if again else (False, "claimed"))
    assert slots(ledger, name) == [("s", 2, "done") if again else ("s", 1, None)]


async def test_a_follower_outlives_a_restart_of_the_database(throwaway_postgres: Any, name: str) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)
    begun = asyncio.Event()

    async def hangs(_: LeaderToken) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(2 * WAIT_S):
        first = asyncio.ensure_future(once(server.dsn, name, hangs, slot="s", node_id="first", **HASTY))
        await begun.wait()
        second = asyncio.ensure_future(once(server.dsn, name, Work(), slot="s", node_id="second", **HASTY))
        await until(lambda: _sessions(server.dsn, name) == 2, "the follower competes")
        await asyncio.to_thread(server.stop, "immediate")
        first.cancel()
        await asyncio.wait([first])
        await asyncio.to_thread(server.start)
        assert (await second).ran


async def test_a_tick_that_ends_before_its_turn_has_come_is_missed_and_not_claimed(
    node_dsn: str, ledger: str, name: str
) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    async def waits(_: LeaderToken) -> None:
        begun.set()
        await end.wait()

    async with asyncio.timeout(WAIT_S):
        first = asyncio.ensure_future(once(node_dsn, name, waits, slot="long", node_id="first", **STEADY))
        await begun.wait()
        second = await once(node_dsn, name, Work(), every="1s", node_id="second", **STEADY)
        assert (second.ran, second.outcome) == (False, "missed")
        end.set()
        await first
    assert slots(ledger, name) == [("long", 1, "done")]


async def test_what_a_work_is_refused_elsewhere_is_a_failure_of_the_slot(node_dsn: str, ledger: str, name: str) -> None:
    async def asks_another_gate(_: LeaderToken) -> None:
        raise NotLeader("another", "never_led", "not here")

    with pytest.raises(NotLeader):
        await once(node_dsn, name, asks_another_gate, slot="s", **STEADY)
    assert slots(ledger, name) == [("s", 1, "failed")]


# --- Ticks


@pytest.mark.parametrize(
    ("at", "every", "zone", "found"),
    [
        ("2026-11-16 15:59:59+00", "1h", "UTC", "2026-11-16 15:00 to 2026-11-16 16:00"),
        ("2026-11-16 16:00:00+00", "1h", "UTC", "2026-11-16 16:00 to 2026-11-16 17:00"),
        ("2026-11-15 23:30+00", "1d", "Europe/Berlin", "2026-11-15 23:00 to 2026-11-16 23:00"),
        ("2026-03-29 12:00+00", "1d", "Europe/Berlin", "2026-03-28 23:00 to 2026-03-29 22:00"),
        ("2026-03-29 00:30+00", "1h", "Europe/Berlin", "2026-03-29 00:00 to 2026-03-29 01:00"),
        ("2026-10-25 00:30+00", "1h", "Europe/Berlin", "2026-10-25 00:00 to 2026-10-25 01:00"),
        ("2026-10-25 01:30+00", "1h", "Europe/Berlin", "2026-10-25 01:00 to 2026-10-25 02:00"),
        ("2026-10-25 22:30+00", "6h", "Europe/Berlin", "2026-10-25 17:00 to 2026-10-25 23:00"),
        ("2026-03-29 00:30+00", "6h", "Europe/Berlin", "2026-03-28 23:00 to 2026-03-29 04:00"),
        ("2026-03-29 04:00+00", "6h", "Europe/Berlin", "2026-03-29 04:00 to 2026-03-29 10:00"),
        ("2026-11-18 12:00+00", "7d", "UTC", "2026-11-16 00:00 to 2026-11-23 00:00"),
        ("2026-11-16 23:50+00", "50min", "UTC", "2026-11-16 23:20 to 2026-11-17 00:00"),
    ],
    ids=str,
)
def test_ticks_follow_the_local_day(ledger: str, at: str, every: str, zone: str, found: str) -> None:
    with admin(ledger) as conn:
        (tick,) = conn.execute(
            "SELECT * FROM pgleaderlock.tick_of(%s::timestamptz, %s::interval, %s)", (at, every, zone)
        ).fetchall()
    assert [tick["begins"], tick["ends"]] == [datetime.fromisoformat(f"{moment}+00") for moment in found.split(" to ")]


# --- The command


def execute(dsn: str, name: str, *args: str) -> Any:
    return command("exec", "--dsn", dsn, "--name", name, *args)


def test_exec_runs_a_command_once_for_its_slot_and_says_so(node_dsn: str, ledger: str, name: str) -> None:
    told = "echo $PGLEADERLOCK_EPOCH $PGLEADERLOCK_NAMESPACE $PGLEADERLOCK_KEY1 $PGLEADERLOCK_KEY2"
    first = execute(node_dsn, name, "--slot", "s", "--", "sh", "-c", told)
    assert (first.code, first.out) == (0, "1 pgleaderlock.once {} {}\n".format(*keys(name)))
    second = execute(node_dsn, name, "--slot", "s", "--", "echo", "again")
    assert (second.code, second.out) == (0, "")
    assert f"nothing to do: the slot s of {name} is done" in second.err
    assert execute(node_dsn, name, "--once-per", "1d", "--", "true").code == 0
    assert [row[1:] for row in slots(ledger, name)] == [(1, "done"), (1, "done")]


def test_exec_of_a_command_that_fails_has_its_code_and_may_be_retried(node_dsn: str, ledger: str, name: str) -> None:
    assert execute(node_dsn, name, "--slot", "s", "--", "sh", "-c", "exit 3").code == 3
    assert slots(ledger, name) == [("s", 1, "failed")]
    assert execute(node_dsn, name, "--slot", "s", "--on-failure", "keep", "--", "false").code == 0
    assert execute(node_dsn, name, "--slot", "s", "--", "true").code == 0
    assert slots(ledger, name) == [("s", 2, "done")]


def test_exec_that_loses_its_term_ends_at_once_though_another_host_leads(
    node_dsn: str, ledger: str, name: str, tmp_path: Path
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    script = f'echo begun; touch "{begun}"; while [ ! -e "{go_on}" ]; do sleep 0.05; done'
    with (
        running("exec", "--dsn", node_dsn, "--name", name, "--slot", "s", "--", "sh", "-c", script) as first,
        running("exec", "--dsn", node_dsn, "--name", name, "--slot", "s", "--", "sh", "-c", script) as second,
    ):
        eventually(begun.exists)
        begun.unlink()
        terminate(ledger, keys(name))
        eventually(begun.exists)  # in the other one, and it does not end
        eventually(lambda: 76 in (first.process.poll(), second.process.poll()))
        assert slots(ledger, name)[0][1:] == (2, None)
        go_on.touch()
        assert sorted([first.end(), second.end()]) == [0, 76]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--once-per", "1h", "--slot", "s"), "give one"),
        (("--time-zone", "UTC"), "needs --once-per or --slot"),
        (("--slot", "s", "--time-zone", "UTC"), "--time-zone goes with --once-per"),
        (("--slot", "s", "--fenced"), "fenced by themselves"),
        (("--once-per", "7h"), "must divide a day"),
        (("--once-per", "1h", "--wait", "5m"), "--wait does not go with"),
        (("--slot", ""), "not empty"),
        (("--slot", "\udcff"), "UTF-8"),
    ],
)
def test_exec_refuses_what_makes_no_sense(node_dsn: str, name: str, args: tuple[str, ...], says: str) -> None:
    done = execute(node_dsn, name, *args, "--", "true")
    assert done.code == 2
    assert says in done.err


def test_exec_with_hold_for_keeps_the_lock_after_a_command_that_succeeds(dsn: str, name: str) -> None:
    holding = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pgleaderlock",
            "exec",
            "--dsn",
            dsn,
            "--name",
            name,
            "--hold-for",
            "1h",
            "--",
            "echo",
            "ran",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "ran\n"
        assert execute(dsn, name, "--", "true").code == 75
        holding.send_signal(signal.SIGTERM)
        assert holding.wait(WAIT_S) == 0
    finally:
        holding.kill()
        holding.communicate()
    assert execute(dsn, name, "--hold-for", "1h", "--", "false").code == 1


# --- Ten hosts


HOSTS = """
import asyncio, os, signal, sys
from pgleaderlock import once
dsn, name, journal, slot, policy, *offsets = sys.argv[1:]

async def work(token):
    with open(journal, "a") as file:
        file.write(f"begin {token.epoch} {os.getpid()}\\n")
    await asyncio.sleep(0.3)
    with open(journal, "a") as file:
        file.write(f"end {token.epoch} {os.getpid()}\\n")

async def host(number, offset):
    await asyncio.sleep(float(offset))
    quick = dict(heartbeat_interval_s=0.1, acquire_delay_s=(0.02, 0.1), late_threshold_s=1.0, session_lease_s=1.5)
    await once(dsn, name, work, slot=slot, on_failure=policy, node_id=f"host-{number}", **quick)

hosts = []
for number, offset in enumerate(offsets):
    if pid := os.fork():
        hosts.append(pid)
    else:
        asyncio.run(host(number, offset))
        os._exit(0)
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in hosts]
sys.exit(0 if all(end in (0, -signal.SIGKILL) for end in ends) else f"the hosts ended with {ends}")
"""
"""Ten hosts, forked from one process: what they import, they import once."""


@pytest.mark.long
@pytest.mark.parametrize("policy", ["retry", "keep"])
@pytest.mark.timeout(7200)
def test_ten_hosts_with_clocks_apart_and_kills_in_mid_run(
    node_dsn: str, ledger: str, name: str, tmp_path: Path, policy: str
) -> None:
    """By the works' own journal: kept, no slot begins twice; retried, each ends at least once, and one at a time."""
    rng = random.Random(name)
    for tick in range(count(2, 200)):
        journal = tmp_path / f"{tick}"
        offsets = [f"{rng.uniform(0, 2):.3f}" for _host in range(10)]
        hosts = subprocess.Popen(
            [sys.executable, "-c", HOSTS, node_dsn, name, str(journal), f"tick-{tick}", policy, *offsets]
        )
        if rng.random() < 0.7:
            _kill_the_runner(journal, hosts)
        assert hosts.wait(300) == 0
        lines = [line.split() for line in journal.read_text().splitlines()]
        begun = [line[1:] for line in lines if line[0] == "begin"]
        ended = [line[1:] for line in lines if line[0] == "end"]
        if policy == "keep":
            assert len(begun) == 1, lines
        else:
            assert ended, lines
            assert len(begun) - len(ended) <= 1, lines
            assert [line[1] for line in lines] == sorted((line[1] for line in lines), key=int), lines
            assert slots(ledger, name)[-1][2] == "done"


def _kill_the_runner(journal: Path, hosts: "subprocess.Popen[bytes]") -> None:
    while hosts.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if lines := journal.read_text().splitlines():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(lines[0].split()[2]), signal.SIGKILL)
                return
