"""A thousand roles on one node cost what one costs: connections, statements, memory; and none delays another.

Durations are printed here and judged by `make bench`.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.migrate import migrate
from support.counts import count
from support.election_node import WAIT_S, ElectionNode, election_node

MANY = {
    "heartbeat_interval_s": 0.6,
    "late_threshold_s": 1.5,
    "session_lease_s": 2.0,
    "acquire_delay_s": (0.1, 0.3),
    "acts": False,
}
PATIENT = {**MANY, "late_threshold_s": 4.0, "session_lease_s": 5.0}
RESIDENT_KB_MAX = 100 * 1024
_STATEMENT = re.compile(r"^(\d+) LOG:  statement: ", re.MULTILINE)


def many() -> list[str]:
    return [f"role-{number:04}" for number in range(count(100, 1000))]


@pytest.fixture
async def server(throwaway_postgres: StartServer) -> EmbeddedPostgres:
    """A server that writes down every statement, and who sent it."""
    server = throwaway_postgres(log_statement="all", log_line_prefix="%p ")
    await migrate(server.dsn)
    return server


async def look(server: EmbeddedPostgres, text: str, *params: object) -> list[tuple[Any, ...]]:
    async with await psycopg.AsyncConnection.connect(server.dsn, autocommit=True, application_name="look") as conn:
        return await (await conn.execute(text.encode(), params)).fetchall()


async def session_of(server: EmbeddedPostgres, node: str) -> int:
    (found,) = await look(
        server, "SELECT backend_pid FROM pgleaderlock.sessions WHERE node_id = %s AND ended_at IS NULL", node
    )
    return int(found[0])


def statements(server: EmbeddedPostgres, pid: int) -> list[str]:
    """What one backend was asked, in order: `beat`, `try`, `bump`, or the statement itself."""
    texts = _STATEMENT.split(server.log_path.read_text())[1:]
    kinds = {
        "pgleaderlock.beat(": "beat",
        "EXECUTE pgleaderlock_heartbeat": "beat",  # the server logs what was prepared beside it
        "PREPARE pgleaderlock_heartbeat": "prepare",
        "pg_try_advisory_lock(": "try",
        "pgleaderlock.bump(": "bump",
        "pg_terminate_backend(": "evict",
        "SELECT o.host, o.os_pid": "namesakes",
    }
    return [
        next((kind for mark, kind in kinds.items() if mark in text), text[:80])
        for sender, text in zip(texts[::2], texts[1::2], strict=True)
        if int(sender) == pid
    ]


async def statements_over(server: EmbeddedPostgres, pid: int, beats: int) -> Counter[str]:
    """What one backend is asked from now on, until it has beaten so often. Nothing announces a line in the log.

    Without the one question of each session about others of its name.
    """
    before = len(statements(server, pid))
    async with asyncio.timeout(WAIT_S):
        while (asked := statements(server, pid)[before:]).count("beat") < beats:
            await asyncio.sleep(0.1)
    return Counter(kind for kind in asked if kind != "namesakes")


@contextlib.asynccontextmanager
async def leader_and_follower(
    server: EmbeddedPostgres, roles: list[str], folder: Path
) -> AsyncIterator[tuple[ElectionNode, ElectionNode]]:
    """One that leads all of them, and one that has seen it."""
    async with election_node(server.dsn, "first", roles, folder / "sends", **MANY) as first:
        await first.until(lambda: len(first.acquired()) == len(roles))
        async with election_node(server.dsn, "second", roles, folder / "sends", **MANY) as second:
            await second.hears("started")
            yield first, second


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_many_roles_share_two_connections_and_two_statements_a_tick(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    roles = many()
    async with leader_and_follower(server, roles, tmp_path) as (first, second):
        for node in (first, second):
            (connections,) = await look(
                server,
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s",
                f"pgleaderlock % {node.name} %",
            )
            assert connections == (2,), "one, and one that listens"
        asked = await statements_over(server, await session_of(server, "first"), beats=3)
        assert set(asked) == {"beat"}, "a leader of everything has nothing else to ask"
        followed = await statements_over(server, await session_of(server, "second"), beats=3)
        assert set(followed) == {"beat", "try"}
        # A try every 0.1 s at most, and three beats: no statement is there once for each role.
        assert followed["try"] < 40
        memory = {node.name: await node.asked("memory") for node in (first, second)}
        resident = ", ".join(f"{said['rss_kb'] / 1024:.0f} MB" for said in memory.values())
        print(  # noqa: T201
            f"{len(roles)} roles: {dict(asked)} of the leader and {dict(followed)} of the follower over 3 beats;"
            f" resident {resident}"
        )
        assert memory["first"]["led"] == len(roles)
        assert memory["second"]["led"] == 0
        assert max(said["rss_kb"] for said in memory.values()) < RESIDENT_KB_MAX


async def test_without_a_listener_there_is_one_connection(server: EmbeddedPostgres, tmp_path: Path) -> None:
    async with election_node(server.dsn, "quiet", many(), tmp_path / "sends", **MANY, listen_channel=None) as node:
        await node.until(lambda: len(node.acquired()) == len(many()))
        assert await look(
            server, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgleaderlock%%'"
        ) == [(1,)]


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_when_a_leader_of_many_is_killed_another_leads_all_of_them(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    roles = many()
    async with leader_and_follower(server, roles, tmp_path) as (first, second):
        first.signal(signal.SIGKILL)
        await second.until(lambda: len(second.acquired()) == len(roles))
        won = second.acquired().values()
        print(f"{len(roles)} roles: all within {(max(won) - min(won)) / 1e9:.3f} s of the first")  # noqa: T201
        await second.until(lambda: _open_gates(second) == set(roles))
        epochs = await look(server, "SELECT role, max(epoch), count(*) FROM pgleaderlock.terms GROUP BY role")
        assert {role: (epoch, terms) for role, epoch, terms in epochs} == dict.fromkeys(roles, (2, 2))


@pytest.mark.timeout(300)
async def test_a_stuck_writer_holds_up_its_own_role_and_no_other(server: EmbeddedPostgres, tmp_path: Path) -> None:
    roles = many()
    busy = roles[len(roles) // 2]
    async with leader_and_follower(server, roles, tmp_path) as (first, second):
        async with await psycopg.AsyncConnection.connect(server.dsn, application_name="stuck writer") as writer:
            await writer.execute("SELECT pgleaderlock.fence(%s, 1)", (busy,))
            first.signal(signal.SIGKILL)
            await second.until(lambda: len(second.acquired()) == len(roles) - 1)
            assert busy not in second.acquired()
            bumps = statements(server, await session_of(server, "second")).count("bump")
            print(f"{len(roles) - 1} roles were led after {bumps} bumps, one remains")  # noqa: T201
            assert bumps < 20, "they were led one by one, between waits for the stuck one"
            # It has the lock by now, and keeps asking; the others are beaten for all the while.
            await second.until(lambda: _open_gates(second) == set(roles) - {busy})
            asked = await statements_over(server, await session_of(server, "second"), beats=3)
            assert asked["beat"] == 3
            assert (await second.asked("memory"))["led"] == len(roles) - 1
            stuck = await second.asked("ask", busy)
            assert (stuck["epoch"], stuck["reason"]) == (None, "never_led")
            assert stuck["state"] in ("follower", "acquiring")
            await writer.commit()
        await second.until(lambda: busy in second.acquired())
        await second.until(lambda: _open_gates(second) == set(roles))


@pytest.mark.long
async def test_a_stream_of_writers_does_not_hold_up_a_role_while_others_are_stuck(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Writers that follow each other without a gap leave no moment to grab: only queueing up behind them wins."""
    roles = [f"role-{number}" for number in range(5)]
    async with leader_and_follower(server, roles, tmp_path) as (first, second), contextlib.AsyncExitStack() as stack:
        for role in roles[:-1]:
            writer = await psycopg.AsyncConnection.connect(server.dsn, application_name="stuck writer")
            await stack.enter_async_context(writer)
            await writer.execute("SELECT pgleaderlock.fence(%s, 1)", (role,))
        stream = [asyncio.create_task(_write_on(server.dsn, roles[-1], number)) for number in range(4)]
        try:
            first.signal(signal.SIGKILL)
            await second.until(lambda: set(second.acquired()) == {roles[-1]})
            ended = await asyncio.gather(*stream, return_exceptions=True)
            assert all(isinstance(error, psycopg.Error) and error.sqlstate == "PGL02" for error in ended), ended
        finally:
            for task in stream:
                task.cancel()


