"""The lock server over real sockets on a real SQLite file: what it answers, to whom, how much, and how it ends."""

import asyncio
import concurrent.futures
import contextlib
import json
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pgleaderlock._http.serving import HttpServer, ServingLimits, listen
from pgleaderlock.server.description import OPERATIONS
from support.lockserver import ADMIN_TOKEN, PREFIX_TOKEN, LockServerProcess, Reply, lock_server
from support.program import PATIENCE_S

OWNER = {"owner_id": "w1", "ttl_ms": 60_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """One without tokens, for tests that leave it as it was. Take lock names of your own."""
    with lock_server(tmp_path_factory.mktemp("open")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """One with tokens."""
    with lock_server(tmp_path_factory.mktemp("guarded"), tokens=True) as running:
        yield running


def acquire(server: LockServerProcess, lock: str, owner: str = "w1", ttl_ms: int = 60_000, **more: Any) -> Reply:
    return server.ask("POST", f"/v1/locks/{lock}/acquire", {"owner_id": owner, "ttl_ms": ttl_ms, **more})


def lease_of(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply
    return {key: reply.json()[key] for key in ("owner_id", "lease_id", "fencing_token")}


def metrics(server: LockServerProcess) -> dict[str, float]:
    text = server.ask("GET", "/metrics").body.decode()
    return {name: float(value) for name, value in re.findall(r"^([a-z_]+(?:\{.*?\})?) (\S+)$", text, re.MULTILINE)}


def until(what: Any) -> None:
    """Nothing signals another process's state: looked at until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def connected(server: LockServerProcess, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        yield connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            said += chunk
    return said


def raw(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    shown = ["Host: localhost", "Content-Type: application/json", f"Content-Length: {length or len(body)}", *headers]
    return "\r\n".join([f"POST {path} HTTP/1.1", *shown, "", ""]).encode("latin-1") + body


# --- The operations


def test_a_lock_is_acquired_renewed_and_released(server: LockServerProcess) -> None:
    granted = acquire(server, "job")
    lease = lease_of(granted)
    held = acquire(server, "job", "w2")
    assert (held.status, held.json()["reason"], held.json()["current_owner_id"]) == (409, "HELD", "w1")
    renewed = server.ask("POST", "/v1/locks/job/renew", {**lease, "extend_by_ms": 60_000})
    assert (renewed.status, renewed.json()["renewed"]) == (200, True)
    assert server.ask("POST", "/v1/locks/job/release", lease).json() == {"released": True}
    again = acquire(server, "job", "w2")
    assert again.json()["fencing_token"] > granted.json()["fencing_token"]


def test_a_stale_lease_renews_and_releases_nothing(server: LockServerProcess) -> None:
    lease = lease_of(acquire(server, "stale"))
    wrong = {**lease, "fencing_token": lease["fencing_token"] + 1}
    renewed = server.ask("POST", "/v1/locks/stale/renew", {**wrong, "extend_by_ms": 1})
    assert (renewed.status, renewed.json()) == (409, {"renewed": False, "reason": "NOT_OWNER_OR_EXPIRED"})
    released = server.ask("POST", "/v1/locks/stale/release", wrong)
    assert (released.status, released.json()) == (200, {"released": False, "reason": "NOT_OWNER"})
    assert server.ask("GET", "/v1/locks/stale").json()["held"] is True


def test_a_lock_that_nobody_ever_took_is_free(server: LockServerProcess) -> None:
    reply = server.ask("GET", "/v1/locks/never%2Ftaken")
    shown = reply.json()
    assert (reply.status, shown["lock_name"], shown["held"], shown["fencing_token"]) == (200, "never/taken", False, 0)


def test_a_slash_in_a_name_is_a_part_of_the_name(server: LockServerProcess) -> None:
    assert acquire(server, "path%2Flock").json()["lock_name"] == "path/lock"
    assert server.ask("GET", "/v1/locks/path/lock").status == 404
    assert server.ask("GET", "/v1/locks/path%2Flock").json()["held"] is True


def test_a_repeated_acquire_with_the_same_key_gets_the_same_lease(server: LockServerProcess) -> None:
    def ask(key: str) -> Reply:
        return server.ask("POST", "/v1/locks/once/acquire", OWNER, headers={"Idempotency-Key": key})

    first, second = ask("key-1"), ask("key-1")
    assert lease_of(first) == lease_of(second)
    assert (first.json()["replayed"], second.json()["replayed"]) == (False, True)
    assert ask("key-2").status == 409


def test_a_batch_has_one_result_for_each_operation(server: LockServerProcess) -> None:
    lease = lease_of(acquire(server, "batch-1"))
    operations = [
        {"op": "renew", "lock_name": "batch-1", **lease, "extend_by_ms": 60_000},
        {"op": "acquire", "lock_name": "batch-2", **OWNER},
        {"op": "acquire", "lock_name": "batch-1", "owner_id": "other", "ttl_ms": 1},
        {"op": "release", "lock_name": "batch-1", **lease},
        {"op": "renew", "lock_name": "batch-1", **lease, "extend_by_ms": 1},
    ]
    reply = server.ask("POST", "/v1/batch", {"operations": operations})
    results = reply.json()["results"]
    assert (reply.status, [result["status"] for result in results]) == (200, [200, 200, 409, 200, 409])
    assert results[1]["body"]["lock_name"] == "batch-2"
    assert results[2]["body"]["reason"] == "HELD"


def test_the_list_is_paged_in_the_order_of_names(server: LockServerProcess) -> None:
    names = [f"list/{number:02}" for number in range(5)]
    for name in names:
        assert acquire(server, name.replace("/", "%2F")).status == 200
    found: list[str] = []
    query = "prefix=list%2F&limit=2"
    while True:
        page = server.ask("GET", f"/v1/locks?{query}").json()
        found += [lock["lock_name"] for lock in page["locks"]]
        if page["next_cursor"] is None:
            break
        query = f"prefix=list%2F&limit=2&cursor={page['next_cursor'].replace('/', '%2F')}"
    assert found == names


def test_a_waiter_is_answered_when_the_lock_is_released(server: LockServerProcess) -> None:
    lease = lease_of(acquire(server, "wait"))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(acquire, server, "wait", "w2", wait_ms=30_000)
        until(lambda: server.ask("GET", "/v1/locks/wait").json()["waiters"] == 1)
        assert server.ask("POST", "/v1/locks/wait/release", lease).json() == {"released": True}
        granted = waiting.result(PATIENCE_S)
    assert (granted.status, granted.json()["owner_id"]) == (200, "w2")


def test_a_client_that_leaves_gives_its_place_up(server: LockServerProcess) -> None:
    lease = lease_of(acquire(server, "leave"))
    # It would wait for longer than the test's patience.
    body = json.dumps({"owner_id": "gone", "ttl_ms": 60_000, "wait_ms": 60_000}).encode()
    with connected(server, raw("/v1/locks/leave/acquire", body)):
        until(lambda: server.ask("GET", "/v1/locks/leave").json()["waiters"] == 1)
    until(lambda: server.ask("GET", "/v1/locks/leave").json()["waiters"] == 0)
    server.ask("POST", "/v1/locks/leave/release", lease)
    assert acquire(server, "leave", "w3").status == 200


def test_a_granted_lease_is_there_after_a_restart(tmp_path: Path) -> None:
    with lock_server(tmp_path) as first:
        lease = lease_of(acquire(first, "kept"))
        first.program.process.kill()
    with lock_server(tmp_path) as second:
        assert acquire(second, "kept", "w2").status == 409
        assert server_renews(second, "kept", lease)


def server_renews(server: LockServerProcess, lock: str, lease: dict[str, Any]) -> bool:
    return server.ask("POST", f"/v1/locks/{lock}/renew", {**lease, "extend_by_ms": 1000}).status == 200


# --- What is refused


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/locks/x/acquire", b"{", {}, 400),
        ("POST", "/v1/locks/x/acquire", {"owner_id": "w", "ttl_ms": 1, "extra": 1}, {}, 400),
        ("POST", "/v1/locks/%FF/acquire", OWNER, {}, 400),
        ("POST", "/v1/locks/%/acquire", OWNER, {}, 400),
        ("POST", "/v1/locks/%00/acquire", OWNER, {}, 400),
        ("POST", "/v1/locks//acquire", OWNER, {}, 400),
        ("POST", "/v1/locks/" + "x" * 201 + "/acquire", OWNER, {}, 400),
        ("POST", "/v1/locks/x/acquire", OWNER, {"Idempotency-Key": "a b"}, 400),
        ("GET", "/v1/locks/%FF", None, {}, 400),
        ("GET", "/v1/locks?limit=0", None, {}, 400),
        ("GET", "/v1/locks?limit=1001", None, {}, 400),
        ("GET", "/v1/locks?limit=x", None, {}, 400),
        ("GET", "/v1/locks?prefix=%FF", None, {}, 400),
        ("GET", "/v1/locks?nonsense=1", None, {}, 400),
        ("GET", "/v1/locks?limit=1&limit=2", None, {}, 400),
        ("POST", "/v1/batch", {"operations": []}, {}, 400),
        ("POST", "/v1/locks/x/acquire", OWNER, {"Host": "evil.example"}, 403),
        ("GET", "/v1/locks", None, {"Host": "evil.example:7420"}, 403),
        ("GET", "/healthz", None, {"Host": "evil.example"}, 403),
        ("POST", "/v1/locks/x/break", {}, {}, 403),
        ("GET", "/", None, {}, 404),
        ("GET", "/v1/locks/", None, {}, 404),
        ("GET", "/v1/locks/a/b/c", None, {}, 404),
        ("POST", "/v1/locks/a/nonsense", OWNER, {}, 404),
        ("GET", "/v1/locks/x/acquire", None, {}, 405),
        ("POST", "/v1/locks", OWNER, {}, 405),
        ("GET", "/v1/batch", None, {}, 405),
        ("DELETE", "/v1/locks/x", None, {}, 405),
        ("HEAD", "/healthz", None, {}, 405),
        ("OPTIONS", "/v1/locks/x/acquire", None, {}, 405),
        ("POST", "/v1/locks/x/acquire", b" " * 16_385, {}, 413),
        ("POST", "/v1/batch", b" " * (2 * 1024 * 1024 + 1), {}, 413),
        ("POST", "/v1/locks/x/acquire", OWNER, {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/locks/x/acquire", OWNER, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/v1/batch", {"operations": []}, {"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ("POST", "/v1/locks/x/break", {}, {"Content-Type": "text/plain"}, 415),
    ],
)
def test_what_is_wrong_is_refused_with_a_sentence(
    server: LockServerProcess, *, method: str, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    reply = server.ask(method, path, body, headers=headers)
    assert reply.status == status
    if method != "HEAD":
        assert set(reply.json()) == {"error"}
    if status == 405:
        assert reply.headers["allow"] in ("GET", "POST")
    assert server.ask("GET", "/v1/locks/x").json()["fencing_token"] == 0, "nothing was done"


def test_a_body_without_a_length_is_limited_all_the_same(server: LockServerProcess) -> None:
    head = b"POST /v1/locks/x/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    with connected(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 2) as connection:
        assert everything(connection).startswith(b"HTTP/1.1 413 ")


def test_json_with_a_charset_is_json(server: LockServerProcess) -> None:
    for given in ("application/json; charset=utf-8", "Application/JSON"):
        reply = server.ask("POST", "/v1/locks/charset/acquire", OWNER, headers={"Content-Type": given})
        assert reply.status in (200, 409)


def test_a_request_id_is_echoed(server: LockServerProcess) -> None:
    for path in ("/healthz", "/v1/locks", "/nowhere"):
        assert server.ask("GET", path, headers={"X-Request-ID": "r-1"}).headers["x-request-id"] == "r-1"
    reply = server.ask("POST", "/v1/locks/id/acquire", OWNER, headers={"X-Request-ID": "r-2"})
    assert reply.headers["x-request-id"] == "r-2"
    assert "x-request-id" not in server.ask("GET", "/healthz", headers={"X-Request-ID": "a b"}).headers


_BATCH = b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BAD_BYTES = [
    b"\x00\x01\x02\x03\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /v1/locks/x/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/locks/x/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/locks/x/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /v1/locks/x/acquire HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    _BATCH + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    _BATCH + b"Content-Length: 9\r\n\r\n{",
    b"GET /v1/locks HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /v1/locks HTTP/1.1\r\nHost: localhost\r\n" + b"X-Y: z\r\n" * 5000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/locks HTTP/1.1\r\n\r\n",
    b"GET /v1/locks/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/locks?prefix=\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/v1/locks HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET /v1/locks HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\nHost: \xff\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"NONSENSE /v1/locks HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


@pytest.mark.parametrize("data", BAD_BYTES, ids=range(len(BAD_BYTES)))
def test_bad_bytes_get_a_4xx_or_a_closed_connection(server: LockServerProcess, data: bytes) -> None:
    with contextlib.suppress(ConnectionError), connected(server, data) as connection:
        with contextlib.suppress(OSError):  # it may be closed already
            connection.shutdown(socket.SHUT_WR)
        said = everything(connection)
        assert said == b"" or re.match(rb"HTTP/1\.[01] 4\d\d ", said), said[:100]
    assert server.ask("GET", "/healthz").status == 200


# --- Who may ask


def every_path() -> list[tuple[str, str, bool]]:
    return [(op.method, op.path.replace("{lock}", "team%2Fx"), op.needs_token) for op in OPERATIONS]


BODIES: dict[str, Any] = {
    "acquire": OWNER,
    "renew": {"owner_id": "w", "lease_id": "l", "fencing_token": 1, "extend_by_ms": 1},
    "release": {"owner_id": "w", "lease_id": "l", "fencing_token": 1},
    "batch": {
        "operations": [{"op": "release", "lock_name": "team/x", "owner_id": "w", "lease_id": "l", "fencing_token": 1}]
    },
    "break": {},
}


@pytest.mark.parametrize(("method", "path", "needs_token"), every_path())
def test_every_path_but_the_open_ones_needs_a_known_token(
    guarded: LockServerProcess, method: str, path: str, needs_token: bool
) -> None:
    body = BODIES.get(path.rsplit("/", 1)[1])
    for authorization in ("", "Bearer wrong-token-0000000000", "Basic " + ADMIN_TOKEN, "Bearer", ADMIN_TOKEN):
        reply = guarded.ask(method, path, body, headers={"Authorization": authorization})
        if needs_token:
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        else:
            assert reply.status == 200
    assert guarded.ask(method, path, body, token=ADMIN_TOKEN).status in (200, 409)


def test_only_health_readiness_and_the_description_are_open() -> None:
    assert {path for _, path, needs_token in every_path() if not needs_token} == {
        "/healthz",
        "/readyz",
        "/openapi.json",
    }


def test_a_limited_token_works_below_its_prefix_only(guarded: LockServerProcess) -> None:
    for path in ("acquire", "renew", "release"):
        inside = guarded.ask("POST", f"/v1/locks/team%2Flimited/{path}", BODIES[path], token=PREFIX_TOKEN)
        outside = guarded.ask("POST", f"/v1/locks/other/{path}", BODIES[path], token=PREFIX_TOKEN)
        assert (inside.status in (200, 409), outside.status) == (True, 403)
    assert guarded.ask("GET", "/v1/locks/other", token=PREFIX_TOKEN).status == 403
    assert guarded.ask("GET", "/v1/locks", token=PREFIX_TOKEN).status == 403
    assert guarded.ask("GET", "/v1/locks?prefix=tea", token=PREFIX_TOKEN).status == 403
    assert guarded.ask("GET", "/v1/locks?prefix=team%2F", token=PREFIX_TOKEN).status == 200
    assert guarded.ask("GET", "/v1/locks/other", token=ADMIN_TOKEN).json()["fencing_token"] == 0


def test_in_a_batch_each_item_is_authorised_by_itself(guarded: LockServerProcess) -> None:
    operations = [{"op": "acquire", "lock_name": name, **OWNER} for name in ("foreign", "team/batch", "foreign")]
    reply = guarded.ask("POST", "/v1/batch", {"operations": operations}, token=PREFIX_TOKEN)
    assert [result["status"] for result in reply.json()["results"]] == [403, 200, 403]
    assert guarded.ask("GET", "/v1/locks/foreign").json()["held"] is False


def test_the_lease_id_is_shown_to_an_admin_only(guarded: LockServerProcess, server: LockServerProcess) -> None:
    lease = lease_of(acquire(guarded, "shown"))
    for path in ("/v1/locks/shown", "/v1/locks?prefix=shown"):
        assert lease["lease_id"].encode() not in guarded.ask("GET", path).body
        assert lease["lease_id"].encode() in guarded.ask("GET", path, token=ADMIN_TOKEN).body
    lease = lease_of(acquire(server, "shown"))
    assert lease["lease_id"].encode() not in server.ask("GET", "/v1/locks/shown").body


def test_an_admin_breaks_a_lock_and_it_is_written_down(guarded: LockServerProcess) -> None:
    granted = acquire(guarded, "broken")
    assert guarded.ask("POST", "/v1/locks/broken/break", {}).status == 403
    reply = guarded.ask("POST", "/v1/locks/broken/break", {}, token=ADMIN_TOKEN)
    assert (reply.status, reply.json()["broken"], reply.json()["was"]["owner_id"]) == (200, True, "w1")
    guarded.program.until("lock_broken lock=broken by=root")
    assert acquire(guarded, "broken", "w2").json()["fencing_token"] > granted.json()["fencing_token"]
    assert not server_renews(guarded, "broken", lease_of(granted))


# --- Limits, each with its own answer


def test_one_waiter_too_many_is_answered_429(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--max-waiters", "1") as server:
        acquire(server, "full")
        body = json.dumps({"owner_id": "w2", "ttl_ms": 1000, "wait_ms": 30_000}).encode()
        with connected(server, raw("/v1/locks/full/acquire", body)):
            until(lambda: server.ask("GET", "/v1/locks/full").json()["waiters"] == 1)
            reply = acquire(server, "full", "w3", wait_ms=30_000)
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert acquire(server, "full", "w3").status == 409, "who does not wait is not too many"


def test_one_lock_too_many_is_answered_503_and_the_others_go_on(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--max-locks", "2") as server:
        lease = lease_of(acquire(server, "one"))
        acquire(server, "two")
        reply = acquire(server, "three")
        assert (reply.status, reply.headers["retry-after"]) == (503, "60")
        assert "--max-locks" in reply.json()["error"]
        batch = server.ask("POST", "/v1/batch", {"operations": [{"op": "acquire", "lock_name": "three", **OWNER}]})
        assert batch.json()["results"][0]["status"] == 503
        assert server_renews(server, "one", lease)


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


def test_connections_beyond_the_limit_wait_for_their_turn(tmp_path: Path) -> None:
    limits = ("--max-connections", "2", "--header-timeout", "1s")
    with lock_server(tmp_path, *limits) as server, contextlib.ExitStack() as clients:
        half = b"GET /healthz HTTP/1.1\r\nHo"
        first, second = (clients.enter_context(connected(server, half)) for _ in range(2))
        third = clients.enter_context(connected(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        # What can be read first is the end of one of the two, cut off by the header's timeout; then comes the answer.
        ready, _, _ = select.select([first, second, third], [], [], PATIENCE_S)
        assert third not in ready
        assert third.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_wait_is_no_longer_than_the_server_allows(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--max-wait", "50ms") as server:
        acquire(server, "short")
        assert acquire(server, "short", "w2", wait_ms=60_000).status == 409


# --- Metrics


def test_the_metrics_move_on_every_path(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--sweep-interval", "50ms") as server:
        before = metrics(server)
        lease = lease_of(acquire(server, "m"))
        acquire(server, "m", "w2")
        acquire(server, "m", "w2", wait_ms=10)
        server.ask("POST", "/v1/locks/m/renew", {**lease, "extend_by_ms": 60_000})
        server.ask("POST", "/v1/locks/m/renew", {**lease, "lease_id": "no", "extend_by_ms": 60_000})
        server.ask("POST", "/v1/locks/m/release", {**lease, "lease_id": "no"})
        until(lambda: metrics(server)["locks_held"] == 1)
        server.ask("POST", "/v1/locks/m/release", lease)
        batch = [
            {"op": "acquire", "lock_name": "b", "owner_id": "w", "ttl_ms": 1},
            {"op": "renew", "lock_name": "c", **lease, "extend_by_ms": 1},
            {"op": "release", "lock_name": "c", **lease},
        ]
        server.ask("POST", "/v1/batch", {"operations": batch})
        server.ask("GET", "/v1/locks/m")
        server.ask("GET", "/v1/locks")
        until(lambda: metrics(server)["lock_expired_total"] == 1)
        after = metrics(server)
    moved = {name: value - before[name] for name, value in after.items() if value != before[name]}
    counted = {
        'lock_acquire_total{result="success"}': 2,
        'lock_acquire_total{result="fail"}': 2,
        'lock_renew_total{result="success"}': 1,
        'lock_renew_total{result="fail"}': 2,
        'lock_release_total{result="success"}': 1,
        'lock_release_total{result="fail"}': 2,
        "lock_expired_total": 1,
    }
    assert {name: moved.get(name) for name in counted} == counted
    for op, times in {
        "acquire": 2,
        "acquire_wait": 1,
        "renew": 2,
        "release": 2,
        "batch": 1,
        "get": 1,
        "list": 1,
    }.items():
        assert moved[f'lock_op_latency_ms_count{{op="{op}"}}'] == times
    assert {'lock_db_busy_total{op="acquire"}', "locks_held"} <= set(after)


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
        "from pgleaderlock.server.store_sqlite import SqliteStore\n"
        "async def close(self): await asyncio.sleep(3600)\n"
        "SqliteStore.close = close"
    )
    with lock_server(tmp_path, code=code) as server:
        server.program.signal(signal.SIGINT)
        server.program.until("stopping signal=SIGINT")
        server.program.signal(signal.SIGINT)
        assert server.program.end() == 128 + signal.SIGINT
