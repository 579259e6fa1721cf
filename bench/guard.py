"""The figures of one-shot leadership: the cycle on an open connection, and how soon a guard notices a loss."""

import asyncio
import time
from typing import Any

import psycopg

from bench.harness import Figure, median, percentile
from pgleaderlock import acquire_leadership
from pgleaderlock._pg.statements import statement
from pgleaderlock.keys import key_params

__all__ = ["cycle", "lost"]

CYCLES = 20
BLOCKS = 300
LOSS_ROUNDS = 50


async def cycle(dsn: str) -> Figure:
    """Acquire and release on an open connection, against psycopg sending the same two statements."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        raw, ours = [], []
        for block in range(BLOCKS + 1):
            raw_s, ours_s = await _raw_block(conn), await _our_block(conn)
            if block:  # the first one warms up
                raw.append(raw_s)
                ours.append(ours_s)
    return Figure(
        "one-shot acquire + release, raw time over ours",
        f"{CYCLES / median(ours):,.0f} cycles/s",
        f"raw psycopg {CYCLES / median(raw):,.0f} cycles/s (medians of {BLOCKS} blocks of {CYCLES})",
        median(raw) / median(ours),
        0.85,
        at_least=True,
    )


async def _raw_block(conn: psycopg.AsyncConnection[Any]) -> float:
    params = {**key_params((3, 1)), "backend_pid": conn.info.backend_pid}
    take, unlock = statement("guard_take"), statement("guard_unlock")
    began = time.perf_counter()
    for _ in range(CYCLES):
        for text in (take, unlock):
            row = await (await conn.execute(text, params)).fetchone()
            assert row is not None
            assert row[0] is True
    return time.perf_counter() - began


async def _our_block(conn: psycopg.AsyncConnection[Any]) -> float:
    began = time.perf_counter()
    for _ in range(CYCLES):
        guard = await acquire_leadership(conn, "bench")
        await guard.release()
    return time.perf_counter() - began


async def lost(dsn: str) -> Figure:
    """From pg_terminate_backend to the return of `lost()`."""
    took: list[float] = []
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        for _ in range(LOSS_ROUNDS):
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
                guard = await acquire_leadership(conn, "bench-lost")
                losing = asyncio.ensure_future(guard.lost())
                await asyncio.sleep(0.002)
                began = time.perf_counter()
                await admin.execute("SELECT pg_terminate_backend(%s)", (conn.info.backend_pid,))
                await losing
                took.append(time.perf_counter() - began)
    return Figure(
        "session ended by the server → guard.lost() returns, p99",
        f"p50 {median(took) * 1e3:.1f} ms, p99 {percentile(took, 99) * 1e3:.1f} ms",
        f"{LOSS_ROUNDS} rounds",
        percentile(took, 99) * 1e3,
        50.0,
        "ms",
    )
