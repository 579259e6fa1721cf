"""The figures of `LeaderElection`: how soon somebody else writes, acts, and what asking the gate costs."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator

import psycopg

from bench.harness import Figure, median, percentile
from pgleaderlock import LeaderGate, LeaderToken
from pgleaderlock._clock import BOOT_CLOCK
from pgleaderlock.migrate import migrate

__all__ = ["failover", "failover_hot", "gate", "handover"]

FAILOVERS = 8
HOT_FAILOVERS = 20
HANDOVERS = 15
WAIT_S = 30.0
DEFAULT_T_S = 7.0


class _Node:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, what: str, since: float = 0.0) -> float:
        """When it next said this, on the monotonic clock."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while True:
                line = json.loads(await self.process.stdout.readline())
                if line["what"] == what and line["at"] >= since:
                    return float(line["at"])

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def _start(dsn: str, role: str, options: dict[str, object]) -> _Node:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.election_node",
        dsn,
        role,
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    node = _Node(process)
    await node.says("ready")
    return node


@contextlib.asynccontextmanager
async def _ledger(dsn: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[object, ...]]]:
    await migrate(dsn)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        await admin.execute("CREATE TABLE IF NOT EXISTS bench_writes (epoch bigint)")
        yield admin


async def _kill_rounds(
    dsn: str, role: str, options: dict[str, object], rounds: int, *, gated: bool
) -> tuple[list[float], list[float]]:
    written, opened = [], []
    async with _ledger(dsn):
        leader = await _start(dsn, role, options)
        await leader.says("open")
        try:
            for _ in range(rounds):
                standby = await _start(dsn, role, options)
                await standby.says("seen")
                await asyncio.sleep(1.0)  # a standby that has looked around, as it would have in real life
                killed_at = time.monotonic()
                leader.process.send_signal(signal.SIGKILL)
                written.append(await standby.says("written", killed_at) - killed_at)
                if gated:
                    opened.append(await standby.says("open", killed_at) - killed_at)
                await leader.end()
                leader = standby
        finally:
            await leader.end()
    return written, opened


async def failover(dsn: str) -> list[Figure]:
    """SIGKILL at the defaults: the fenced write of the successor, and its gate."""
    written, opened = await _kill_rounds(dsn, "bench-defaults", {}, FAILOVERS, gated=True)
    return [
        Figure(
            "SIGKILL → successor's first fenced write, defaults, p99",
            f"p50 {median(written) * 1e3:.0f} ms, p99 {percentile(written, 99) * 1e3:.0f} ms",
            f"{FAILOVERS} rounds; client-go's defaults: 15–19 s",
            percentile(written, 99),
            1.0,
            "s",
        ),
        Figure(
            "SIGKILL → successor's gate open, defaults, p99",
            f"p50 {median(opened):.2f} s, p99 {percentile(opened, 99):.2f} s",
            f"T is {DEFAULT_T_S:g} s ({FAILOVERS} rounds)",
            percentile(opened, 99),
            DEFAULT_T_S + 1.0,
            "s",
        ),
    ]


async def failover_hot(dsn: str) -> Figure:
    """The same with one role in hot standby."""
    written, _ = await _kill_rounds(dsn, "bench-hot", {"standby_wait_s": 30.0}, HOT_FAILOVERS, gated=False)
    return Figure(
        "SIGKILL → successor's first fenced write, hot standby, p99",
        f"p50 {median(written) * 1e3:.1f} ms, p99 {percentile(written, 99) * 1e3:.1f} ms",
        f"{HOT_FAILOVERS} rounds",
        percentile(written, 99) * 1e3,
        30.0,
        "ms",
    )


async def handover(dsn: str) -> Figure:
    """A clean step-down until the successor's gate is open."""
    took = []
    async with _ledger(dsn):
        leading, other = [await _start(dsn, "bench-handover", {}) for _ in range(2)]
        try:
            await leading.says("open")
            await other.says("seen")
            for _ in range(HANDOVERS):
                await asyncio.sleep(1.0)  # the one who stepped down lets a delay pass before it competes again
                asked_at = time.monotonic()
                leading.tell("step_down")
                took.append(await other.says("open", asked_at) - asked_at)
                leading, other = other, leading
        finally:
            await leading.end()
            await other.end()
    return Figure(
        "clean handover: step_down → successor's gate open, p99",
        f"p50 {median(took) * 1e3:.1f} ms, p99 {percentile(took, 99) * 1e3:.1f} ms",
        f"{HANDOVERS} rounds",
        percentile(took, 99) * 1e3,
        100.0,
        "ms",
    )


async def gate(_dsn: str) -> Figure:
    """One question to an open gate, against one look at the clock."""
    asked, rounds = 20_000, 15
    open_gate = LeaderGate("bench")
    open_gate.open(LeaderToken("bench", 1, "me"), 0.0, BOOT_CLOCK.now() + 3600)
    question, clock = open_gate.require_leader, BOOT_CLOCK.now
    ours, raw = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(asked):
            clock()
        raw.append((time.perf_counter() - began) / asked)
        began = time.perf_counter()
        for _ in range(asked):
            question()
        ours.append((time.perf_counter() - began) / asked)
    return Figure(
        "gate.require_leader()",
        f"{median(ours) * 1e9:.0f} ns",
        f"reading the clock {median(raw) * 1e9:.0f} ns",
        median(ours) * 1e6,
        1.0,
        "µs",
    )
