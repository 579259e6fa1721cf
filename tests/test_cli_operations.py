"""The operator's hand: `step-down`, `drain`, `roles`, `nodes`, `history`, `events`, on real nodes and a real ledger."""

import asyncio
import contextlib
import csv
import io
import json
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest import mock

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartServer
from pgleaderlock import LeaderElection, history
from pgleaderlock.cli import drain
from pgleaderlock.cli._app import run as program_run
from pgleaderlock.cli._operations import span
from pgleaderlock.errors import ConnectionError
from pgleaderlock.history import Asks, RoleView
from pgleaderlock.migrate import _migrations, migrate
from support.elections import STEADY, SilentLeader, fresh_database, ledger_dsns, one, opens, until
from support.fencing import database
from support.program import Done, Program, command, environment, running

COMMANDS = [
    ("roles",),
    ("nodes",),
    ("history", "r"),
    ("events",),
    ("watch",),
    ("step-down", "r"),
    ("drain", "n"),
]


@pytest.fixture
def plain(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
def superuser(dsn: str) -> str:
    return ledger_dsns(dsn)["superuser"]


@pytest.fixture
def space() -> str:
    return f"ops-{uuid.uuid4().hex[:12]}"


def here(*args: str, **env: str) -> Done:
    """Runs one command line in this process: a new one for each of so many looks would be most of this file's time."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(env), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = program_run(args)
    return Done(code, out.getvalue(), err.getvalue())


async def run(*args: str) -> Done:
    return await asyncio.to_thread(here, *args)


@contextlib.asynccontextmanager
async def cluster(
    dsn: str, space: str, names: Sequence[str], roles: Sequence[str] = ("scheduler", "billing"), **settings: Any
) -> AsyncIterator[list[LeaderElection]]:
    """Nodes in this order: the first of them leads everything."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for name in names:
            election = LeaderElection(dsn, roles, namespace=space, node_id=name, **{**STEADY, **settings})
            await election.start()
            stack.push_async_callback(election.shutdown)
            nodes.append(election)
            if len(nodes) == 1:
                for role in roles:
                    await opens(election, role)
        if len(nodes) > 1:
            await until(lambda: len(_live(dsn, space)) == len(names), "all nodes are recorded")
        yield nodes


def _live(dsn: str, space: str) -> list[Any]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(
            "SELECT FROM pgleaderlock.sessions WHERE namespace = %s AND ended_at IS NULL", (space,)
        ).fetchall()


# -- step-down --------------------------------------------------------------------------------------------------------


async def test_step_down_says_who_leads_then(plain: str, space: str) -> None:
    # Whoever gives up leaves the others the longest delay: enough for them, however busy the machine is.
    async with cluster(plain, space, ["node-a", "node-b"], acquire_delay_s=(0.02, 2.0)) as (_, other):
        done = await run("step-down", "scheduler", "--dsn", plain, "--namespace", space)
        assert done.code == 0
        assert re.fullmatch(
            r"scheduler: node-a -> node-b, epoch 1 -> 2, \d+(\.\d)? m?s without a leader\n", done.out
        ), done.out
        assert re.fullmatch(r"scheduler: asked node-a to step down \(request \d+\)\n", done.err)
        await opens(other, "scheduler")
        assert other.state("billing").value != "leader", "the other role was not asked for"


async def test_step_down_in_favour_of_a_node(plain: str, space: str) -> None:
    async with cluster(plain, space, ["node-a", "node-b", "node-c"]):
        done = await run("step-down", "scheduler", "--to", "node-c", "--dsn", plain, "--namespace", space)
        assert done.code == 0, done
        assert done.out.startswith("scheduler: node-a -> node-c, epoch 1 -> 2, ")
        again = await run("step-down", "scheduler", "--to", "node-c", "--dsn", plain, "--namespace", space)
        assert (again.code, again.out) == (0, "scheduler: node-c leads already (epoch 2)\n")
        wrong = await run("step-down", "scheduler", "--to", "node-x", "--dsn", plain, "--namespace", space)
        assert wrong.code == 2
        assert "node 'node-x' would not lead: the candidates that live are node-a, node-b, node-c" in wrong.err


async def test_a_node_without_another_leads_again(plain: str, space: str) -> None:
    async with cluster(plain, space, ["node-a"]):
        done = await run("step-down", "billing", "--dsn", plain, "--namespace", space)
    assert done.code == 0
    assert done.out.startswith("billing: node-a -> node-a again: there is no other candidate, epoch 1 -> 2, ")


async def test_a_role_that_nobody_knows_or_leads_is_not_asked_for(plain: str, superuser: str, space: str) -> None:
    async with cluster(plain, space, ["node-a"]):
        unknown = await run("step-down", "shceduler", "--dsn", plain, "--namespace", space)
        far_off = await run("step-down", "xyz", "--dsn", plain, "--namespace", space)
    assert (unknown.code, far_off.code) == (2, 2)
    assert f"role 'shceduler' has never been led in namespace '{space}': did you mean scheduler?" in unknown.err
    assert "`pgleaderlock roles` lists what there is" in far_off.err
    nobody = await run("step-down", "scheduler", "--dsn", plain, "--namespace", space)
    assert (nobody.code, nobody.out) == (1, "")
    assert "nobody leads it now" in nobody.err
    asked = one(superuser, "SELECT count(*) AS n FROM pgleaderlock.requests WHERE namespace = %s", space)
    assert asked["n"] == 0


@contextlib.contextmanager
def deaf(superuser: str) -> Any:
    """A leader that hears nothing; gives its role."""
    role = f"deaf-{uuid.uuid4().hex[:12]}"
    leader = SilentLeader(superuser, role, 600.0)
    try:
        yield role
    finally:
        leader.conn.close()


def test_a_leader_that_does_not_step_down_in_time_is_reported(plain: str, superuser: str) -> None:
    with deaf(superuser) as role:
        done = here("step-down", role, "--dsn", plain, "--timeout", "200ms")
    assert (done.code, done.out) == (1, "")
    assert f"{role}: silent has not stepped down within 200 ms; the request stays" in done.err


def test_ctrl_c_leaves_the_request_and_says_so(plain: str, superuser: str) -> None:
    with deaf(superuser) as role, running("step-down", role, "--dsn", plain) as program:
        program.until("asked silent to step down")
        program.signal(signal.SIGINT)
        assert program.end() == 130
        asked = one(superuser, "SELECT request_id, done_at FROM pgleaderlock.requests WHERE role = %s", role)
        assert f"request {asked['request_id']} stays, and will be carried out" in program.err
        assert "Traceback" not in program.err
        assert asked["done_at"] is None


def test_a_refused_request_is_reported_with_its_reason(plain: str, superuser: str) -> None:
    with deaf(superuser) as role, running("step-down", role, "--dsn", plain) as program:
        program.until("asked silent")
        with psycopg.connect(superuser, autocommit=True) as conn:
            conn.execute(
                "UPDATE pgleaderlock.requests SET done_at = now(), outcome = 'refused', detail = 'not today'"
                " WHERE role = %s",
                (role,),
            )
        assert program.end() == 1
        assert f"{role}: refused: not today" in program.err


# -- drain ------------------------------------------------------------------------------------------------------------


async def test_drain_moves_every_role_away_until_the_node_is_resumed(plain: str, space: str) -> None:
    async with cluster(plain, space, ["node-a", "node-b"]):
        done = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
        assert done.code == 0, done
        assert done.out == "node-a: drained (clean); 2 roles, led now: 2 by node-b\n"
        assert re.fullmatch(r"node-a: asked to drain 2 roles \(request \d+\)\n", done.err)
        nodes = json.loads((await run("nodes", "--json", "--dsn", plain, "--namespace", space)).out)["nodes"]
        assert [(n["node_id"], n["draining"], n["leads"]) for n in nodes] == [
            ("node-a", True, 0),
            ("node-b", False, 2),
        ]
        # It does not compete.
        alone = await run("step-down", "billing", "--dsn", plain, "--namespace", space)
        assert alone.out.startswith("billing: node-b -> node-b again: there is no other candidate")
        resumed = await run("drain", "node-a", "--resume", "--dsn", plain, "--namespace", space)
        assert (resumed.code, resumed.out) == (0, "node-a: competes again\n")
        back = await run("step-down", "billing", "--to", "node-a", "--dsn", plain, "--namespace", space)
        assert back.out.startswith("billing: node-b -> node-a, ")


async def test_drain_waits_for_those_who_lead_next(plain: str, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[RoleView]] = []
    look_at_roles = history.all_roles

    async def all_roles(asks: Asks, namespace: str) -> list[RoleView]:
        looks.append(await look_at_roles(asks, namespace))
        return looks[-1]

    monkeypatch.setattr(drain, "SUCCESSORS_S", 600.0)
    monkeypatch.setattr(history, "all_roles", all_roles)
    async with cluster(plain, space, ["node-a"]), cluster(plain, space, ["node-b"], roles=["reports"]):
        asked = asyncio.create_task(run("drain", "node-a", "--dsn", plain, "--namespace", space))
        await until(lambda: len(looks) >= 2, "drain has looked who leads what node-a led")
        assert [role.state for role in looks[1]] == ["free", "led", "free"]
        async with cluster(plain, space, ["node-c"]):
            done = await asked
    assert done.out == "node-a: drained (clean); 2 roles, led now: 2 by node-c\n"


async def test_drain_waits_for_nobody_where_no_other_node_would_lead(
    plain: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "SUCCESSORS_S", 600.0)
    async with cluster(plain, space, ["node-a"]):
        done = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
    assert (done.code, done.out) == (0, "node-a: drained (clean); 2 roles, led now: 2 by nobody yet\n")


def test_ctrl_c_after_a_drain_leaves_no_request(plain: str, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    async def drained() -> Done:
        async with cluster(plain, space, ["node-a"]):
            return await run("drain", "node-a", "--dsn", plain, "--namespace", space)

    monkeypatch.setattr(drain, "_sum_up", interrupted)
    done = asyncio.run(drained())
    assert done.code == 130
    assert "stays" not in done.err


async def test_drain_says_so_when_it_cannot_see_who_leads_next(
    plain: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> list[str]:
        raise ConnectionError("the connection was lost")

    monkeypatch.setattr(drain, "_leaders", lost)
    async with cluster(plain, space, ["node-a"]):
        done = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
    assert done.code == 0
    assert done.out == "node-a: drained (clean); 2 roles; who leads now is not known: the connection was lost\n"


async def test_drain_ends_also_when_no_other_node_is_after_the_roles(
    plain: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "SUCCESSORS_S", 0.1)
    async with cluster(plain, space, ["node-a"]), cluster(plain, space, ["node-b"], roles=["reports"]):
        done = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
    assert (done.code, done.out) == (0, "node-a: drained (clean); 2 roles, led now: 2 by nobody yet\n")


async def test_a_node_that_is_not_there_cannot_be_drained(plain: str, space: str) -> None:
    async with cluster(plain, space, ["node-a"]):
        unknown = await run("drain", "node-x", "--dsn", plain, "--namespace", space)
    assert unknown.code == 2
    assert f"node 'node-x' is not known in namespace '{space}': alive are node-a" in unknown.err
    gone = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
    assert gone.code == 1
    assert "node-a: not alive (ended, last heard" in gone.err


@pytest.mark.parametrize("version", [1, 2])
def test_a_ledger_of_an_older_version_is_refused_by_every_command_with_the_remedy(dsn: str, version: int) -> None:
    with fresh_database(dsn) as old:
        with psycopg.connect(old, autocommit=True) as conn:
            for number in range(1, version + 1):
                conn.execute(_migrations()[number].encode())
        for args in COMMANDS:
            done = here(*args, "--dsn", old)
            assert (done.code, done.out) == (2, "")
            assert f"the ledger's version is {version}" in done.err
            assert "run `pgleaderlock migrate`" in done.err


# -- looks ------------------------------------------------------------------------------------------------------------


async def test_roles_and_nodes_for_people_and_for_programs(plain: str, space: str) -> None:
    none = await asyncio.to_thread(command, "roles", "--dsn", plain, "--namespace", space)
    assert (none.code, none.out) == (0, f"no role has been led in namespace {space} yet\n")
    async with cluster(plain, space, ["node-a", "node-b"]):
        roles = await run("roles", "--dsn", plain, "--namespace", space)
        assert (roles.code, roles.err) == (0, "")
        heading, *rows, total = roles.out.splitlines()
        assert heading.split() == ["role", "leader", "epoch", "tenure", "heartbeat", "leads", "since", "candidates"]
        assert [row.split()[:3] for row in rows] == [["billing", "node-a", "1"], ["scheduler", "node-a", "1"]]
        assert total == "2 roles: 2 led; candidates: 2"
        view = json.loads((await run("roles", "--json", "--dsn", plain, "--namespace", space)).out)
        assert [(r["role"], r["state"], r["node_id"], r["candidates"]) for r in view["roles"]] == [
            ("billing", "led", "node-a", 2),
            ("scheduler", "led", "node-a", 2),
        ]
        nodes = await run("nodes", "--dsn", plain, "--namespace", space)
        assert nodes.code == 0
        assert [line.split()[:3] for line in nodes.out.splitlines()[1:]] == [
            ["node-a", "alive", "2"],
            ["node-b", "alive", "0"],
        ]
    free = await run("roles", "--dsn", plain, "--namespace", space)
    assert free.code == 1
    assert free.out.splitlines()[-1] == "2 roles: 0 led, 2 free; candidates: 0"
    gone = await run("nodes", "--dsn", plain, "--namespace", space)
    assert (gone.code, [line.split()[:2] for line in gone.out.splitlines()[1:]]) == (
        1,
        [["node-a", "ended"], ["node-b", "ended"]],
    )
    later = await run("nodes", "--since", "0", "--dsn", plain, "--namespace", space)
    assert later.out == f"no node of namespace {space} has been heard lately\n"


@pytest.fixture
async def three_terms(plain: str, space: str) -> None:
    """The role `scheduler` was led three times."""
    for name in ("node-a", "node-b", "node-a"):
        async with cluster(plain, space, [name], roles=["scheduler"]):
            pass


async def test_history_in_every_form(plain: str, space: str, three_terms: None) -> None:
    shown = await run("history", "scheduler", "--dsn", plain, "--namespace", space)
    assert (shown.code, shown.err) == (0, "")
    heading, *rows, total = shown.out.splitlines()
    assert heading.split() == ["epoch", "node", "began", "ended", "lasted", "end", "failover"]
    assert [row.split()[:2] for row in rows] == [["3", "node-a"], ["2", "node-b"], ["1", "node-a"]]
    assert all("released" in row for row in rows)
    assert rows[-1].endswith(" -"), "the first term follows none"
    assert re.fullmatch(r"3 terms, 2 nodes; leaderless: median .+, longest .+", total)
    view = json.loads((await run("history", "scheduler", "--json", "--dsn", plain, "--namespace", space)).out)
    assert [(t["epoch"], t["prev_node_id"]) for t in view["terms"]] == [(3, "node-b"), (2, "node-a"), (1, None)]
    assert view["more"] is False
    assert view["terms"][0]["failover_s"] > 0
    sheet = await run("history", "scheduler", "--csv", "--dsn", plain, "--namespace", space)
    table = list(csv.DictReader(io.StringIO(sheet.out)))
    assert [(t["epoch"], t["node_id"], t["reason"], t["failover_s"] == "") for t in table] == [
        ("3", "node-a", "released", False),
        ("2", "node-b", "released", False),
        ("1", "node-a", "released", True),
    ]


async def test_history_leaves_out_and_says_so(plain: str, space: str, three_terms: None) -> None:
    two = await run("history", "scheduler", "--limit", "2", "--dsn", plain, "--namespace", space)
    assert len(two.out.splitlines()) == 4
    assert "the newest 2 terms; older ones were left out" in two.err
    nothing = await run("history", "scheduler", "--since", "0", "--dsn", plain, "--namespace", space)
    assert nothing.code == 1
    unknown = await run("history", "no-such-role", "--dsn", plain, "--namespace", space)
    assert (unknown.code, "no term in namespace" in unknown.out) == (1, True)
    both = await run("history", "scheduler", "--json", "--csv", "--dsn", plain, "--namespace", space)
    assert both.code == 2
    assert "exclude each other" in both.err


@pytest.mark.parametrize("columns", ["60", "200"])
async def test_no_line_is_wider_than_the_terminal(plain: str, space: str, three_terms: None, columns: str) -> None:
    for args in (("roles",), ("nodes",), ("history", "scheduler")):
        done = await asyncio.to_thread(here, *args, "--dsn", plain, "--namespace", space, COLUMNS=columns)
        lines = done.out.splitlines()
        assert max(map(len, lines)) <= int(columns), args
        assert "\x1b" not in done.out
        assert all(line == line.rstrip() for line in lines)


# -- events -----------------------------------------------------------------------------------------------------------


async def test_events_are_listed_the_oldest_first(plain: str, space: str, three_terms: None) -> None:
    done = await run("events", "--role", "scheduler", "--dsn", plain, "--namespace", space)
    assert (done.code, done.err) == (0, "")
    assert [line.split(maxsplit=2)[2].split()[0] for line in done.out.splitlines()] == ["acquired", "released"] * 3
    newest = await run("events", "--role", "scheduler", "--limit", "1", "--json", "--dsn", plain, "--namespace", space)
    event = json.loads(newest.out)
    assert (event["kind"], event["node_id"], event["epoch"], event["role"]) == ("released", "node-a", 3, "scheduler")


async def test_following_shows_what_happens_and_ends_with_ctrl_c(plain: str, space: str) -> None:
    with running("events", "--follow", "--json", "--since", "1h", "--dsn", plain, "--namespace", space) as program:
        async with cluster(plain, space, ["node-a"], roles=["scheduler"]):
            await asyncio.to_thread(program.until, '"acquired"', "out")
        await asyncio.to_thread(program.until, '"released"', "out")
        program.signal(signal.SIGINT)
        assert await asyncio.to_thread(program.end) == 0
    assert program.err == ""
    kinds = [json.loads(line)["kind"] for line in program.out.splitlines()]
    assert [kind for kind in kinds if kind in ("acquired", "released")] == ["acquired", "released"]


def happen(dsn: str, role: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("INSERT INTO pgleaderlock.events (kind, namespace, role) VALUES ('acquired', 'n', %s)", (role,))


async def test_following_outlives_a_restart_of_the_database_and_leaves_nothing_out(
    throwaway_postgres: StartServer,
) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)

    def follow(program: Program) -> None:
        happen(server.dsn, "before")
        program.until("acquired             before", "out")
        server.stop()
        program.until("the database is away, waiting for it")
        server.start()
        happen(server.dsn, "while-away")
        program.until("acquired             while-away", "out")
        assert program.out.count("before") == 1
        assert program.err.count("is away") == 1
        assert "the database is back" in program.err

    with running("events", "-f", "--since", "1h", "--dsn", server.dsn, "--namespace", "n") as program:
        await asyncio.to_thread(follow, program)


# -- what can be wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", COMMANDS, ids=[args[0] for args in COMMANDS])
def test_what_is_wrong_is_said_with_the_remedy(dsn: str, plain: str, args: tuple[str, ...]) -> None:
    with database(dsn) as empty:
        missing = here(*args, "--dsn", empty)
    assert (missing.code, missing.out) == (2, "")
    assert "no ledger in this database: run `pgleaderlock migrate` on this database" in missing.err
    if args[0] not in ("roles", "drain"):
        return  # they share the rest
    wrong = here(*args, "--dsn", make_conninfo(plain, password="secret-word"))
    assert wrong.code == 2
    assert "check user and password" in wrong.err
    assert "secret-word" not in wrong.err
    away = here(*args, "--dsn", "host=127.0.0.1 port=1 dbname=x")
    assert away.code == 2
    assert "nothing listens there" in away.err


def test_a_role_without_rights_is_told_which(dsn: str, superuser: str) -> None:
    role = f"ops_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(superuser, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        admin.execute(f"GRANT CONNECT ON DATABASE elections TO {role}")
        try:
            stranger = make_conninfo(superuser, user=role, password="x")
            nothing = here("roles", "--dsn", stranger)
            admin.execute(f"GRANT USAGE ON SCHEMA pgleaderlock TO {role}")
            admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA pgleaderlock TO {role}")
            look = here("nodes", "--dsn", stranger, "--namespace", "empty")
            with deaf(superuser) as led:
                ask = here("step-down", led, "--dsn", stranger)
        finally:
            admin.execute(f"DROP OWNED BY {role}")
            admin.execute(f"DROP ROLE {role}")
    assert nothing.code == 2
    assert "not readable for this role: let its owner run `pgleaderlock migrate --grant-to ROLE`" in nothing.err
    assert look.code == 1, look
    assert ask.code == 2
    assert "permission denied" in ask.err
    assert "--grant-to ROLE" in ask.err


SPANS = [
    (None, "-"),
    (-3.0, "0 ms"),
    (0.0004, "0 ms"),
    (0.23, "230 ms"),
    (0.9996, "1.0 s"),
    (9.94, "9.9 s"),
    (9.96, "10 s"),
    (119.4, "119 s"),
    (120.0, "2 min"),
    (7199.0, "120 min"),
    (7200.0, "2 h"),
    (172800.0, "2 d"),
]


@pytest.mark.parametrize(("seconds", "shown"), SPANS)
def test_a_duration_in_a_few_characters(seconds: float | None, shown: str) -> None:
    assert span(seconds) == shown
