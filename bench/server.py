"""The figures of the lock server: durable grants per second, alone and against its peers, and a client's cycle."""

import asyncio
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from redis import Redis

from bench import rivals
from bench.harness import Figure, in_turns, median, ratio
from bench.peers import Wrk, etcd, lock_server, redis
from bench.pgbench import one_line, tps
from pgleaderlock._pg.statements import statement
from pgleaderlock.client import LockClient
from pgleaderlock.server.postgres.store import PostgresStore
from pgleaderlock.server.sqlite.store import SqliteStore
from pgleaderlock.server.store import Acquire, Granted, Store

__all__ = ["acquire", "cycle", "many_locks", "peers", "postgres"]

CONNECTIONS = 64
BLOCKS = 4
BLOCK_S = 3
BATCH = 50
TTL_MS = 600_000
CYCLES = 400
CYCLE_BLOCKS = 15
MANY = 1_000_000
FEW = 1_000
LOAD_CHUNK = 5_000
PROBES = 2_000
SETTLED_S = 3.0
PEER_BLOCKS = 12
PEER_BLOCK_S = 0.5
PEER_LIMITS = ((1, True, 1.0), (1, False, 1.0), (CONNECTIONS, True, 0.5), (CONNECTIONS, False, 1.0))
"""Connections, whether each lock is released, and the lower bound of our rate over that of Redis with fencing."""
PG_CLIENTS = 64
PG_BLOCKS = 5
PG_BLOCK_S = 2

# Each request acquires a new lock, so every answer is a grant; `base` keeps the names of the blocks apart.
_ACQUIRE = """
local n = 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"owner_id":"bench","ttl_ms":%d}'
request = function()
  n = n + 1
  return wrk.format(nil, "/v1/locks/%s-" .. n .. "/acquire")
end
"""
_BATCH = """
local n = 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
request = function()
  local operations = {}
  for i = 1, %d do
    n = n + 1
    operations[i] = '{"op":"acquire","lock_name":"%s-' .. n .. '","owner_id":"bench","ttl_ms":%d}'
  end
  return wrk.format(nil, "/v1/batch", nil, '{"operations":[' .. table.concat(operations, ",") .. ']}')
end
"""
_ETCD = """
local n = 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local code = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/'
local function base64(text)
  return ((text:gsub('.', function(c)
    local bits, byte = '', c:byte()
    for i = 8, 1, -1 do bits = bits .. (byte %% 2 ^ i - byte %% 2 ^ (i - 1) > 0 and '1' or '0') end
    return bits
  end) .. '0000'):gsub('%%d%%d%%d?%%d?%%d?%%d?', function(bits)
    if #bits < 6 then return '' end
    local value = 0
    for i = 1, 6 do value = value + (bits:sub(i, i) == '1' and 2 ^ (6 - i) or 0) end
    return code:sub(value + 1, value + 1)
  end) .. ({ '', '==', '=' })[#text %% 3 + 1])
end
request = function()
  n = n + 1
  return wrk.format(nil, "/v3/lock/lock", nil, '{"name":"' .. base64('%s-' .. n) .. '"}')
end
"""


async def acquire(_dsn: str) -> list[Figure]:
    """Durable grants through HTTP: one per request, fifty per request, and etcd's lock API, in alternating blocks."""
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as folder:
        store = f"sqlite:///{folder}/locks.db"
        # The batches alone create more than a million locks.
        async with lock_server(store, "--max-locks", "100000000") as (url, _pid), etcd() as (etcd_url, _):
            sides = {
                "single": lambda block: Wrk(_ACQUIRE % (TTL_MS, f"a{block}")).run(url, CONNECTIONS, BLOCK_S),
                "batched": lambda block: Wrk(_BATCH % (BATCH, f"b{block}", TTL_MS)).run(url, CONNECTIONS, BLOCK_S),
                "etcd": lambda block: Wrk(_ETCD % f"e{block}").run(etcd_url, CONNECTIONS, BLOCK_S),
            }
            rates = await in_turns(sides, BLOCKS)
    single, batched, peer = rates["single"], [rate * BATCH for rate in rates["batched"]], rates["etcd"]
    how = f"wrk, {CONNECTIONS} connections, {BLOCKS} blocks of {BLOCK_S} s, each lock a new one"
    return [
        Figure(
            "durable acquires/s, SQLite", f"{median(single):,.0f}/s", how, median(single), 9000, "/s", at_least=True
        ),
        Figure(
            f"the same in batches of {BATCH}",
            f"{median(batched):,.0f}/s",
            how,
            median(batched),
            30_000,
            "/s",
            at_least=True,
        ),
        Figure(
            "durable acquires/s over etcd's lock API",
            f"{median(single):,.0f}/s",
            f"etcd {median(peer):,.0f}/s in the same run, a lease for each lock there too",
            ratio(single, peer),
            3.0,
            at_least=True,
        ),
    ]


