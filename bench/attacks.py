"""What a healthy client of the lock server notices while hostile ones attack. Each attacker is a separate process."""

import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
import tempfile
import time
from asyncio.events import Handle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.harness import Figure, median, percentile
from bench.peers import lock_server
from pgleaderlock.client import AsyncLockClient
from pgleaderlock.server.run import LockServer, ServerSettings, store_from_url

__all__ = ["hold", "under_attack"]

BLOCKS = 9
REQUESTS = 300
CONNECTIONS_MAX = 128
POLLERS = 5 * CONNECTIONS_MAX
POLL_S = 0.05
NEWCOMERS = 100
HOLD_REPEATS = 5
BODY_BYTES = 2 * 1024 * 1024 - 1024
TOKEN = "a-token-for-the-benchmark"
TIMEOUT_S = 60.0
HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"

_LOGIN = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n".encode()
_ITEM = b'{"op":"release","lock_name":"a","owner_id":"w","lease_id":"l","fencing_token":7}'


def _filled(begin: bytes, unit: bytes, end: bytes) -> bytes:
    return begin + unit * ((BODY_BYTES - len(begin) - len(end)) // len(unit)) + end


_FULL_BATCH = b'{"operations":[' + b",".join([_ITEM] * 500) + b"]}"
BODIES = {
    "a float among lists": _filled(b'{"operations":[1.0,', b"[],", b"[]]}"),
    "lists in an unknown field": _filled(b'{"operations":[{"x":[', b"[],", b'1],"op":"acquire"}]}'),
    "one field again and again": _filled(b'{"operations":[{"op":"release",', b'"owner_id":"a",', _ITEM[1:] + b"]}"),
    "many operations": _filled(b'{"operations":[', _ITEM + b",", _ITEM + b"]}"),
    "escapes": _filled(b'{"operations":[{"op":"release",', b'"lock_name":"%s",' % (rb"\u00e4" * 199), b'"x":1}]}'),
    "escapes in many operations": _filled(
        b'{"operations":[', b'{"op":"release","lock_name":"%s"},' % (rb"\u00e4" * 700), _ITEM + b"]}"
    ),
    "backslashes": _filled(b'{"operations":[{"op":"release",', b'"lock_name":"%s",' % (rb"\\" * 150), b'"x":1}]}'),
    "a long unknown field": _filled(b'{"operations":[{"op":"acquire","', b"matching regex '", b'":1}]}'),
    "depth": _filled(b'{"operations":[{"x":', b"[", b"]}]}"),
    "a long number": _filled(b'{"operations":[{"op":"acquire","ttl_ms":', b"9", b"}]}"),
    "blanks": _filled(b'{"operations":', b" ", b"[]}"),
}
REQUESTS_OF_BYTES = {
    name: b"POST /v1/batch HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (_LOGIN, len(body), body)
    for name, body in BODIES.items()
} | {
    "chunks of one byte": b"POST /v1/batch HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n%s"
    % (_LOGIN, b"1\r\na\r\n" * 100_000),
    "requests in one go": b"POST /v1/locks/a/acquire HTTP/1.1\r\n\r\n" * 5_000 + b"GET /healthz HTTP/1.0\r\n\r\n",
    "500 valid operations": b"POST /v1/batch HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s"
    % (_LOGIN, len(_FULL_BATCH), _FULL_BATCH),
    "header lines": b"GET /healthz HTTP/1.1\r\n" + b"a:b\r\n" * 50_000,
}


async def hold(_dsn: str) -> Figure:
    """The CPU time of the longest callback of the event loop while the server handles a hostile request. CPU time does
    not count the machine's other work. Of each request the best try counts, and of the requests the worst one."""
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as folder:
        server = LockServer(store_from_url(f"sqlite:///{folder}/locks.db"), ServerSettings(port=0))
        await server.start()
        port = int(server.url.rpartition(":")[2])
        try:
            for name, request in REQUESTS_OF_BYTES.items():
                tries = []
                for _ in range(HOLD_REPEATS):
                    with _longest_callback() as longest:
                        await asyncio.to_thread(_send, port, request)
                    tries.append(longest[0])
                worst[name] = min(tries)
        finally:
            await server.stop()
    name = max(worst, key=lambda each: worst[each])
    others = ", ".join(f"{each} {took * 1e3:.1f}" for each, took in worst.items() if each != name)
    return Figure(
        "worst hold of the loop under hostile requests",
        f"{worst[name] * 1e3:.1f} ms by {name}",
        f"in ms of CPU time: {others}",
        worst[name] * 1e3,
        20.0,
        "ms",
    )


@contextlib.contextmanager
def _longest_callback() -> Iterator[list[float]]:
    longest = [0.0]
    real = Handle._run

    def timed(handle: Handle) -> None:
        began = time.thread_time()
        real(handle)
        longest[0] = max(longest[0], time.thread_time() - began)

    Handle._run = timed  # type: ignore[method-assign, assignment]
    try:
        yield longest
    finally:
        Handle._run = real  # type: ignore[method-assign]


def _send(port: int, request: bytes) -> None:
    """Send the request and close the sending side; read until the server closes the connection."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


# --- What a healthy client notices


async def under_attack(_dsn: str) -> list[Figure]:
    """A healthy client's requests while others attack, against the same requests in quiet, in turns; and how long a
    new connection waits while an attacker tries to keep ten times as many idle connections open as the server allows,
    or five times as many that poll: more would be too many for one attacking process.

    The server has a processor to itself, as it would have if it were attacked over a network. An attacker on the same
    processor takes CPU time from every client, which no server can prevent."""
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as folder:
        tokens = Path(folder) / "tokens.toml"
        tokens.write_text(f'[[token]]\nname = "bench"\ntoken = "{TOKEN}"\n')
        tokens.chmod(0o600)
        options = ("--token-file", str(tokens), "--max-connections", str(CONNECTIONS_MAX))
        async with lock_server(f"sqlite:///{folder}/locks.db", *options) as (url, pid):
            port = int(url.rpartition(":")[2])
            with _processor_of_its_own(pid):
                return [
                    *[await _noticed(url, port, name) for name in ATTACKS if name != "polling sockets"],
                    await _newcomers(port, "idle sockets", 10 * CONNECTIONS_MAX),
                    await _newcomers(port, "polling sockets", POLLERS),
                ]


@contextlib.contextmanager
def _processor_of_its_own(pid: int) -> Iterator[None]:
    """Give every thread of that process one processor. This process, and those that it starts meanwhile, use the
    others. On a machine with a single processor, nothing changes."""
    allowed = os.sched_getaffinity(0)
    first, *others = sorted(allowed)
    if not others:
        yield
        return
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {first})
    os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


async def _noticed(url: str, port: int, name: str) -> Figure:
    quiet: list[float] = []
    attacked: list[float] = []
    ratios: list[float] = []
    async with AsyncLockClient(url, token=TOKEN) as client:
        for block in range(BLOCKS + 1):
            calm = await _healthy(client)
            async with _attacker(port, name, block):
                hurt = await _healthy(client)
            if block:
                quiet += calm
                attacked += hurt
                ratios.append(percentile(hurt, 99) / percentile(calm, 99))
    return Figure(
        f"p99 of a healthy client over quiet, beside {name}",
        f"{percentile(attacked, 99) * 1e3:.2f} ms, p50 {percentile(attacked, 50) * 1e3:.2f} ms",
        f"{percentile(quiet, 99) * 1e3:.2f} ms in quiet, p50 {percentile(quiet, 50) * 1e3:.2f} ms; "
        f"median of {BLOCKS} blocks in turns, {REQUESTS} requests each; {ATTACKS[name][1]} attacks/s",
        median(ratios),
        2.0,
    )


async def _healthy(client: AsyncLockClient) -> list[float]:
    took = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        await client.get("bench")
        took.append(time.perf_counter() - began)
        await asyncio.sleep(0.002)  # the pace of a healthy client
    return took


async def _newcomers(port: int, name: str, others: int) -> Figure:
    took = []
    async with _attacker(port, name, 0):
        for _ in range(NEWCOMERS):
            began = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEALTHZ)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            took.append(time.perf_counter() - began)
            writer.close()
    return Figure(
        f"longest wait of a new connection beside {name}",
        f"{max(took) * 1e3:.0f} ms, median {percentile(took, 50) * 1e3:.1f} ms",
        f"{NEWCOMERS} new connections; others try to keep {others:,} of {CONNECTIONS_MAX} places, "
        f"{others // CONNECTIONS_MAX} x the limit",
        max(took),
        1.0,
        "s",
    )


@contextlib.asynccontextmanager
async def _attacker(port: int, name: str, seed: int) -> AsyncIterator[None]:
    """Attack from a separate process: in the same one, the attack itself would delay the healthy client."""
    process = await asyncio.to_thread(_started, port, name, seed)
    try:
        yield
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def _started(port: int, name: str, seed: int) -> BaseProcess:
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    process = spawn.Process(target=_attack_for_ever, args=(port, name, seed, begun), daemon=True)
    process.start()
    assert begun.wait(TIMEOUT_S)
    return process


def _attack_for_ever(port: int, name: str, seed: int, begun: Event) -> None:
    asyncio.run(_attack(port, name, random.Random(seed), begun))


async def _attack(port: int, name: str, rng: random.Random, begun: Event) -> None:
    """Attack at a steady pace, each time on a new connection."""
    attack, a_second = ATTACKS[name]
    sent: set[asyncio.Task[None]] = set()
    await attack(port, rng)
    begun.set()
    while True:
        task = asyncio.create_task(_quietly(attack(port, rng)))
        sent.add(task)
        task.add_done_callback(sent.discard)
        await asyncio.sleep(1 / a_second)


async def _quietly(attack: Awaitable[None]) -> None:
    with contextlib.suppress(OSError):
        await attack


async def _sent(port: int, data: bytes, *, end: bool = True) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        await reader.read()
    finally:
        writer.close()


async def _malformed(port: int, rng: random.Random) -> None:
    data = rng.randbytes(rng.randint(1, 400))
    await _sent(port, b"POST /v1/locks/a/acquire HTTP/1.1\r\n" + data + b"\r\n\r\n")


async def _bomb(port: int, rng: random.Random) -> None:
    await _sent(port, REQUESTS_OF_BYTES[rng.choice(list(BODIES))])


async def _chunks(port: int, _rng: random.Random) -> None:
    await _sent(port, REQUESTS_OF_BYTES["chunks of one byte"])


async def _pipelined(port: int, _rng: random.Random) -> None:
    await _sent(port, b"POST /v1/locks/a/acquire HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)


async def _sign_in(port: int, _rng: random.Random) -> None:
    form = b"token=wrong-token-0000000000000"
    head = b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    await _sent(port, head + b"Content-Length: %d\r\n\r\n" % len(form) + form)


_idle: list[asyncio.StreamWriter] = []


async def _idle_sockets(port: int, _rng: random.Random) -> None:
    """Keep ten times as many connections open as the server allows, or as many as it accepts."""
    if not _idle:
        _idle.extend([(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(10 * CONNECTIONS_MAX)])
    _idle.pop(0).close()
    _idle.append((await asyncio.open_connection("127.0.0.1", port))[1])


_polls: list[asyncio.Task[None]] = []


async def _polling_sockets(port: int, _rng: random.Random) -> None:
    """Keep polling on five times as many connections as the server allows, or on as many as it accepts."""
    if not _polls:
        _polls.extend([asyncio.create_task(_poll(port)) for _ in range(POLLERS)])
        await asyncio.sleep(1)  # until they have taken every place


async def _poll(port: int) -> None:
    while True:
        with contextlib.suppress(OSError, EOFError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                answer = b""
                while b"connection: close" not in answer:
                    writer.write(HEALTHZ)
                    answer = await reader.readuntil(b"\r\n\r\n")
                    await asyncio.sleep(POLL_S)


ATTACKS: dict[str, tuple[Callable[[int, random.Random], Awaitable[None]], int]] = {
    "malformed requests": (_malformed, 300),
    "JSON bombs of 2 MiB": (_bomb, 5),
    "chunks of one byte": (_chunks, 20),
    "100 requests in one go": (_pipelined, 20),
    "refused sign-ins": (_sign_in, 300),
    "idle sockets": (_idle_sockets, 300),
    "polling sockets": (_polling_sockets, 1),
}
"""The attacks, and how often per second each is made, on a new connection. Bombs and chunks send 10 and 12 MB/s."""