async def _write_on(dsn: str, role: str, number: int) -> None:
    """One fenced transaction after the other, until the epoch is over."""
    async with await psycopg.AsyncConnection.connect(dsn, application_name="busy writer") as writer:
        while True:
            await writer.execute("SELECT pgleaderlock.fence(%s, 1)", (role,))
            await writer.execute("SELECT pg_sleep(%s)", (0.03 + number / 100,))
            await writer.commit()


@pytest.mark.long
async def test_a_session_that_cannot_be_ended_is_tried_once_for_all_its_roles(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Its backend does not react, and each try to end it takes a while: the heart of whoever tries must go on beating.

    The lease should have ended it; a backend that stands still cannot see to that.
    """
    roles = [f"role-{number}" for number in range(40)]
    short = {**MANY, "heartbeat_interval_s": 0.3, "late_threshold_s": 0.6, "session_lease_s": 0.8}
    async with election_node(server.dsn, "first", roles, tmp_path / "sends", **short) as first:
        await first.until(lambda: len(first.acquired()) == len(roles))
        stuck = await session_of(server, "first")
        async with election_node(server.dsn, "second", [*roles, "own"], tmp_path / "sends", **PATIENT) as second:
            await second.until(lambda: _open_gates(second) == {"own"})
            here = await session_of(server, "second")
            os.kill(stuck, signal.SIGSTOP)
            try:
                first.signal(signal.SIGKILL)
                await until_asked(server, here, "evict", 1)
                before = statements(server, here)
                await until_asked(server, here, "beat", before.count("beat") + 3)
                tried = statements(server, here).count("evict")
                print(f"{tried} tries to end the session of {len(roles)} roles")  # noqa: T201
                assert tried <= 4
                assert _open_gates(second) == {"own"}
            finally:
                os.kill(stuck, signal.SIGCONT)
            await second.until(lambda: _open_gates(second) == {*roles, "own"})
            lost = [said for said in second.said if said["what"] == "change" and said["role"] == "own"]
            assert [said["is_leader"] for said in lost if said["epoch"]] == [True], "its own role was led throughout"


async def until_asked(server: EmbeddedPostgres, pid: int, kind: str, times: int) -> None:
    """Until a backend was asked this so often. Nothing announces a line in the log."""
    async with asyncio.timeout(WAIT_S):
        while statements(server, pid).count(kind) < times:
            await asyncio.sleep(0.1)


def _open_gates(node: ElectionNode) -> set[str]:
    """The roles that it may act for, by the changes that it has told of."""
    last = {message["role"]: message["is_leader"] for message in node.said if message["what"] == "change"}
    return {role for role, is_leader in last.items() if is_leader}