async def postgres(dsn: str) -> Figure:
    """Acquires through the PostgreSQL store, against pgbench with the same statement, in alternating blocks."""
    store = PostgresStore(dsn)
    await store.open()
    try:
        call = one_line(statement("locks_apply").decode()) % {
            "server_id": "'bench'",
            "operations": "jsonb_build_array(jsonb_build_object('kind', 'acquire', 'lock', 'pgbench-' || :n, "
            "'owner', 'me', 'lease', 'lease-' || :n, 'ms', 600000))",
            "room": "1000000",
        }
        script = f"\\set n random(1, 1000000000)\n{call};\n"
        sides = {
            "ours": lambda block: _store_rate(store, f"s{block}"),
            "pgbench": lambda _block: tps(dsn, script, PG_CLIENTS, PG_BLOCK_S),
        }
        rates = await in_turns(sides, PG_BLOCKS)
    finally:
        await store.close()
    ours, theirs = rates["ours"], rates["pgbench"]
    return Figure(
        "acquires/s through the PostgreSQL store over pgbench",
        f"{median(ours):,.0f}/s",
        f"pgbench with the same statement {median(theirs):,.0f}/s; {PG_CLIENTS} clients each",
        ratio(ours, theirs),
        0.5,
        at_least=True,
    )


async def _store_rate(store: Store, prefix: str) -> float:
    done = 0
    began = time.perf_counter()
    until = began + PG_BLOCK_S

    async def client(number: int) -> None:
        nonlocal done
        turn = 0
        while time.perf_counter() < until:
            turn += 1
            (outcome,) = await store.submit([Acquire(f"{prefix}-{number}-{turn}", "me", TTL_MS)])
            assert isinstance(outcome, Granted)
            done += 1

    await asyncio.gather(*(client(number) for number in range(PG_CLIENTS)))
    return done / (time.perf_counter() - began)


async def cycle(_dsn: str) -> Figure:
    """Acquire and release with a blocking client: ours, against redis-py's Lock, in turns."""
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as folder:
        async with lock_server(f"sqlite:///{folder}/locks.db") as (url, _pid), redis() as (port, _):

            def our_block() -> float:
                with LockClient(url) as client:
                    began = time.perf_counter()
                    for _ in range(CYCLES):
                        client.release(client.acquire("bench", ttl_s=10))
                    return CYCLES / (time.perf_counter() - began)

            def their_block() -> float:
                with Redis(port=port) as client:
                    lock = client.lock("bench", timeout=10)
                    began = time.perf_counter()
                    for _ in range(CYCLES):
                        assert lock.acquire(blocking=False)
                        lock.release()
                    return CYCLES / (time.perf_counter() - began)

            sides = {
                "ours": lambda _block: asyncio.to_thread(our_block),
                "redis-py": lambda _block: asyncio.to_thread(their_block),
            }
            rates = await in_turns(sides, CYCLE_BLOCKS)
    ours, theirs = rates["ours"], rates["redis-py"]
    return Figure(
        "acquire + release cycles/s of one client over redis-py's",
        f"{median(ours):,.0f}/s",
        f"redis-py Lock (AOF always) {median(theirs):,.0f}/s; {CYCLE_BLOCKS} blocks of {CYCLES} cycles each",
        ratio(ours, theirs),
        1.0,
        at_least=True,
    )


