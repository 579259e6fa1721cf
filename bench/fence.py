"""The figures of the fence: what it costs a writer, and how long writers hold up the next leader.

The writers are pgbench's, so that the server is measured and not Python. They send the library's own statement.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import psycopg

from bench.harness import Figure, in_turns, median, percentile, ratio
from bench.pgbench import one_line, run_pgbench, tps
from pgleaderlock._pg.statements import statement
from pgleaderlock.keys import key_pair
from pgleaderlock.migrate import migrate

__all__ = ["bump", "throughput"]

ROLE = "bench-fence"
THROUGHPUT_WRITERS = 16
SCALE = 32
BLOCKS = 10
BLOCK_S = 2
BUMP_WRITERS = 64
BUMPS = 300
WRITE_MS = 5

_WRITE = "INSERT INTO bench_writes (what) VALUES (:client_id);"
# A real writer learns the new epoch and goes on, but pgbench would stop at the first refusal.
_FOLLOW = """
CREATE OR REPLACE FUNCTION bench_fence(p_role text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    latest bigint;
BEGIN
    LOOP
        SELECT epoch INTO latest FROM pgleaderlock.leaders WHERE role = p_role;
        BEGIN
            PERFORM pgleaderlock.fence(p_role, latest);
            RETURN;
        EXCEPTION WHEN SQLSTATE 'PGL02' THEN NULL;
        END;
    END LOOP;
END
$$
"""


class _Leader:
    """The session that begins the terms."""

    def __init__(self, conn: psycopg.AsyncConnection[tuple[int, ...]], session_id: int) -> None:
        self._conn, self._session_id = conn, session_id

    @classmethod
    async def open(cls, dsn: str) -> "_Leader":
        await migrate(dsn)
        conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        await conn.execute("DROP TABLE IF EXISTS bench_writes")
        await conn.execute("CREATE TABLE bench_writes (what integer)")
        await conn.execute(_FOLLOW)
        await conn.execute("SELECT pg_advisory_lock(%s, %s)", key_pair(ROLE))
        row = await (
            await conn.execute(
                "SELECT session_id FROM pgleaderlock.open_session("
                "'pgleaderlock', gen_random_uuid(), 'bench', 'host', 1, 'bench', 2, 3, true, 'bench')"
            )
        ).fetchone()
        assert row is not None
        return cls(conn, row[0])

    async def bump(self) -> int:
        key1, key2 = key_pair(ROLE)
        row = await (
            await self._conn.execute(
                "SELECT epoch FROM pgleaderlock.bump(%s, %s, %s, %s, 10000, 'bench') WHERE outcome = 'won'",
                (self._session_id, [ROLE], [key1], [key2]),
            )
        ).fetchone()
        assert row is not None, "the bump did not win"
        return row[0]

    async def close(self) -> None:
        await self._conn.close()


async def throughput(dsn: str) -> Figure:
    """pgbench's own transaction (its default, like TPC-B) with and without the fence, in blocks that alternate."""
    leader = await _Leader.open(dsn)
    try:
        epoch = await leader.bump()
        await run_pgbench(dsn, "-i", "-q", "-s", str(SCALE))
        # As in every transaction of a connection but the first: only the first one compares the holder.
        values = {"role": f"'{ROLE}'", "epoch": epoch, "namespace": "'pgleaderlock'", "holder": "NULL"}
        fence = one_line(statement("fence").decode()) % {
            **values,
            "idle_timeout": "'10000ms'",
            "mark": "'[fence 0123abcd]'",
        }
        update = (await run_pgbench(dsn, "--show-script=tpcb-like")).replace(":scale", str(SCALE))
        insert = f"BEGIN;\n{_WRITE}\nCOMMIT;"
        # Beside the figure: SELECT 1 in place of the fence, which costs the round trip alone; and the smallest possible
        # transaction, of which the fence is the largest part.
        scripts = {
            "update": update,
            "update, SELECT 1": _after_begin(update, "SELECT 1"),
            "update, fenced": _after_begin(update, fence),
            "insert": insert,
            "insert, fenced": _after_begin(insert, fence),
        }
        rates = await in_turns({name: _rate(dsn, script) for name, script in scripts.items()}, BLOCKS)
    finally:
        await leader.close()
    return Figure(
        f"fenced transactions/s over unfenced, {THROUGHPUT_WRITERS} writers",
        f"{median(rates['update, fenced']):,.0f}/s",
        f"unfenced {median(rates['update']):,.0f}/s (pgbench's default script, {BLOCKS} blocks of {BLOCK_S} s each);"
        f" with SELECT 1 in its place {ratio(rates['update, SELECT 1'], rates['update']):.2f} ×;"
        f" a lone insert {ratio(rates['insert, fenced'], rates['insert']):.2f} × of {median(rates['insert']):,.0f}/s",
        ratio(rates["update, fenced"], rates["update"]),
        0.8,
        at_least=True,
    )


def _rate(dsn: str, script: str) -> Callable[[int], Awaitable[float]]:
    return lambda _block: tps(dsn, script, THROUGHPUT_WRITERS, BLOCK_S)


async def bump(dsn: str) -> Figure:
    """How long a bump takes until its commit is acknowledged, while writers hold the fence all the time."""
    leader = await _Leader.open(dsn)
    try:
        await leader.bump()
        script = f"BEGIN;\nSELECT bench_fence('{ROLE}');\n\\sleep {WRITE_MS} ms\n{_WRITE}\nCOMMIT;"
        duration_s = 30
        writers = asyncio.create_task(tps(dsn, script, BUMP_WRITERS, duration_s))
        await _until_writing(dsn)
        took = []
        for _ in range(BUMPS):
            began = time.perf_counter()
            await leader.bump()
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)
        assert not writers.done(), "the writers ended before the last bump"
        rate = await writers
    finally:
        await leader.close()
    return Figure(
        f"bump behind {BUMP_WRITERS} fenced writers, p99",
        f"p50 {median(took) * 1e3:.1f} ms, p99 {percentile(took, 99) * 1e3:.1f} ms, {BUMPS} bumps",
        f"each writer keeps its transaction open for {WRITE_MS} ms; {rate:,.0f} writes/s beside it",
        percentile(took, 99) * 1e3,
        50.0,
        "ms",
    )


async def _until_writing(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as look:
        while True:  # no event tells that all of them are writing
            row = await (
                await look.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgbench'")
            ).fetchone()
            if row is not None and row[0] >= BUMP_WRITERS:
                return
            await asyncio.sleep(0.05)


def _after_begin(script: str, statement: str) -> str:
    return script.replace("BEGIN;", f"BEGIN;\n{statement};")
