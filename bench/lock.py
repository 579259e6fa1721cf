"""The figures of `LeaderLock`: start, probe, loss, hot standby."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time

import psycopg

from bench.harness import Figure, in_turns, median, percentile, ratio
from bench.raw_start import connect_and_try
from pgleaderlock import FixedInterval, LeaderLock
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession

__all__ = ["hot_standby", "kill_round", "loss", "probe", "process", "start"]

START_ROUNDS = 200
PROBES = 20
PROBE_BLOCKS = 300
LOSS_ROUNDS = 50
KILL_ROUNDS = 30
PARK_TIMEOUT_S = 10.0


async def start(dsn: str) -> Figure:
    """From `start()` to LEADER, against a connect and one try."""
    raw, ours = [], []
    for round_ in range(START_ROUNDS + 10):
        began = time.perf_counter()
        connection = await connect_and_try(dsn, 1, 1)
        raw_s = time.perf_counter() - began
        await connection.close()
        lock = LeaderLock(dsn, 1, 2)
        began = time.perf_counter()
        await lock.start()
        await lock.wait_for_leadership()
        ours_s = time.perf_counter() - began
        await lock.shutdown()
        if round_ >= 10:  # the first rounds warm up the server and the interpreter
            raw.append(raw_s)
            ours.append(ours_s)
    return Figure(
        "start → LEADER, against connect + try",
        f"{median(ours) * 1e3:.2f} ms",
        f"raw psycopg {median(raw) * 1e3:.2f} ms (medians of {START_ROUNDS})",
        median(ours) / median(raw),
        1.3,
    )


async def probe(dsn: str) -> Figure:
    """A probe, which proves leadership, against SELECT 1 on the same session, which proves nothing."""
    keys = (1, 4)
    session = await DedicatedSession.open(dsn, ConnectionSettings("bench-probe", 5.0, 15.0))

    async def proving(_block: int) -> float:
        began = time.perf_counter()
        for _ in range(PROBES):
            await session.probe(keys)
        return time.perf_counter() - began

    async def asking(_block: int) -> float:
        began = time.perf_counter()
        for _ in range(PROBES):
            await session.rows("doctor_round_trip")
        return time.perf_counter() - began

    try:
        assert await session.take(keys)
        took = await in_turns({"probe": proving, "select": asking}, PROBE_BLOCKS)
    finally:
        await session.close()
    return Figure(
        "probe that proves leadership, against SELECT 1",
        f"{median(took['probe']) / PROBES * 1e6:.0f} µs",
        f"SELECT 1 {median(took['select']) / PROBES * 1e6:.0f} µs (medians of {PROBE_BLOCKS} blocks of {PROBES})",
        ratio(took["probe"], took["select"]),
        1.05,
    )


async def loss(dsn: str) -> Figure:
    """From pg_terminate_backend's answer to `on_lost`, with an hour between probes."""
    took: list[float] = []
    lost: asyncio.Queue[float] = asyncio.Queue()
    lock = LeaderLock(dsn, 1, 3, health_interval_s=3600, retry_strategy=FixedInterval(0.05))
    lock.on_lost(lambda: lost.put_nowait(time.perf_counter()))
    async with lock, await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        for _ in range(LOSS_ROUNDS):
            await lock.wait_for_leadership()
            await _idle(lock)
            began = time.perf_counter()
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 3"
            )
            took.append(await lost.get() - began)
    return Figure(
        "session ended by the server → on_lost, p99",
        f"p50 {median(took) * 1e3:.1f} ms, p99 {percentile(took, 99) * 1e3:.1f} ms",
        f"a probe every 5 s would take 2,500 ms on average ({LOSS_ROUNDS} rounds)",
        percentile(took, 99) * 1e3,
        50.0,
        "ms",
    )


async def _idle(lock: LeaderLock) -> None:
    """The first probe of a term follows the grant at once; after it, nothing is sent for an hour."""
    while lock._run is None or lock._run._session is None or not lock._run._session.identified:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)


async def hot_standby(dsn: str) -> Figure:
    """From SIGKILL of the leader to the successor's LEADER, against a raw parked waiter."""
    rng = random.Random(1)
    keys = {"bench.raw_waiter": (2, 1), "bench.our_waiter": (2, 2)}
    took: dict[str, list[float]] = {module: [] for module in keys}
    waiters = {module: process(module, dsn, *pair) for module, pair in keys.items()}
    try:
        for _ in range(KILL_ROUNDS):
            for module, pair in keys.items():
                took[module].append(await asyncio.to_thread(kill_round, dsn, waiters[module], pair, rng))
    finally:
        for waiter in waiters.values():
            waiter.kill()
            waiter.wait()
    raw, ours = took["bench.raw_waiter"], took["bench.our_waiter"]
    return Figure(
        "SIGKILL → successor LEADER, hot standby, p99",
        f"p50 {median(ours) * 1e3:.1f} ms, p99 {percentile(ours, 99) * 1e3:.1f} ms",
        f"raw parked waiter p50 {median(raw) * 1e3:.1f} ms, p99 {percentile(raw, 99) * 1e3:.1f} ms"
        f" ({KILL_ROUNDS} rounds each)",
        percentile(ours, 99) / percentile(raw, 99),
        2.0,
    )


def kill_round(dsn: str, waiter: "subprocess.Popen[str]", pair: tuple[int, int], rng: random.Random) -> float:
    holder = process("bench.holder", dsn, *pair)
    try:
        assert holder.stdout is not None
        assert waiter.stdin is not None
        assert waiter.stdout is not None
        holder.stdout.readline()
        waiter.stdin.write("park\n")
        waiter.stdin.flush()
        _until_parked(dsn, pair)
        time.sleep(rng.uniform(0, 0.6))  # the kill falls anywhere within a slice, or between two of them
        killed_at = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
        return float(waiter.stdout.readline()) - killed_at
    finally:
        holder.kill()
        holder.wait()


def _until_parked(dsn: str, pair: tuple[int, int]) -> None:
    deadline = time.monotonic() + PARK_TIMEOUT_S
    with psycopg.connect(dsn, autocommit=True) as look:
        while time.monotonic() < deadline:
            if look.execute(
                "SELECT 1 FROM pg_locks WHERE NOT granted AND (classid, objid) = (%s, %s)", pair
            ).fetchone():
                return
            time.sleep(0.005)
    raise TimeoutError("the waiter did not park")


def process(module: str, dsn: str, key1: int, key2: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", module, dsn, str(key1), str(key2)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