async def peers(_dsn: str) -> list[Figure]:
    """All peers, as durable as we are, in alternating blocks: with one connection and with many, with one lock that is
    acquired and released, and with new locks. The limits are those against Redis with fencing tokens."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as folder:
        store = f"sqlite:///{folder}/locks.db"
        async with (
            lock_server(store, "--max-locks", "100000000") as (url, pid),
            redis() as (redis_port, redis_pid),
            etcd() as (etcd_url, etcd_pid),
        ):
            sides_of: dict[str, tuple[rivals.Rival, int]] = {
                "ours": (rivals.Ours(url), pid),
                "Redis with fencing": (rivals.Redis(redis_port, fenced=True), redis_pid),
                "Redis without": (rivals.Redis(redis_port, fenced=False), redis_pid),
                "etcd": (rivals.Etcd(etcd_url), etcd_pid),
            }
            for connections, releases, limit in PEER_LIMITS:
                kind = "cycle" if releases else "fresh"
                what = "acquire + release cycles" if releases else "fresh acquires"
                cpu_us: dict[str, list[float]] = {name: [] for name in sides_of}
                sides = {
                    name: _peer(
                        *each, cpu_us[name], prefix=f"{kind}{connections}", connections=connections, releases=releases
                    )
                    for name, each in sides_of.items()
                }
                rates = await in_turns(sides, PEER_BLOCKS)
                told = {name: f"{median(rates[name]):,.0f}/s ({median(cpu_us[name]):.0f} µs)" for name in sides_of}
                others = ", ".join(f"{name} {told[name]}" for name in sides_of if name != "ours")
                figures.append(
                    Figure(
                        f"{what}/s over Redis, {connections} connections",
                        told["ours"],
                        f"{others}; in brackets the server's CPU time for each; "
                        f"{PEER_BLOCKS} blocks of {PEER_BLOCK_S:g} s",
                        ratio(rates["ours"], rates["Redis with fencing"]),
                        limit,
                        at_least=True,
                    )
                )
    return figures


def _peer(
    each: rivals.Rival, pid: int, cpu_us: list[float], *, prefix: str, connections: int, releases: bool
) -> Callable[[int], Awaitable[float]]:
    """The blocks of one side. Also records the server's CPU time per grant: other load affects it less than a rate."""
    name = type(each).__name__ + ("f" if getattr(each, "_fenced", False) else "")

    async def block(number: int) -> float:
        began, before_s = time.perf_counter(), _cpu_s(pid)
        rate = await asyncio.to_thread(
            rivals.rate, each, f"{name}-{prefix}-{number}", connections, PEER_BLOCK_S, releases=releases
        )
        cpu_us.append((_cpu_s(pid) - before_s) / (rate * (time.perf_counter() - began)) * 1e6)
        return rate

    return block


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def many_locks(_dsn: str) -> list[Figure]:
    """An acquire beside a thousand stored locks, and beside a million; and the memory that the million take."""
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as folder:
        few = await _opened(Path(folder) / "few.db", FEW)
        before = psutil.Process().memory_info().rss
        many = await _opened(Path(folder) / "many.db", MANY)
        await asyncio.sleep(SETTLED_S)  # let the stores finish copying their logs first
        try:
            took: dict[str, list[float]] = {"few": [], "many": []}
            for probe in range(PROBES):
                for name, store in (("few", few), ("many", many)):
                    began = time.perf_counter()
                    (outcome,) = await store.submit([Acquire(f"probe-{probe * 7919 % PROBES}-{name}", "me", 600_000)])
                    took[name].append(time.perf_counter() - began)
                    assert isinstance(outcome, Granted)
            grown_mb = (psutil.Process().memory_info().rss - before) / 1e6
        finally:
            await few.close()
            await many.close()
    return [
        Figure(
            f"acquire beside {MANY:,} stored locks over beside {FEW:,}",
            f"{median(took['many']) * 1e3:.2f} ms",
            f"{median(took['few']) * 1e3:.2f} ms, medians of {PROBES:,} in turns",
            median(took["many"]) / median(took["few"]),
            1.3,
        ),
        Figure(
            f"memory for {MANY:,} stored locks",
            f"{grown_mb:.0f} MB more",
            f"at its highest the process had {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB",
            grown_mb,
            200.0,
            "MB",
        ),
    ]


async def _opened(path: Path, locks: int) -> SqliteStore:
    store = SqliteStore(path, locks_max=2 * MANY)
    await store.open()
    for begin in range(0, locks, LOAD_CHUNK):
        names = range(begin, min(begin + LOAD_CHUNK, locks))
        await store.submit([Acquire(f"lock-{number}", "someone", TTL_MS) for number in names])
    return store
