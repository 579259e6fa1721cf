"""The operator's hand: `step-down`, `drain`, `roles`, `nodes`, `history`, `events`, on real nodes and a real ledger."""

import asyncio
import contextlib
import csv
import datetime as dt
import io
import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartServer
from pgleaderlock import LeaderElection, LeaderToken, history, once
from pgleaderlock.cli import ask
from pgleaderlock.cli.app import run as program_run
from pgleaderlock.cli.output import MOMENT
from pgleaderlock.cli.reading import span
from pgleaderlock.errors import ConnectionError
from pgleaderlock.history import Asks, RoleView
from pgleaderlock.migrate import _migrations, migrate
from support.elections import STEADY, SilentLeader, fresh_database, ledger_dsns, one, opens, until
from support.fencing import database
from support.program import Done, Program, command, environment, running

WAIT_S = 60.0
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
            r"scheduler: node-a -> node-b, epoch 1 -> 2, \d+(\.\d)? m?s in which nobody could act\n", done.out
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
        assert "'node-x' would not lead scheduler: the candidates that live are node-a, node-b, node-c" in wrong.err


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


def test_a_leader_that_is_dead_is_reported_at_once(plain: str, superuser: str) -> None:
    role = f"dead-{uuid.uuid4().hex[:12]}"
    leader = SilentLeader(superuser, role, 600.0)
    try:
        with psycopg.connect(superuser, autocommit=True) as conn:
            conn.execute(
                "UPDATE pgleaderlock.sessions s SET last_heartbeat = now() - interval '11 minutes'"
                " FROM pgleaderlock.leaders l WHERE l.session_id = s.session_id AND l.role = %s",
                (role,),
            )
        done = here("step-down", role, "--dsn", plain)
    finally:
        leader.conn.close()
    assert (done.code, done.out) == (1, "")
    assert f"{role}: its leader silent was last heard 11 min ago, longer than its lease of 10 min" in done.err
    asked = one(superuser, "SELECT count(*) AS n FROM pgleaderlock.requests WHERE role = %s", role)
    assert asked["n"] == 0


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


async def not_saying_what_it_wants(superuser: str, space: str, node: str) -> None:
    """As a node with a library of version 4: it counts as a candidate for every role."""
    session = (space, node)
    wants = "SELECT wants FROM pgleaderlock.sessions WHERE namespace = %s AND node_id = %s"
    await until(lambda: one(superuser, wants, *session)["wants"] is not None, "the node has said what it wants")
    with psycopg.connect(superuser, autocommit=True) as conn:
        conn.execute("UPDATE pgleaderlock.sessions SET wants = NULL WHERE namespace = %s AND node_id = %s", session)


async def test_drain_waits_for_those_who_lead_next(
    plain: str, superuser: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[RoleView]] = []
    look_at_roles = history.all_roles

    async def all_roles(asks: Asks, namespace: str) -> list[RoleView]:
        looks.append(await look_at_roles(asks, namespace))
        return looks[-1]

    monkeypatch.setattr(ask, "SUCCESSORS_S", 600.0)
    monkeypatch.setattr(history, "all_roles", all_roles)
    async with cluster(plain, space, ["node-a"]), cluster(plain, space, ["node-b"], roles=["reports"]):
        await not_saying_what_it_wants(superuser, space, "node-b")
        asked = asyncio.create_task(run("drain", "node-a", "--dsn", plain, "--namespace", space))
        await until(
            lambda: looks and [role.state for role in looks[-1]] == ["nobody", "acting", "nobody"],
            "drain has looked who leads what node-a led",
        )
        async with cluster(plain, space, ["node-c"]):
            done = await asked
    assert done.out == "node-a: drained (clean); 2 roles, led now: 2 by node-c\n"


async def test_drain_waits_for_nobody_where_no_other_node_would_lead(
    plain: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "SUCCESSORS_S", 600.0)
    async with cluster(plain, space, ["node-a"]):
        done = await run("drain", "node-a", "--force", "--dsn", plain, "--namespace", space)
    assert (done.code, done.out) == (0, "node-a: drained (clean); 2 roles, led now: 2 by nobody yet\n")


