"""One client for all lock servers: it sends raw requests over plain sockets, over the same number of connections, one
request at a time on each. So the client costs the same with every server, and only the servers differ.

Imports the standard library and uvloop.
"""

import asyncio
import base64
import json
import re
import time
from collections.abc import Callable
from typing import cast

import uvloop

__all__ = ["Etcd", "Ours", "Redis", "Rival", "rate"]

TTL_MS = 600_000
_LEASE = re.compile(rb'"lease_id":"(\w+)","fencing_token":(\d+)')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Rival:
    """How to acquire and release a lock on one kind of server."""

    port: int

    def acquire(self, name: str) -> bytes:
        raise NotImplementedError

    def release(self, name: str, granted: bytes) -> bytes:
        raise NotImplementedError

    def whole(self, data: bytes) -> bool:
        """Whether the data is a complete answer."""
        raise NotImplementedError

    def check(self, data: bytes) -> None:
        """Raise unless the answer is a grant or a release."""
        raise NotImplementedError


class _Http(Rival):
    def __init__(self, url: str) -> None:
        self.port = int(url.rpartition(":")[2])

    def post(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def whole(self, data: bytes) -> bool:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return False
        length = _LENGTH.search(data, 0, end)
        assert length is not None, data
        return len(data) >= end + 4 + int(length[1])

    def check(self, data: bytes) -> None:
        assert data.startswith(b"HTTP/1.1 200"), data


class Ours(_Http):
    def acquire(self, name: str) -> bytes:
        return self.post(f"/v1/locks/{name}/acquire", b'{"owner_id":"bench","ttl_ms":%d}' % TTL_MS)

    def release(self, name: str, granted: bytes) -> bytes:
        lease = _LEASE.search(granted)
        assert lease is not None, granted
        body = b'{"owner_id":"bench","lease_id":"%s","fencing_token":%s}' % lease.groups()
        return self.post(f"/v1/locks/{name}/release", body)


class Etcd(_Http):
    """etcd, whose lock API needs a new lease for each lock."""

    def acquire(self, name: str) -> bytes:
        return self.post("/v3/lock/lock", b'{"name":"%s"}' % base64.b64encode(name.encode()))

    def release(self, name: str, granted: bytes) -> bytes:
        key = json.loads(granted.partition(b"\r\n\r\n")[2])["key"]
        return self.post("/v3/lock/unlock", b'{"key":"%s"}' % key.encode())


class Redis(Rival):
    """SET NX PX and a release that compares; with `fenced`, a script that draws a rising token with each grant."""

    _FENCED = (
        "if redis.call('set',KEYS[1],ARGV[1],'NX','PX',ARGV[2]) then return redis.call('incr',KEYS[2]) end return 0"
    )
    _RELEASE = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0"

    def __init__(self, port: int, *, fenced: bool) -> None:
        self.port = port
        self._fenced = fenced

    def acquire(self, name: str) -> bytes:
        if self._fenced:
            return _command("EVAL", self._FENCED, "2", name, f"{name}:token", "bench", str(TTL_MS))
        return _command("SET", name, "bench", "NX", "PX", str(TTL_MS))

    def release(self, name: str, granted: bytes) -> bytes:
        return _command("EVAL", self._RELEASE, "1", name, "bench")

    def whole(self, data: bytes) -> bool:
        return data.endswith(b"\r\n")

    def check(self, data: bytes) -> None:
        assert data == b"+OK\r\n" or (data.startswith(b":") and data != b":0\r\n"), data


def _command(*words: str) -> bytes:
    return f"*{len(words)}\r\n".encode() + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)


class _Client(asyncio.Protocol):
    """One connection: sends a request, waits for the answer, and repeats until the time is over."""

    def __init__(self, rival: Rival, names: Callable[[], str], until: float, *, releases: bool) -> None:
        self._rival, self._names, self._until, self._releases = rival, names, until, releases
        self._data = b""
        self._holds = False
        self._name = ""
        self.done = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from that class
        self._ask()

    def _ask(self) -> None:
        self._name = self._names()
        self._transport.write(self._rival.acquire(self._name))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._rival.whole(self._data):
            return
        answer, self._data = self._data, b""
        try:
            self._rival.check(answer)
        except AssertionError as error:
            self.ended.set_exception(error)
            self._transport.close()
            return
        if self._releases and not self._holds:
            self._holds = True
            self._transport.write(self._rival.release(self._name, answer))
            return
        self._holds = False
        self.done += 1
        if time.perf_counter() < self._until:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def rate(rival: Rival, prefix: str, connections: int, duration_s: float, *, releases: bool) -> float:
    """Grants per second, measured in a new event loop. With `releases`, each connection acquires and releases the same
    lock again and again; without, each grant is of a new lock."""
    return uvloop.run(_rate(rival, prefix, connections, duration_s, releases=releases))


async def _rate(rival: Rival, prefix: str, connections: int, duration_s: float, *, releases: bool) -> float:
    began = time.perf_counter()

    def client(number: int) -> _Client:
        turn = 0

        def name() -> str:
            nonlocal turn
            turn += not releases
            return f"{prefix}-{number}-{turn}"

        return _Client(rival, name, began + duration_s, releases=releases)

    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda number=number: client(number), "127.0.0.1", rival.port))[1]  # type: ignore[misc]
        for number in range(connections)
    ]
    await asyncio.gather(*(each.ended for each in made))
    return sum(each.done for each in made) / (time.perf_counter() - began)
