"""The probes, asked over a real socket: what they answer, and what they do not let a client do to them."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from pgleaderlock import LeaderElection, probes
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.probes import ProbeServer
from support.elections import PATIENT, STEADY, ledger_dsns, until
from support.proxy import Proxy

WAIT_S = 20.0


class Answer:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("ascii").split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = dict(line.lower().split(": ", 1) for line in lines)


async def raw(port: int, request: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(request)
            return await reader.read()


async def ask(server: ProbeServer, path: str, method: str = "GET", host: str = "127.0.0.1") -> Answer:
    return Answer(await raw(server.port, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1")))


async def status(server: ProbeServer, path: str) -> int:
    return (await ask(server, path)).status


@pytest.fixture
def ledger(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
async def alone() -> AsyncIterator[LeaderElection]:
    """An election that leads by itself, without a database."""
    async with LeaderElection("", "billing", standalone=True) as election:
        yield election


@pytest.fixture
async def server(alone: LeaderElection) -> AsyncIterator[ProbeServer]:
    async with ProbeServer(alone, metrics=lambda: b"metric 1\n") as server:
        yield server


# -- what it answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/healthz", 200),
        ("/readyz", 200),
        ("/leader", 200),
        ("/leader?role=billing", 200),
        ("/leader?role=b%69lling", 200),
        ("/leader?other=1", 200),
        ("/leader?role=mail", 404),
        ("/leader?role=", 404),
        ("/leader?role=billing&role=mail", 400),
        ("/leader?role=%ff", 400),
        ("/metrics", 200),
        ("/", 404),
        ("/metrics/", 404),
        ("//healthz", 404),
        ("/healthz/../metrics", 404),
    ],
)
async def test_each_path_has_its_answer(server: ProbeServer, path: str, answer: int) -> None:
    assert await status(server, path) == answer


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/2.0\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"GET http://127.0.0.1/healthz HTTP/1.1\r\n\r\n", 400),
        (b"\xff\xfe\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"POST /healthz HTTP/1.1\r\n\r\n", 405),
        (b"DELETE /leader HTTP/1.1\r\n\r\n", 405),
        (b"get /healthz HTTP/1.1\r\n\r\n", 405),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost:80\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nhost: [::1]:80\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: rebound.example\r\n\r\n", 403),
        (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: rebound.example\r\n\r\n", 403),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 9_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 9_000 + b" HTTP/1.1\r\n\r\n", 431),
    ],
)
async def test_what_is_no_question_is_refused(server: ProbeServer, request_: bytes, answer: int) -> None:
    assert Answer(await raw(server.port, request_)).status == answer


async def test_a_server_beyond_loopback_may_be_called_by_any_name(alone: LeaderElection) -> None:
    async with ProbeServer(alone, host="0.0.0.0") as open_to_all:
        assert (await ask(open_to_all, "/healthz", host="node-1.example:7421")).status == 200


async def test_head_is_get_without_the_body(server: ProbeServer) -> None:
    get, head = await ask(server, "/metrics"), await ask(server, "/metrics", "HEAD")
    assert get.body == b"metric 1\n"
    assert (head.status, head.body) == (200, b"")
    assert (
        get.headers
        == head.headers
        == {
            "content-type": "text/plain; version=0.0.4; charset=utf-8",
            "content-length": "9",
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "connection": "close",
        }
    )


async def test_the_methods_that_are_allowed_are_named(server: ProbeServer) -> None:
    assert (await ask(server, "/healthz", "PUT")).headers["allow"] == "get, head"


async def test_without_metrics_there_is_no_such_path(alone: LeaderElection) -> None:
    async with ProbeServer(alone) as server:
        assert await status(server, "/metrics") == 404


async def test_of_several_roles_one_has_to_be_named() -> None:
    async with LeaderElection("", ["a", "b"], standalone=True) as election, ProbeServer(election) as server:
        assert await status(server, "/leader") == 400
        await election.drain("b")
        assert [await status(server, f"/leader?role={role}") for role in "ab"] == [200, 503]


async def test_leader_follows_the_gate_and_not_the_lock(alone: LeaderElection, server: ProbeServer) -> None:
    gate = alone.gate("billing")
    gate.disable()
    assert [await status(server, path) for path in ("/leader", "/readyz", "/healthz")] == [503, 200, 200]
    assert gate.token is not None
    gate.enable(gate.token)
    assert await status(server, "/leader") == 200


async def test_asking_is_no_refused_act(alone: LeaderElection, server: ProbeServer) -> None:
    alone.gate("billing").disable()
    assert await status(server, "/leader") == 503
    assert sum(alone.gate("billing").blocked.values()) == 0


async def test_health_ends_with_the_election_and_begins_with_it_again() -> None:
    election = LeaderElection("", "billing", standalone=True)
    async with ProbeServer(election) as server:
        assert await status(server, "/healthz") == 200
        await election.start()
        assert await election.gate("billing").wait_open(WAIT_S)
        await election.shutdown()
        assert [await status(server, path) for path in ("/healthz", "/readyz", "/leader")] == [503, 503, 503]
        await election.start()
        assert await election.gate("billing").wait_open(WAIT_S)
        assert [await status(server, path) for path in ("/healthz", "/readyz", "/leader")] == [200, 200, 200]
        await election.shutdown()


async def test_a_node_that_is_switched_off_is_healthy_and_never_ready() -> None:
    async with LeaderElection("", "billing", enabled=False) as election, ProbeServer(election) as server:
        assert [await status(server, path) for path in ("/healthz", "/readyz", "/leader")] == [200, 503, 503]


async def test_ready_is_who_has_a_session_and_leader_who_acts(ledger: str) -> None:
    first = LeaderElection(ledger, "probed", node_id="probed-1", **PATIENT)
    second = LeaderElection(ledger, "probed", node_id="probed-2", **PATIENT)
    async with ProbeServer(first) as at_first, ProbeServer(second) as at_second:
        assert [await status(at_first, path) for path in ("/healthz", "/readyz")] == [200, 503]
        async with first, second:
            assert await first.gate("probed").wait_open(WAIT_S)
            await until(lambda: second.leader("probed"))
            assert [await status(at_first, path) for path in ("/readyz", "/leader")] == [200, 200]
            assert [await status(at_second, path) for path in ("/readyz", "/leader")] == [200, 503]
            await first.drain()
            assert await second.gate("probed").wait_open(WAIT_S)
            assert [await status(at_first, path) for path in ("/readyz", "/leader")] == [200, 503]
            assert await status(at_second, "/leader") == 200


async def test_a_session_that_was_cut_is_not_ready_until_there_is_another(ledger: str, proxy: Proxy) -> None:
    where = proxy.dsn_for(ledger)
    async with LeaderElection(where, "probed_cut", **STEADY) as election, ProbeServer(election) as server:
        await until(lambda: election.heartbeat_age_s() is not None)
        assert await status(server, "/readyz") == 200
        proxy.refuse()
        proxy.reset()
        await until(lambda: election.heartbeat_age_s() is None)
        assert [await status(server, path) for path in ("/healthz", "/readyz", "/leader")] == [200, 503, 503]
        proxy.allow()
        await until(lambda: election.heartbeat_age_s() is not None)
        assert await status(server, "/readyz") == 200


# -- what it does not let a client do ---------------------------------------------------------------------------------


async def test_a_client_that_says_nothing_is_sent_away(server: ProbeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "REQUEST_S_MAX", 0.05)
    assert await raw(server.port, b"GET /healthz HTTP/1.1\r\n") == b""


async def test_more_clients_than_allowed_are_turned_away_and_the_others_served(
    server: ProbeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "CONNECTIONS_MAX", 2)
    held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    await until(lambda: len(server._connections) == 2)
    with pytest.raises((ConnectionError, IndexError)):
        Answer(await raw(server.port, b"GET /healthz HTTP/1.1\r\n\r\n"))
    for _, writer in held:
        writer.close()
    await until(lambda: not server._connections)
    assert await status(server, "/healthz") == 200


async def test_a_client_that_does_not_read_holds_nobody_up(
    alone: LeaderElection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "ANSWER_S_MAX", 0.2)
    async with ProbeServer(alone, metrics=lambda: b"x" * 30_000_000) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as deaf:
            deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            await until(lambda: server._connections)
            assert await status(server, "/healthz") == 200
            await until(lambda: not server._connections)


async def test_metrics_that_take_long_hold_nobody_up(alone: LeaderElection) -> None:
    go_on = threading.Event()
    async with ProbeServer(alone, metrics=lambda: b"late\n" if go_on.wait(WAIT_S) else b"never\n") as server:
        slow = asyncio.create_task(ask(server, "/metrics"))
        await until(lambda: server._connections)
        assert await status(server, "/healthz") == 200
        assert not slow.done()
        go_on.set()
        assert (await slow).body == b"late\n"


async def test_closing_ends_what_is_connected(alone: LeaderElection) -> None:
    server = ProbeServer(alone)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await until(lambda: server._connections)
    await server.close()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    await server.close()  # once more does nothing


async def test_an_address_that_is_taken_is_named_with_the_remedy(server: ProbeServer, alone: LeaderElection) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1 port {server.port}.*choose another port"):
        await ProbeServer(alone, port=server.port).start()
    with pytest.raises(ConfigurationError, match=r"cannot listen on no\.such\.host\.invalid"):
        await ProbeServer(alone, host="no.such.host.invalid").start()
