"""The figures of elections that hold by a lease, through PgBouncer in transaction mode."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tools.debian import provide

from bench.election import kill_rounds
from bench.harness import Figure, median, percentile
from bench.peers import free_port, running
from pgleaderlock import LeaderElection
from pgleaderlock._election.engine import Engine
from pgleaderlock._pg.lease import LeaseSession
from pgleaderlock.migrate import migrate

__all__ = ["failover", "standbys", "tick"]

ROUNDS = 6
QUICK_ROUNDS = 15
QUICK: dict[str, object] = {"heartbeat_interval_s": 0.5, "late_threshold_s": 1.5, "session_lease_s": 2.0}
DEFAULT_T_S, QUICK_T_S = 7.0, 2.0
ROLES = 1_000
STANDBYS = (10, 100)
POOL_SIZE = 5
MEASURE_S = 15.0
WAIT_S = 60.0


@contextlib.asynccontextmanager
async def _pooled(dsn: str) -> AsyncIterator[str]:
    """The DSN of a PgBouncer with a few backends."""
    tool, port = provide("pgbouncer"), free_port()
    with tempfile.TemporaryDirectory(prefix="pgl-bench-pool-", dir="/tmp") as folder:
        settings = _configured(Path(folder), dsn, port)
        # PgBouncer refuses to run as root.
        user = ["-u", "nobody"] if os.geteuid() == 0 else []
        async with running([str(tool.path), "-q", *user, str(settings)], port, tool.env):
            yield make_conninfo(dsn, host="127.0.0.1", port=port)


def _configured(folder: Path, dsn: str, port: int) -> Path:
    folder.chmod(0o711)
    server = conninfo_to_dict(dsn)
    target = make_conninfo(
        "", **{name: server[name] for name in ("host", "port", "user", "password") if name in server}
    )
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = {target}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\n"
        f"unix_socket_dir =\npool_mode = transaction\nmax_client_conn = 2000\ndefault_pool_size = {POOL_SIZE}\n",
        encoding="utf-8",
    )
    settings.chmod(0o644)
    return settings


async def failover(dsn: str) -> list[Figure]:
    """SIGKILL of the leader until the successor may act, at two lengths of T."""
    await migrate(dsn)
    figures = []
    async with _pooled(dsn) as pooled:
        for t_s, rounds, options in ((DEFAULT_T_S, ROUNDS, {}), (QUICK_T_S, QUICK_ROUNDS, QUICK)):
            role = f"bench-lease-{t_s:g}"
            _, opened = await kill_rounds(pooled, role, {**options, "hold": "lease"}, rounds, written=False)
            figures.append(
                Figure(
                    f"leases: SIGKILL → successor's gate open, T = {t_s:g} s, p99",
                    f"p50 {median(opened):.2f} s, p99 {percentile(opened, 99):.2f} s",
                    f"through PgBouncer in transaction mode ({rounds} rounds)",
                    percentile(opened, 99),
                    t_s + 1.0,
                    "s",
                )
            )
    return figures


async def tick(dsn: str) -> Figure:
    """The most messages of one tick, with one lease that leads a thousand roles and another that stands by for them."""
    await migrate(dsn)
    names = [f"bench-lease-{number}" for number in range(ROLES)]
    async with _pooled(dsn) as pooled, LeaderElection(pooled, names, node_id="leads", hold="lease") as leader:
        await asyncio.gather(*(leader.gate(name).wait_open(WAIT_S) for name in names))
        async with LeaderElection(pooled, names, node_id="stands-by", hold="lease") as standby:
            while any(standby.leader(name) is None for name in names):
                await asyncio.sleep(0.1)
            with _counted() as most:
                await asyncio.sleep(MEASURE_S)
    return Figure(
        "leases: 1,000 roles, most messages in one tick",
        f"leader and standby, over {MEASURE_S:g} s",
        "a message is one transaction",
        max(most.values(), default=0),
        2.0,
        "",
    )


@contextlib.contextmanager
def _counted() -> Any:
    """The most messages that each session has sent in one tick."""
    tick_of, once = Engine._tick, LeaseSession._once
    now: dict[object, int] = {}
    most: dict[object, int] = {}

    async def counted_tick(engine: Engine) -> None:
        session = None if engine._board.ledger is None else engine._board.ledger.session
        now[session] = 0
        await tick_of(engine)
        most[session] = max(most.get(session, 0), now[session])

    async def counted_once(session: LeaseSession, *args: Any) -> Any:
        now[session] = now.get(session, 0) + 1
        return await once(session, *args)

    Engine._tick, LeaseSession._once = counted_tick, counted_once  # type: ignore[method-assign, assignment]
    try:
        yield most
    finally:
        Engine._tick, LeaseSession._once = tick_of, once  # type: ignore[method-assign]


async def standbys(dsn: str) -> Figure:
    """What standbys cost the server: backends, and transactions."""
    await migrate(dsn)
    found = {}
    async with _pooled(dsn) as pooled, await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        for count in STANDBYS:
            nodes = [
                LeaderElection(pooled, "bench-lease-crowd", node_id=f"n-{n}", hold="lease") for n in range(count + 1)
            ]
            async with contextlib.AsyncExitStack() as stack:
                await asyncio.gather(*(stack.enter_async_context(node) for node in nodes))
                await asyncio.gather(*(_settled(node) for node in nodes))
                began_at, before = time.monotonic(), await _figures(admin)
                await asyncio.sleep(MEASURE_S)
                after, took_s = await _figures(admin), time.monotonic() - began_at
            found[count] = (after[0], (after[1] - before[1]) / took_s)
    table = ", ".join(f"{count}: {backends} and {a_second:.0f}/s" for count, (backends, a_second) in found.items())
    return Figure(
        f"leases: backends of {max(STANDBYS)} standbys",
        f"backends and transactions, by standbys: {table}",
        "a session-held node has one backend, and one that listens",
        found[max(STANDBYS)][0],
        POOL_SIZE,
        "",
    )


async def _settled(node: LeaderElection) -> None:
    """Wait until the node leads, or has seen another leader."""
    async with asyncio.timeout(WAIT_S):
        while node.leader("bench-lease-crowd") is None and node.gate("bench-lease-crowd").token is None:
            await asyncio.sleep(0.1)


async def _figures(admin: psycopg.AsyncConnection[Any]) -> tuple[int, int]:
    query = (
        "SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()),"
        " (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())"
    )
    ((backends, committed),) = await (await admin.execute(query)).fetchall()
    return int(backends), int(committed)
