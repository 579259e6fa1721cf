"""The lock server's limits, each with its own answer, and its end, which nobody holds up."""

import asyncio
import concurrent.futures
import contextlib
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from pgleaderlock._http.server import HttpServer, ServingLimits, listen
from support.lockserver import (
    OWNER,
    acquire,
    connected,
    everything,
    lease_of,
    lock_server,
    raw,
    renews,
    until,
)
from support.program import PATIENCE_S


def test_one_waiter_too_many_is_answered_429(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--max-waiters", "1") as server:
        acquire(server, "full")
        body = json.dumps({"owner_id": "w2", "ttl_ms": 1000, "wait_ms": 30_000}).encode()
        with connected(server, raw("/v1/locks/full/acquire", body)):
            until(lambda: server.ask("GET", "/v1/locks/full").json()["waiters"] == 1)
            reply = acquire(server, "full", "w3", wait_ms=30_000)
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert acquire(server, "full", "w3").status == 409, "who does not wait is not too many"


def test_a_client_that_waits_and_leaves_behind_many_other_requests_loses_its_place(tmp_path: Path) -> None:
    with lock_server(tmp_path) as server:
        acquire(server, "full")
        body = json.dumps({"owner_id": "w2", "ttl_ms": 600_000, "wait_ms": 60_000}).encode()
        waits = raw("/v1/locks/full/acquire", body)
        with connected(server, waits):
            until(lambda: server.ask("GET", "/v1/locks/full").json()["waiters"] == 1)
        until(lambda: server.ask("GET", "/v1/locks/full").json()["waiters"] == 0)
        with connected(server, waits + raw("/v1/locks/other/acquire", body) * 80):
            pass
        with connected(server, waits):
            until(lambda: server.ask("GET", "/v1/locks/full").json()["waiters"] == 1)


def test_one_lock_too_many_is_answered_503_and_the_others_go_on(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--max-locks", "2") as server:
        lease = lease_of(acquire(server, "one"))
        acquire(server, "two")
        reply = acquire(server, "three")
        assert (reply.status, reply.headers["retry-after"]) == (503, "60")
        assert "--max-locks" in reply.json()["error"]
        batch = server.ask("POST", "/v1/batch", {"operations": [{"op": "acquire", "lock_name": "three", **OWNER}]})
        assert batch.json()["results"][0]["status"] == 503
        server.program.until('store_failed error="the server stores 2 locks already')
        assert renews(server, "one", lease)


def test_a_body_that_does_not_arrive_is_answered_408(tmp_path: Path) -> None:
    with (
        lock_server(tmp_path, "--body-timeout", "200ms") as server,
        connected(server, raw("/v1/locks/x/acquire", b"{", length=50)) as connection,
    ):
        assert everything(connection).startswith(b"HTTP/1.1 408 ")
        assert server.ask("GET", "/healthz").status == 200


def test_a_header_that_does_not_arrive_ends_the_connection(tmp_path: Path) -> None:
    with (
        lock_server(tmp_path, "--header-timeout", "200ms") as server,
        connected(server, b"GET /healthz HTTP/1.1\r\nHo") as connection,
    ):
        assert everything(connection) == b""


HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", HEALTHZ, HEALTHZ[:20], raw("/v1/locks/x/acquire", b"{", length=50)],
    ids=["silent", "answered", "half a header", "half a body"],
)
def test_idle_connections_do_not_lock_anybody_out(tmp_path: Path, sent: bytes) -> None:
    limits = ("--max-connections", "16", "--header-timeout", "10m", "--body-timeout", "10m")
    with lock_server(tmp_path, *limits) as server, contextlib.ExitStack() as clients:
        for _ in range(160):
            clients.enter_context(connected(server, sent))
        lease = lease_of(acquire(server, "job"))
        assert renews(server, "job", lease)


def test_those_who_wait_leave_connections_to_the_holder(tmp_path: Path) -> None:
    body = json.dumps({"owner_id": "w2", "ttl_ms": 600_000, "wait_ms": 60_000}).encode()
    with lock_server(tmp_path, "--max-connections", "8") as server, contextlib.ExitStack() as clients:
        lease = lease_of(acquire(server, "job"))
        for _ in range(12):
            clients.enter_context(connected(server, raw("/v1/locks/job/acquire", body)))
        assert renews(server, "job", lease)
        assert server.ask("GET", "/v1/locks/job").json()["waiters"] == 3
        assert server.ask("GET", "/healthz").status == 200


def test_a_wait_is_no_longer_than_the_server_allows(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--max-wait", "50ms") as server:
        acquire(server, "short")
        assert acquire(server, "short", "w2", wait_ms=60_000).status == 409


# --- The end


def test_a_graceful_stop_answers_who_waits_and_is_held_up_by_nobody(tmp_path: Path) -> None:
    # Each of its own limits is longer than the test's patience: if it waited for one of them, `stop` would fail.
    limits = ("--header-timeout", "10m", "--body-timeout", "10m")
    with lock_server(tmp_path, *limits) as server, contextlib.ExitStack() as clients:
        acquire(server, "stop")
        body = json.dumps({"owner_id": "w2", "ttl_ms": 1000, "wait_ms": 60_000}).encode()
        parked = clients.enter_context(connected(server, raw("/v1/locks/stop/acquire", body)))
        half_body = clients.enter_context(connected(server, raw("/v1/locks/x/acquire", b"{", length=50)))
        half_header = clients.enter_context(connected(server, b"GET /healthz HTTP/1.1\r\nHost: lo"))
        silent = clients.enter_context(connected(server, b""))
        idle = clients.enter_context(connected(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert idle.recv(65536).startswith(b"HTTP/1.1 200 ")
        until(lambda: server.ask("GET", "/v1/locks/stop").json()["waiters"] == 1)
        assert server.stop() == 0
        assert everything(parked).startswith(b"HTTP/1.1 503 ")
        assert everything(half_body).startswith(b"HTTP/1.1 503 ")
        assert [everything(connection) for connection in (half_header, silent, idle)] == [b"", b"", b""]
        assert "server_stopped" in server.program.err
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.host, server.port), timeout=PATIENCE_S)


def test_a_request_that_is_in_the_store_is_answered_before_the_end(tmp_path: Path) -> None:
    # Its store answers when there is a file, and says that it was asked by another.
    asked, go = tmp_path / "asked", tmp_path / "go"
    code = (
        "import asyncio, pathlib\n"
        "from pgleaderlock.server.sqlite.writer import Writer\n"
        "real = Writer.submit\n"
        "def submit(self, request):\n"
        f"    pathlib.Path({str(asked)!r}).touch()\n"
        f"    if pathlib.Path({str(go)!r}).exists(): real(self, request)\n"
        "    else: asyncio.get_running_loop().call_later(0.01, submit, self, request)\n"
        "Writer.submit = submit"
    )
    with lock_server(tmp_path, code=code) as server, concurrent.futures.ThreadPoolExecutor() as threads:
        in_flight = threads.submit(acquire, server, "last")
        until(asked.exists)
        server.program.signal(signal.SIGTERM)
        server.program.until("stopping signal=SIGTERM")
        go.touch()
        assert in_flight.result(PATIENCE_S).status == 200
        assert server.program.end() == 0
    with lock_server(tmp_path) as server:
        assert acquire(server, "last", "w2").status == 409, "what was answered is in the store"


async def test_after_a_stop_no_connection_is_left_in_a_process_that_lives_on() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"accepted"})

    async def answered() -> None:
        pass

    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    http = HttpServer(app, listening, ServingLimits(header_timeout_s=600))
    http.start()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nHo")
    # Connections are accepted in their order: when the second is answered, the first is no longer in the backlog.
    later_reader, later_writer = await asyncio.open_connection(*address)
    later_writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await later_reader.readuntil(b"accepted")
    await http.stop(answered)
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    for each in (writer, later_writer):
        each.close()
        await each.wait_closed()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    # Its store cannot close in this process, so that the first signal alone would not end it.
    code = (
        "import asyncio\n"
        "from pgleaderlock.server.sqlite.store import SqliteStore\n"
        "async def close(self): await asyncio.sleep(3600)\n"
        "SqliteStore.close = close"
    )
    with lock_server(tmp_path, code=code) as server:
        server.program.signal(signal.SIGINT)
        server.program.until("stopping signal=SIGINT")
        server.program.signal(signal.SIGINT)
        assert server.program.end() == 128 + signal.SIGINT
