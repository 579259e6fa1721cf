"""The figures of many roles: how soon other nodes take over after a drain, and what a steady state costs."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg

from bench.harness import Figure, median, percentile
from pgleaderlock.migrate import migrate

__all__ = ["drain", "steady"]

WAIT_S = 60.0
DRAINS = 20
DRAINED_ROLES = ("scheduler", "metrics_aggregator", "log_compactor")
NODES = 5
MANY_ROLES = 1_000
SETTLED_S = 10.0
STEADY_S = 30.0


class _Node:
    """A `bench.roles_node` process, and everything that it has printed."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self.said: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said.append(json.loads(line))
            self._news.set()

    async def says(self, what: str, since: float = 0.0, **fields: Any) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while True:
                for message in self.said:
                    if message["what"] == what and message["at"] >= since and fields.items() <= message.items():
                        return message
                self._news.clear()
                await self._news.wait()

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n".encode())

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reading


@contextlib.asynccontextmanager
async def _nodes(dsn: str) -> AsyncIterator[Any]:
    """Yields a function that starts nodes. Ends the nodes that still run at the end."""
    started: list[_Node] = []

    async def start(name: str, **options: Any) -> _Node:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.roles_node",
            dsn,
            name,
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        node = _Node(name, process)
        started.append(node)
        await node.says("ready")
        return node

    await migrate(dsn)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        await admin.execute("CREATE TABLE IF NOT EXISTS bench_writes (epoch bigint)")
        try:
            yield start, admin
        finally:
            for node in started:
                await node.end()


async def drain(dsn: str) -> Figure:
    """Three nodes, three roles with work: the time from SIGTERM to the leader of all until all three gates are open."""
    options = {"roles": DRAINED_ROLES, "works": True, "namespace": "bench-drain"}
    took: list[float] = []
    async with _nodes(dsn) as (start, _):
        leader = await start("node-0", **options)
        await asyncio.gather(*(leader.says("open", role=role) for role in DRAINED_ROLES))
        for number in range(DRAINS):
            others = [await start(f"node-{number}-{which}", **options) for which in "ab"]
            await asyncio.gather(*(other.says("seen", role=role) for other in others for role in DRAINED_ROLES))
            await asyncio.sleep(1.0)  # give the standbys time to see the leader, as in production
            asked_at = time.monotonic()
            leader.process.send_signal(signal.SIGTERM)
            opened = await asyncio.gather(*(_opens(others, role, asked_at) for role in DRAINED_ROLES))
            took.append(max(opened) - asked_at)
            await leader.process.wait()
            # End the second one, too: then the first leads all roles.
            leader, second = others
            second.process.send_signal(signal.SIGTERM)
            await second.process.wait()
            await asyncio.gather(*(leader.says("open", role=role) for role in DRAINED_ROLES))
    return Figure(
        "SIGTERM → three roles led by others, gates open, p99",
        f"p50 {median(took) * 1e3:.1f} ms, p99 {percentile(took, 99) * 1e3:.1f} ms",
        f"work in flight, three nodes ({DRAINS} rounds)",
        percentile(took, 99) * 1e3,
        200.0,
        "ms",
    )


async def _opens(nodes: list[_Node], role: str, since: float) -> float:
    """When the first of these nodes may act for the role."""
    waits = [asyncio.ensure_future(node.says("open", since, role=role)) for node in nodes]
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    return float(done.pop().result()["at"])


async def steady(dsn: str) -> list[Figure]:
    """A thousand roles shared by five nodes in a steady state: connections, statements, CPU."""
    namespace = "bench-steady"
    async with _nodes(dsn) as (start, admin):
        # Begin with one role, so that all nodes are running when the thousand roles are shared.
        options = {"roles": ["first"], "balance": True, "namespace": namespace}
        nodes = [await start(f"steady-{number}", **options) for number in range(NODES)]
        for node in nodes:
            node.tell(f"add {MANY_ROLES}")
        await asyncio.gather(*(node.says("added") for node in nodes))
        await _settled(admin, namespace)
        connections = await _connections(admin, nodes)
        for node in nodes:
            node.tell("begin")
        began_at = time.monotonic()
        committed = await _committed(admin)
        await asyncio.sleep(STEADY_S)
        committed = await _committed(admin) - committed
        for node in nodes:
            node.tell("end")
        took_s = time.monotonic() - began_at
        counted = [await node.says("counted") for node in nodes]
    led = [one["led"] for one in counted]
    where = f"{MANY_ROLES} roles, {NODES} nodes lead {min(led)} to {max(led)} each"
    cpu = [100 * one["cpu_s"] / took_s for one in counted]
    a_second = sum(one["statements"] for one in counted) / took_s / NODES
    return [
        Figure(
            "1,000 roles on 5 nodes: connections a node, LISTEN among them",
            f"{connections:.0f}: the session, and one that listens",
            where,
            connections,
            2.0,
            "",
        ),
        Figure(
            "1,000 roles on 5 nodes: most statements in one tick",
            f"{a_second:.1f} statements/s a node; the server counts {committed / took_s / NODES:.1f}",
            where,
            max(one["most"] for one in counted),
            2.0,
            "",
        ),
        Figure(
            "1,000 roles on 5 nodes: processor of a node, of one core",
            f"{min(cpu):.2f} to {max(cpu):.2f} %",
            f"{where}, over {took_s:.0f} s; load average of the machine {os.getloadavg()[0]:.1f}",
            max(cpu),
            2.0,
            "%",
        ),
    ]


async def _settled(admin: Any, namespace: str) -> None:
    """Wait until every role is led, and no term has begun for a while."""
    query = (
        "SELECT count(*) FILTER (WHERE ended_at IS NULL), extract(epoch FROM clock_timestamp() - max(began_at))"
        " FROM pgleaderlock.terms WHERE namespace = %s"
    )
    async with asyncio.timeout(10 * WAIT_S):
        while True:
            ((led, quiet_s),) = await (await admin.execute(query, (namespace,))).fetchall()
            if led > MANY_ROLES and quiet_s > SETTLED_S:
                return
            await asyncio.sleep(1.0)


async def _connections(admin: Any, nodes: list[_Node]) -> float:
    """The most connections that one of the nodes has."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
    found = [await (await admin.execute(query, (f"% {node.name} %",))).fetchall() for node in nodes]
    return float(max(count for ((count,),) in found))


async def _committed(admin: Any) -> int:
    """The transactions of this database so far. Each statement of a node is one transaction."""
    query = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    ((committed,),) = await (await admin.execute(query)).fetchall()
    return int(committed)
