"""The figures of `LeaderElection`: how soon a successor writes and acts, and what a heartbeat and a gate cost."""

import asyncio
import contextlib
import json
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator

import psycopg

from bench.harness import Figure, in_turns, median, percentile, ratio
from pgleaderlock import LeaderGate, LeaderToken
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._election.ledger import Identity, Ledger
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock._pg.statements import statement
from pgleaderlock.keys import key_pair
from pgleaderlock.migrate import migrate

__all__ = ["failover", "failover_hot", "gate", "handover", "heartbeat", "kill_rounds"]

FAILOVERS = 8
HOT_FAILOVERS = 20
HANDOVERS = 15
BEATS = 10
BEAT_BLOCKS = 150
WAIT_S = 30.0
DEFAULT_T_S = 7.0


class _Node:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, what: str, since: float = 0.0) -> float:
        """When the node next said this, on the monotonic clock."""
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


async def heartbeat(dsn: str) -> Figure:
    """A heartbeat, which proves leadership, against a heartbeat without the proof."""
    await migrate(dsn)
    bare = (
        b"SELECT beat, roles, epochs, settled, requests, version FROM pgleaderlock.heartbeat("
        b"%(session_id)s, %(settled)s::text[], %(draining)s::boolean)"
    )
    session = await DedicatedSession.open(dsn, ConnectionSettings("bench-heartbeat", 5.0, 15.0))
    ledger = Ledger(session, Identity("bench", str(uuid.uuid4()), "bench", "here", 1, "bench", "bench"), "bench")
    key1, key2 = key_pair("bench-heartbeat")
    connection = session._connection

    async def beats(text: bytes) -> float:
        params = {"session_id": ledger.session_id, "settled": [], "draining": None, "key1": key1, "key2": key2}
        began = time.perf_counter()
        for _ in range(BEATS):
            row = await (await connection.execute(text, params)).fetchone()
            assert row is not None
            assert row.get("proven", True)
        return time.perf_counter() - began

    try:
        await ledger.open(gate_s=5.0, lease_s=15.0, candidate=True)
        (look,) = await ledger.try_and_look({"bench-heartbeat": (key1, key2)}, {"bench-heartbeat"})
        assert look.granted
        await ledger.beat([])
        await connection.execute("SET synchronous_commit = off")  # the disk would hide the difference
        sides = {"ours": lambda _: beats(statement("ledger_heartbeat")), "bare": lambda _: beats(bare)}
        took = await in_turns(sides, BEAT_BLOCKS)
    finally:
        await session.close()
    return Figure(
        "heartbeat that proves leadership, against one that does not",
        f"{median(took['ours']) / BEATS * 1e6:.0f} µs",
        f"without the proof {median(took['bare']) / BEATS * 1e6:.0f} µs (medians of {BEAT_BLOCKS} blocks of {BEATS})",
        ratio(took["ours"], took["bare"]),
        1.05,
    )


async def kill_rounds(
    dsn: str, role: str, options: dict[str, object], rounds: int, *, written: bool = True, opened: bool = True
) -> tuple[list[float], list[float]]:
    """The times from SIGKILL to the successor's first fenced write, and to its open gate, for those that are wanted."""
    writes, gates = [], []
    async with _ledger(dsn):
        leader = await _start(dsn, role, options)
        await leader.says("open")
        try:
            for _ in range(rounds):
                standby = await _start(dsn, role, options)
                await standby.says("seen")
                await asyncio.sleep(1.0)  # give the standby time to see the leader, as in production
                killed_at = time.monotonic()
                leader.process.send_signal(signal.SIGKILL)
                if written:
                    writes.append(await standby.says("written", killed_at) - killed_at)
                if opened:
                    gates.append(await standby.says("open", killed_at) - killed_at)
                await leader.end()
                leader = standby
        finally:
            await leader.end()
    return writes, gates


async def failover(dsn: str) -> list[Figure]:
    """SIGKILL at the defaults: the fenced write of the successor, and its gate."""
    written, opened = await kill_rounds(dsn, "bench-defaults", {}, FAILOVERS)
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
    written, _ = await kill_rounds(dsn, "bench-hot", {"standby_wait_s": 30.0}, HOT_FAILOVERS, opened=False)
    return Figure(
        "SIGKILL → successor's first fenced write, hot standby, p99",
        f"p50 {median(written) * 1e3:.1f} ms, p99 {percentile(written, 99) * 1e3:.1f} ms",
        f"{HOT_FAILOVERS} rounds",
        percentile(written, 99) * 1e3,
        30.0,
        "ms",
    )


async def handover(dsn: str) -> Figure:
    """The time from the request for a step-down until the successor's gate is open."""
    took = []
    async with _ledger(dsn):
        leading, other = [await _start(dsn, "bench-handover", {}) for _ in range(2)]
        try:
            await leading.says("open")
            await other.says("seen")
            for _ in range(HANDOVERS):
                await asyncio.sleep(1.0)  # by then the node that stepped down competes again
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
    """One call of an open gate, against one reading of the clock."""
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