def test_ctrl_c_after_a_drain_leaves_no_request(plain: str, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    async def drained() -> Done:
        async with cluster(plain, space, ["node-a"]):
            return await run("drain", "node-a", "--force", "--dsn", plain, "--namespace", space)

    monkeypatch.setattr(ask, "_leaders", interrupted)
    done = asyncio.run(drained())
    assert done.code == 130
    assert "stays" not in done.err


async def test_drain_says_so_when_it_cannot_see_who_leads_next(
    plain: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> dict[str, str | None]:
        raise ConnectionError("the connection was lost")

    monkeypatch.setattr(ask, "_leaders", lost)
    async with cluster(plain, space, ["node-a"]):
        done = await run("drain", "node-a", "--force", "--dsn", plain, "--namespace", space)
    assert done.code == 0
    assert done.out == "node-a: drained (clean); 2 roles; who leads now is not known\n"
    assert "the connection was lost" in done.err


async def test_a_request_that_was_made_when_the_connection_was_lost_is_told_to_stay(
    plain: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> None:
        raise ConnectionError("the connection was lost")

    monkeypatch.setattr(history, "request", lost)
    async with cluster(plain, space, ["node-a", "node-b"]):
        for args in (("drain", "node-b"), ("step-down", "billing")):
            done = await run(*args, "--dsn", plain, "--namespace", space)
            assert (done.code, done.out) == (1, "")
            said = r"error: the connection was lost\. Request \d+ was made and stays: `pgleaderlock roles` and "
            assert re.search(said, done.err), done.err


async def test_the_last_candidate_is_drained_by_force_only(plain: str, superuser: str, space: str) -> None:
    async with cluster(plain, space, ["node-a"]):
        refused = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
        assert (refused.code, refused.out) == (1, "")
        assert "node-a is the last candidate" in refused.err
        assert "2 roles would have no leader" in refused.err
        asked = one(superuser, "SELECT count(*) AS n FROM pgleaderlock.requests WHERE namespace = %s", space)
        assert asked["n"] == 0
        forced = await run("drain", "node-a", "--force", "--dsn", plain, "--namespace", space)
        assert forced.code == 0
        again = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
        assert again.code == 0, "it is no candidate any more"


async def test_a_node_is_the_last_candidate_of_a_role_that_no_other_one_wants(plain: str, space: str) -> None:
    async with (
        cluster(plain, space, ["node-a"]),
        cluster(plain, space, ["node-b"], roles=["mail"]) as (other,),
    ):
        await other.add_role("scheduler")
        await until_candidates(plain, space, billing=1, mail=1, scheduler=2)
        refused = await run("drain", "node-a", "--dsn", plain, "--namespace", space)
    assert (refused.code, refused.out) == (1, "")
    assert "node-a is the last candidate of billing: without it 1 role would have no leader" in refused.err


async def test_drain_says_what_it_waits_for(plain: str, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str] | None] = []
    say = ask._Left.say

    async def noted(left: ask._Left) -> None:
        await say(left)
        said.append(left._said)

    monkeypatch.setattr(ask, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(ask._Left, "say", noted)
    async with cluster(plain, space, ["node-a", "node-b"]) as (busy, _):
        with busy.gate("billing").acting():
            asked = asyncio.create_task(run("drain", "node-a", "--json", "--dsn", plain, "--namespace", space))
            await until(lambda: ["billing"] in said, "it has said that billing is left")
        done = await asked
    assert done.code == 0, done
    assert re.search(r"node-a: waits for the work of 1 role since .+: billing\n", done.err)
    view = json.loads(done.out)
    assert (view["node_id"], view["request"]["outcome"]) == ("node-a", "done")
    assert view["roles"] == {"billing": "node-b", "scheduler": "node-b"}


async def test_drain_ends_the_work_that_has_not_ended_in_time(plain: str, space: str) -> None:
    cancelled: list[str] = []

    async def work(node: LeaderElection) -> None:
        try:
            with node.gate("billing").acting():
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("billing")

    async with cluster(plain, space, ["node-a", "node-b"]) as (busy, _):
        working = asyncio.create_task(work(busy))
        await until(lambda: busy.gate("billing").in_flight, "the work has begun")
        where = ("--dsn", plain, "--namespace", space)
        done = await run("drain", "node-a", "--work-timeout", "200ms", *where)
        await working
    assert cancelled == ["billing"]
    assert (done.code, "node-a: drained (clean); 2 roles, led now: 2 by node-b" in done.out) == (0, True), done


async def test_a_second_drain_ends_the_work_that_the_first_one_waits_for(plain: str, space: str) -> None:
    """What cannot be cancelled, such as a thread, is not waited for either; the release is not clean then."""
    goes_on = threading.Event()

    def work(node: LeaderElection) -> None:
        with node.gate("billing").acting():
            goes_on.wait(WAIT_S)

    async with cluster(plain, space, ["node-a", "node-b"]) as (busy, _):
        working = asyncio.create_task(asyncio.to_thread(work, busy))
        try:
            await until(lambda: busy.gate("billing").in_flight, "the work has begun")
            where = ("--dsn", plain, "--namespace", space)
            first = await run("drain", "node-a", "--timeout", "100ms", *where)
            second = await run("drain", "node-a", "--work-timeout", "100ms", *where)
        finally:
            goes_on.set()
            await working
    assert (first.code, second.code) == (1, 0), (first, second)
    assert "node-a: drained (not clean" in second.out, second


def test_a_work_timeout_is_shorter_than_the_life_of_a_request(plain: str) -> None:
    for args in (("--work-timeout", "5m"), ("--work-timeout", "1s", "--resume")):
        refused = here("drain", "node-a", *args, "--dsn", plain)
        assert (refused.code, "--work-timeout" in refused.err) == (2, True), refused


async def test_drain_ends_also_when_no_other_node_is_after_the_roles(
    plain: str, superuser: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "SUCCESSORS_S", 0.1)
    async with cluster(plain, space, ["node-a"]), cluster(plain, space, ["node-b"], roles=["reports"]):
        await not_saying_what_it_wants(superuser, space, "node-b")
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
    async with cluster(plain, space, ["node-a", "node-b"]):
        roles = await run("roles", "--dsn", plain, "--namespace", space)
        assert (roles.code, roles.err) == (0, "")
        heading, *rows, total = roles.out.splitlines()
        assert heading.split() == [
            "role", "leader", "state", "epoch", "tenure", "heartbeat", "leads", "since", "candidates",
        ]  # fmt: skip
        assert [row.split()[:4] for row in rows] == [
            ["billing", "node-a", "acting", "1"],
            ["scheduler", "node-a", "acting", "1"],
        ]
        assert total == "2 roles: 2 acting; candidates: 2"
        view = json.loads((await run("roles", "--json", "--dsn", plain, "--namespace", space)).out)
        assert [(r["role"], r["state"], r["node_id"], r["candidates"]) for r in view["roles"]] == [
            ("billing", "acting", "node-a", 2),
            ("scheduler", "acting", "node-a", 2),
        ]
        nodes = await run("nodes", "--dsn", plain, "--namespace", space)
        assert nodes.code == 0
        assert [line.split()[:3] for line in nodes.out.splitlines()[1:]] == [
            ["node-a", "alive", "2"],
            ["node-b", "alive", "0"],
        ]
    free = await run("roles", "--dsn", plain, "--namespace", space)
    assert free.code == 1
    assert free.out.splitlines()[3:] == [
        "2 roles: 2 nobody; candidates: 0",
        "billing, scheduler: node-a gave it up; no node that would lead is alive",
        f"  pgleaderlock nodes --namespace {space}",
    ]
    gone = await run("nodes", "--dsn", plain, "--namespace", space)
    assert (gone.code, [line.split()[:2] for line in gone.out.splitlines()[1:]]) == (
        1,
        [["node-a", "ended"], ["node-b", "ended"]],
    )
    later = await run("nodes", "--since", "0", "--dsn", plain, "--namespace", space)
    assert later.out == f"no node of namespace {space} has been heard lately\n"


def test_a_ledger_without_any_role_is_no_failure(dsn: str) -> None:
    with fresh_database(dsn, ledger=True) as empty:
        none = here("roles", "--dsn", empty)
    assert (none.code, none.out) == (0, "no role has been led in namespace pgleaderlock yet\n")


async def test_a_wrong_namespace_is_noticed_by_every_command(dsn: str) -> None:
    with fresh_database(dsn, ledger=True) as database:
        async with cluster(database, "shop", ["node-a"]):
            for args in COMMANDS:
                done = await run(*args, "--dsn", database, "--namespace", "shpo")
                said = done.out + done.err
                assert "; namespaces with roles: shop" in said, (args, said)
                if args[0] not in ("watch", "events"):
                    assert done.code in (1, 2), args
            status = ("status", "--name", "r", "--dsn", database, "--namespace")
            assert "; namespaces with roles: shop" in " ".join((await run(*status, "shpo")).out.split())
            assert "namespaces with" not in (await run(*status, "shop")).out


async def test_what_ran_once_per_tick_is_no_role_of_another_namespace(dsn: str) -> None:
    async def works(_: LeaderToken) -> None:
        pass

    with fresh_database(dsn, ledger=True) as database:
        await once(database, "nightly", works, slot="monday", namespace="shop", **STEADY)
        for space in ("shop", "shpo"):
            none = await run("roles", "--dsn", database, "--namespace", space)
            assert (none.code, none.out) == (0, f"no role has been led in namespace {space} yet\n")
        wrong = await run("history", "--slots", "--dsn", database, "--namespace", "shpo")
    assert (wrong.code, wrong.out) == (1, "no slot in namespace shpo; namespaces with slots: shop\n")


# -- what is configured -----------------------------------------------------------------------------------------------


async def test_every_command_reads_database_and_namespace_from_the_configuration(
    plain: str, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgleaderlock.toml"
    file.write_text(f"[cluster.leader_election]\ndsn = {json.dumps(plain)}\nnamespace = {json.dumps(space)}\n")
    monkeypatch.chdir(tmp_path)
    async with cluster(plain, space, ["node-a"]):
        for args in (("roles",), ("nodes",), ("history", "billing"), ("events",), ("watch",)):
            done = await run(*args)
            assert done.code == 0, (args, done)
            assert "node-a" in done.out, args
        held = await run("status", "--name", "billing")
        assert (held.code, "node-a" in held.out) == (0, True)
        asked = await run("step-down", "billing")
        assert asked.out.startswith("billing: node-a -> node-a again")
        elsewhere = await asyncio.to_thread(here, "roles", PGLEADERLOCK_NAMESPACE=f"{space}-other")
        assert f"no role has been led in namespace {space}-other yet" in elsewhere.out, "a variable wins over the file"
        flag = await asyncio.to_thread(here, "roles", "--namespace", space, PGLEADERLOCK_NAMESPACE="x")
        assert flag.code == 0


def test_a_file_with_a_mistake_ends_a_command_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pgleaderlock.toml").write_text("[cluster.leader_election]\nnamespaec = 'x'\n")
    monkeypatch.chdir(tmp_path)
    done = here("roles", "--dsn", "host=127.0.0.1 port=1")
    assert done.code == 2
    assert "did you mean namespace?" in done.err


def test_the_file_does_not_decide_what_a_plain_lock_excludes(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pgleaderlock.toml").write_text("[cluster.leader_election]\nnamespace = 'shop'\n")
    monkeypatch.chdir(tmp_path)
    name = uuid.uuid4().hex
    with running("acquire", "--hold", "--name", name, "--dsn", dsn) as program:
        program.until("acquired", "out")
        assert here("acquire", "--name", name, "--namespace", "pgleaderlock", "--dsn", dsn).code == 1
        assert here("acquire", "--name", name, "--dsn", dsn, PGLEADERLOCK_NAMESPACE="shop").code == 0
        program.signal(signal.SIGTERM)
        assert program.end() == 0


def completed(words: str, **env: str) -> list[str]:
    """What a shell would offer for the last of these words."""
    typed = ["pgleaderlock", *words.split(" ")]
    asks = {"_PGLEADERLOCK_COMPLETE": "bash_complete", "COMP_CWORD": str(len(typed) - 1)}
    done = command(env={"COMP_WORDS": " ".join(typed), **asks, **env})
    assert done.err == ""
    return [line.partition(",")[2] for line in done.out.splitlines() if line]


async def test_a_shell_completes_commands_roles_and_nodes(plain: str, space: str) -> None:
    env = {"PG_DSN": plain, "PGLEADERLOCK_NAMESPACE": space}
    assert "roles" in completed("ro")
    async with cluster(plain, space, ["node-a", "node-b"]):
        assert await asyncio.to_thread(completed, "step-down b", **env) == ["billing"]
        assert await asyncio.to_thread(completed, "history ", **env) == ["billing", "scheduler"]
        assert await asyncio.to_thread(completed, "drain node", **env) == ["node-a", "node-b"]
        assert await asyncio.to_thread(completed, "step-down billing --to node-b", **env) == ["node-b"]
        assert await asyncio.to_thread(completed, "epoch advance sch", **env) == ["scheduler"]
    assert completed("drain node", PG_DSN="host=127.0.0.1 port=1") == []
    assert completed("drain node") == []


async def candidates_of(dsn: str, space: str) -> dict[str, int]:
    roles = json.loads((await run("roles", "--json", "--dsn", dsn, "--namespace", space)).out)["roles"]
    return {role["role"]: role["candidates"] for role in roles}


async def until_candidates(dsn: str, space: str, **wanted: int) -> None:
    """A node declares what it competes for a moment after it has decided it."""
    async with asyncio.timeout(WAIT_S):
        while wanted.items() - (await candidates_of(dsn, space)).items():
            await asyncio.sleep(0.05)


async def test_candidates_of_a_role_are_those_that_compete_for_it(plain: str, space: str) -> None:
    async with (
        cluster(plain, space, ["node-a"]),
        cluster(plain, space, ["node-b"], roles=["mail"]) as (other,),
    ):
        await until_candidates(plain, space, billing=1, mail=1, scheduler=1)
        await other.add_role("billing")
        await until_candidates(plain, space, billing=2)
        await other.drain("billing")
        await until_candidates(plain, space, billing=1)
        status = json.loads(
            (await run("status", "--json", "--name", "billing", "--dsn", plain, "--namespace", space)).out
        )
        refused = await run("step-down", "billing", "--to", "node-b", "--dsn", plain, "--namespace", space)
        nodes = json.loads((await run("nodes", "--json", "--dsn", plain, "--namespace", space)).out)["nodes"]
    assert [row["node_id"] for row in status["ledger"]["candidates"]] == ["node-a"]
    assert (refused.code, "'node-b' would not lead billing" in refused.err) == (2, True), refused
    assert {node["node_id"]: node["wants"] for node in nodes} == {"node-a": 2, "node-b": 1}


async def test_a_role_that_nobody_wants_can_be_forgotten_and_is_remembered_when_it_is_led(
    plain: str, space: str
) -> None:
    async with cluster(plain, space, ["node-a"]) as (node,):
        where = ("--dsn", plain, "--namespace", space)
        refused = await run("roles", "forget", "billing", *where)
        assert refused.code == 1, refused
        assert "billing: node-a still wants it" in refused.err
        await node.remove_role("billing")
        await until_candidates(plain, space, billing=0)
        red = await run("roles", *where)
        assert red.code == 1
        assert "no live node competes for it" in red.out
        assert f"pgleaderlock roles forget --namespace {space} billing" in red.out
        forgotten = await run("roles", "forget", "billing", *where)
        assert (forgotten.code, forgotten.out) == (0, "billing: forgotten, until a node leads it again\n"), forgotten
        assert (await run("roles", *where)).code == 0
        assert set(await candidates_of(plain, space)) == {"scheduler"}
        gone = await run("history", "--incidents", "--json", *where)
        assert [role for each in json.loads(gone.out)["incidents"] for role in each["without_leader"]] == []
        status = await run("status", "--json", "--name", "billing", *where)
        assert json.loads(status.out)["ledger"]["state"] == "forgotten"
        await node.add_role("billing")
        await opens(node, "billing")
        await until_candidates(plain, space, billing=1, scheduler=1)
        await node.remove_role("billing")
        await until_candidates(plain, space, billing=0)
        events = await run("events", "--kind", "forgotten", *where)
        assert "forgotten" in events.out


async def test_a_role_that_was_never_led_cannot_be_forgotten(plain: str, space: str) -> None:
    async with cluster(plain, space, ["node-a"]):
        done = await run("roles", "forget", "bililng", "--dsn", plain, "--namespace", space)
    assert (done.code, "did you mean billing?" in done.err) == (2, True), done


async def test_a_role_that_is_wanted_is_forgotten_by_force_once_its_leader_has_gone(plain: str, space: str) -> None:
    where = ("--dsn", plain, "--namespace", space)
    async with cluster(plain, space, ["node-a"]):
        forced = await run("roles", "forget", "--force", "billing", *where)
        assert forced.code == 0, forced
        assert set(await candidates_of(plain, space)) == {"billing", "scheduler"}, "it is led"
    assert set(await candidates_of(plain, space)) == {"scheduler"}


async def test_a_node_that_drains_is_alive_and_no_candidate(plain: str, space: str) -> None:
    async with cluster(plain, space, ["node-a"]):
        assert (await run("drain", "node-a", "--force", "--dsn", plain, "--namespace", space)).code == 0
        nodes = await run("nodes", "--dsn", plain, "--namespace", space)
        assert (nodes.code, nodes.out.splitlines()[1].split()[:2]) == (1, ["node-a", "drained"])


async def test_nodes_are_told_apart_by_what_they_do(plain: str, superuser: str, space: str) -> None:
    async def states() -> dict[str, tuple[str, str | None]]:
        done = await run("nodes", "--json", "--dsn", plain, "--namespace", space)
        return {node["node_id"]: (node["state"], node["requested"]) for node in json.loads(done.out)["nodes"]}

    with psycopg.connect(superuser, autocommit=True) as conn:
        found = (("fresh", 0, 0, False), ("cut-off", 5, 20, False), ("gone", 5, 0, True))
        for name, *_ in found:
            conn.execute(
                "SELECT pgleaderlock.open_session(%s, gen_random_uuid(), %s, 'h', 1, %s, 5, 10, true, 'test')",
                (space, name, name),
            )
        for name, beat, silent_s, ended in found:  # each session has ended the one before: one backend has one
            conn.execute(
                "UPDATE pgleaderlock.sessions SET beat = %s, last_heartbeat = now() - make_interval(secs => %s),"
                " ended_at = CASE WHEN %s THEN now() END WHERE namespace = %s AND node_id = %s",
                (beat, silent_s, ended, space, name),
            )
        assert await states() == {"fresh": ("starting", None), "cut-off": ("silent", None), "gone": ("ended", None)}
        conn.execute("UPDATE pgleaderlock.sessions SET ended_at = now() WHERE namespace = %s", (space,))
    async with cluster(plain, space, ["node-a", "node-b"]) as (busy, _):
        with busy.gate("billing").acting():
            ask_it = one(superuser, "SELECT pgleaderlock.request_drain('node-a', %s, 'x') AS n", space)
            assert ask_it["n"] is not None
            await until(lambda: leads(superuser, space, "node-a") == 1, "scheduler was given up")
            drains = "SELECT draining FROM pgleaderlock.sessions WHERE namespace = %s AND node_id = 'node-a'"
            await until(lambda: one(superuser, drains, space)["draining"], "and the ledger has heard of the drain")
            now = await states()
            assert (now["node-a"], now["node-b"]) == (("draining", "drain"), ("alive", None))
        await until(lambda: leads(superuser, space, "node-a") == 0, "billing was given up, too")
        assert (await states())["node-a"][0] == "drained"


def leads(superuser: str, space: str, node: str) -> int:
    query = "SELECT count(*) AS n FROM pgleaderlock.terms WHERE namespace = %s AND node_id = %s AND ended_at IS NULL"
    return int(one(superuser, query, space, node)["n"])


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
    assert heading.split() == ["epoch", "node", "began", "ended", "lasted", "end", "failover", "shut"]
    assert [row.split()[:2] for row in rows] == [["3", "node-a"], ["2", "node-b"], ["1", "node-a"]]
    assert all("released" in row for row in rows)
    assert rows[-1].split()[-2:] == ["-", "-"], "the first term follows none"
    assert re.fullmatch(r"3 terms, 2 nodes; nobody could act between terms: median .+, longest .+", total)
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


async def test_a_narrow_terminal_shows_every_column_for_which_there_is_room(
    plain: str, space: str, superuser: str, three_terms: None
) -> None:
    narrow = await asyncio.to_thread(here, "nodes", "--dsn", plain, "--namespace", space, COLUMNS="80")
    with psycopg.connect(superuser, autocommit=True) as conn:
        conn.execute("UPDATE pgleaderlock.sessions SET host = repeat('h', 60) WHERE namespace = %s", (space,))
    left_out = await asyncio.to_thread(here, "nodes", "--dsn", plain, "--namespace", space, COLUMNS="80")
    headings = "node state leads wants heartbeat up for session host pid version"
    assert " ".join(narrow.out.splitlines()[0].split()) == headings
    assert " ".join(left_out.out.splitlines()[0].split()) == headings.replace(" host", "")


@pytest.mark.parametrize("columns", ["60", "80", "200"])
async def test_no_line_is_wider_than_the_terminal(plain: str, space: str, three_terms: None, columns: str) -> None:
    for args in (("roles",), ("nodes",), ("history", "scheduler")):
        done = await asyncio.to_thread(here, *args, "--dsn", plain, "--namespace", space, COLUMNS=columns)
        lines = done.out.splitlines()
        assert max(map(len, lines)) <= int(columns), args
        assert "\x1b" not in done.out
        assert all(line == line.rstrip() for line in lines)


# -- incidents and filters --------------------------------------------------------------------------------------------


class Past:
    """Terms and events that a test writes into the ledger itself, of roles that no node knows."""

    def __init__(self, superuser: str, space: str) -> None:
        self._superuser, self._space = superuser, space
        self.now = one(superuser, "SELECT clock_timestamp() AS now")["now"]

    def term(
        self, role: str, epoch: int, node: str, times: tuple[float, float | None], reason: str | None = None
    ) -> None:
        """From when to when: seconds before now. The leader of one that has not ended lives."""
        began, ended = (None if s is None else self.now - dt.timedelta(seconds=s) for s in times)
        with psycopg.connect(self._superuser, autocommit=True) as conn:
            session_id = 0 if ended is not None else self.session(conn, node)
            conn.execute(
                "INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity,"
                " began_at, ended_at, reason) VALUES (%s, %s, %s, %s, %s, 'h', %s, %s, %s)",
                (self._space, role, epoch, session_id, node, began, ended, reason),
            )

    def session(self, conn: psycopg.Connection[Any], node: str) -> int:
        row = conn.execute(
            "INSERT INTO pgleaderlock.sessions (namespace, instance, node_id, host, os_pid, holder_identity,"
            " backend_pid, backend_start, database_role, gate_s, lease_s, candidate, library_version, last_heartbeat)"
            " VALUES (%s, gen_random_uuid(), %s, 'h', 1, 'h', 1, now(), 'x', 3600, 7200, false, '1', now())"
            " RETURNING session_id",
            (self._space, node),
        ).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def past(superuser: str, space: str) -> Past:
    """Node-2 crashed 2 h ago with three roles, node-1 gave one of them up an hour ago, and lost it again just now."""
    past = Past(superuser, space)
    for role, gap_s, successor in (("a", 1.0, "node-1"), ("b", 4.2, "node-3"), ("c", 2.0, "node-1")):
        past.term(role, 1, "node-2", (9000, 7200), "lost")
        past.term(
            role, 2, successor, (7200 - gap_s, 3600 if role == "a" else None), "released" if role == "a" else None
        )
    past.term("a", 3, "node-3", (3599.5, 10), "evicted")
    return past


def incidents(plain: str, space: str, *args: str) -> list[tuple[str, str, list[str]]]:
    done = here("history", "--incidents", "--json", *args, "--dsn", plain, "--namespace", space)
    assert done.code in (0, 1), done
    found = json.loads(done.out)["incidents"]
    assert (done.code == 0) == bool(found)
    return [(entry["node_id"], entry["reason"], entry["roles"]) for entry in found]


def test_a_crash_of_a_node_is_one_incident(plain: str, space: str, past: Past) -> None:
    done = here("history", "--incidents", "--dsn", plain, "--namespace", space)
    assert done.code == 0, done
    heading, *rows = done.out.splitlines()
    assert heading.split() == ["began", "node", "what", "roles", "longest", "taken", "over", "by", "which"]
    cells = [re.split(r"  +", row)[1:] for row in rows]
    assert [cell[:3] for cell in cells] == [
        ["node-3", "evicted", "1"],
        ["node-1", "released", "1"],
        ["node-2", "lost", "3"],
    ]
    assert cells[0][4:] == ["1 without a leader", "a"]
    assert cells[1][3:] == ["500 ms", "node-3", "a"]
    assert cells[2][3:] == ["4.2 s", "node-1, node-3", "a, b, c"]


def test_a_leader_that_no_node_was_left_to_replace_is_an_incident_that_lasts(
    plain: str, superuser: str, space: str
) -> None:
    past = Past(superuser, space)
    past.term("a", 1, "node-1", (90_000, None))
    past.term("b", 1, "node-2", (90_000, None))
    assert incidents(plain, space) == []
    with psycopg.connect(superuser, autocommit=True) as conn:
        conn.execute(
            "UPDATE pgleaderlock.sessions SET last_heartbeat = now() - interval '3 h'"
            " WHERE namespace = %s AND node_id = 'node-1'",
            (space,),
        )
    assert incidents(plain, space) == [("node-1", "lost", ["a"])]
    listed = here("history", "--incidents", "--json", "--dsn", plain, "--namespace", space)
    (shown,) = json.loads(listed.out)["incidents"]
    assert (shown["without_leader"], shown["ended_at"], shown["longest_s"] >= 3 * 3600) == (["a"], None, True)
    for role, how in (("a", "silent"), ("b", "leads")):
        terms = here("history", role, "--dsn", plain, "--namespace", space, COLUMNS="60").out.splitlines()
        assert how in terms[1].split(), terms


def test_a_node_that_crashes_again_is_another_incident(plain: str, space: str, superuser: str) -> None:
    past = Past(superuser, space)
    past.term("a", 1, "node-1", (100, 90), "lost")
    past.term("a", 2, "node-1", (85, 80), "lost")
    past.term("a", 3, "node-1", (75, None))
    assert incidents(plain, space) == [("node-1", "lost", ["a"])] * 2


async def test_history_and_status_show_what_ran_once_per_tick(plain: str, space: str) -> None:
    async def fails(_: LeaderToken) -> None:
        raise KeyError("why")

    async def works(_: LeaderToken) -> None:
        pass

    for slot, work in (("monday", works), ("tuesday", fails)):
        with contextlib.suppress(KeyError):
            await once(plain, "nightly", work, slot=slot, namespace=space, node_id="node-1", **STEADY)
    await once(plain, "hourly", works, slot="15:00", namespace=space, node_id="node-2", **STEADY)

    async def slots(*args: str) -> list[tuple[str, str, str, str]]:
        done = await run("history", "--slots", *args, "--json", "--dsn", plain, "--namespace", space)
        found = json.loads(done.out)["slots"]
        assert (done.code == 0) == bool(found)
        return [(slot["name"], slot["slot"], slot["state"], slot["node_id"]) for slot in found]

    newest = [("hourly", "15:00", "done", "node-2"), ("nightly", "tuesday", "failed", "node-1")]
    assert await slots() == newest
    assert await slots("--node", "node-2") == newest[:1]
    assert await slots("nightly") == [newest[1], ("nightly", "monday", "done", "node-1")]
    assert await slots("nightly", "--limit", "1") == newest[1:]
    assert await slots("nightly", "--until", "1h") == []
    table = await run("history", "--slots", "--dsn", plain, "--namespace", space)
    heading, _, row = table.out.splitlines()
    assert heading.split() == ["name", "slot", "state", "attempts", "began", "took", "node", "detail"]
    assert row.endswith("KeyError('why')")
    hint = await run("history", "nightly", "--dsn", plain, "--namespace", space)
    assert (hint.code, "pgleaderlock history --slots nightly" in hint.out) == (1, True)
    wrong = await run("history", "--slots", "--csv", "--dsn", plain, "--namespace", space)
    assert (wrong.code, "--slots goes with" in wrong.err) == (2, True)
    status = ("status", "--name", "nightly", "--dsn", plain, "--namespace", space)
    assert "tuesday failed: KeyError('why')" in (await run(*status)).out
    shown = json.loads((await run(*status, "--json")).out)["ledger"]["slot"]
    assert (shown["slot"], shown["state"], shown["attempts"]) == ("tuesday", "failed", 1)


FILTERS: list[tuple[tuple[str, ...], list[str]]] = [
    ((), ["evicted", "released", "lost"]),
    (("--since", "90m"), ["evicted", "released"]),
    (("--since", "3h", "--until", "90m"), ["lost"]),
    (("--reason", "lost", "--reason", "evicted"), ["evicted", "lost"]),
    (("--min-gap", "1s"), ["evicted", "lost"]),
    (("--node", "node-1"), ["released", "lost"]),
    (("b",), ["lost"]),
    (("--limit", "1"), ["evicted"]),
    (("--since", "5s"), []),
]


@pytest.mark.parametrize(("args", "found"), FILTERS, ids=lambda value: " ".join(value) or "-")
def test_incidents_can_be_narrowed_down(
    plain: str, space: str, past: Past, args: tuple[str, ...], found: list[str]
) -> None:
    assert [reason for _, reason, _ in incidents(plain, space, *args)] == found


def test_terms_can_be_narrowed_down(plain: str, space: str, past: Past) -> None:
    def epochs(*args: str) -> list[int]:
        done = here("history", "a", "--json", *args, "--dsn", plain, "--namespace", space)
        return [term["epoch"] for term in json.loads(done.out)["terms"]]

    assert epochs() == [3, 2, 1]
    assert epochs("--reason", "lost") == [1]
    assert epochs("--node", "node-1") == [2]
    assert epochs("--min-gap", "900ms") == [2]
    assert epochs("--until", "90m") == [2, 1]
    moment = past.now - dt.timedelta(seconds=3700)
    assert epochs("--since", moment.isoformat()) == [3, 2]
    which = here("history", "--dsn", plain, "--namespace", space)
    assert (which.code, "which role?" in which.err) == (2, True)


async def test_events_can_be_narrowed_down(plain: str, space: str, three_terms: None) -> None:
    async def kinds(*args: str) -> list[str]:
        done = await run("events", "--json", *args, "--dsn", plain, "--namespace", space)
        assert done.code == 0, done
        return [json.loads(line)["kind"] for line in done.out.splitlines()]

    assert await kinds("--kind", "acquired") == ["acquired"] * 3
    assert await kinds("--kind", "acquired", "--node", "node-b") == ["acquired"]
    assert await kinds("--kind", "session-ended", "--limit", "2") == ["session_ended"] * 2
    assert await kinds("--until", "1h") == []


MOMENTS = [
    ("90m", dt.timedelta(minutes=90)),
    ("0", dt.timedelta()),
]


@pytest.mark.parametrize(("text", "ago"), MOMENTS)
def test_a_duration_is_a_moment_that_long_ago(text: str, ago: dt.timedelta) -> None:
    before = dt.datetime.now(dt.UTC)
    moment = MOMENT.convert(text, None, None)
    assert before - ago <= moment <= dt.datetime.now(dt.UTC) - ago


def test_a_time_of_day_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        for minutes, days in ((-2, 0), (2, 1)):
            local = dt.datetime.now().astimezone() + dt.timedelta(minutes=minutes)
            moment = MOMENT.convert(f"{local:%H:%M}", None, None)
            assert moment <= dt.datetime.now(dt.UTC)
            assert moment.date() == (local - dt.timedelta(days=days)).date()
            assert (moment.hour, moment.minute, moment.second) == (local.hour, local.minute, 0)
        assert MOMENT.convert("2026-11-15", None, None).isoformat() == "2026-11-15T00:00:00+01:00"
        assert MOMENT.convert("2026-07-15 03:00", None, None).isoformat() == "2026-07-15T03:00:00+02:00"
        assert MOMENT.convert("2026-07-15T03:00Z", None, None) == dt.datetime(2026, 7, 15, 3, tzinfo=dt.UTC)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["yesterday", "25:00", "3 h", "2026-13-01", ""])
def test_what_is_no_moment_is_refused_with_examples(text: str) -> None:
    done = here("events", "--since", text, "--dsn", "host=127.0.0.1 port=1")
    assert (done.code, "is no moment: write 3h (ago), 03:00" in done.err) == (2, True)


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


# -- epoch advance ----------------------------------------------------------------------------------------------------


def test_several_epochs_or_all_of_a_namespace_are_advanced(superuser: str, space: str, dsn: str) -> None:
    for role in ("a", "b", "c"):
        with psycopg.connect(superuser, autocommit=True) as conn:
            conn.execute(
                "INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2, epoch, ended)"
                " VALUES (%s, %s, hashtext(%s), hashtext(%s), 7, true)",
                (space, role, space, role),
            )
    two = here("epoch", "advance", "a", "b", "--dsn", superuser, "--namespace", space)
    assert (two.code, re.findall(r"(\w): epoch 7 -> \d+", two.out)) == (0, ["a", "b"])
    every = here("epoch", "advance", "--all", "--dsn", superuser, "--namespace", space)
    assert (every.code, re.findall(r"(\w): epoch", every.out)) == (0, ["a", "b", "c"])
    for args in ((), ("a", "--all")):
        neither = here("epoch", "advance", *args, "--dsn", superuser, "--namespace", space)
        assert (neither.code, "which roles? Name them, or give --all" in neither.err) == (2, True)
