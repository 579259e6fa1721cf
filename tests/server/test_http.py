"""The lock server over real sockets on a real SQLite file: what it does, what it refuses, and what it counts."""

import concurrent.futures
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from support.lockserver import (
    OWNER,
    LockServerProcess,
    Reply,
    acquire,
    connected,
    everything,
    lease_of,
    lock_server,
    metrics,
    raw,
    renews,
    until,
)
from support.program import PATIENCE_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """One without tokens, for tests that leave it as it was. Take lock names of your own."""
    with lock_server(tmp_path_factory.mktemp("open")) as running:
        yield running


# --- The operations


def test_every_answer_says_which_store_it_comes_from(server: LockServerProcess) -> None:
    replies = [
        acquire(server, "identified"),
        *(server.ask("GET", path) for path in ("/healthz", "/v1/locks", "/nothing", "/metrics")),
        server.ask("POST", "/v1/locks/identified/acquire", {"nonsense": 1}),
    ]
    assert len({reply.headers["x-lock-store"] for reply in replies}) == 1
    (identity,) = {reply.headers["x-lock-store"] for reply in replies}
    for wanted, status in ((identity, 200), ("0" * 16, 421)):
        asked = server.ask("GET", "/v1/locks/identified", headers={"X-Lock-Store": wanted})
        assert asked.status == status


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


MISLEADING = {"blank at the end": "job%20", "blank at the start": "%20job", "decomposed": "caf%65%CC%81"}


@pytest.mark.parametrize("path", MISLEADING.values(), ids=MISLEADING)
def test_a_name_that_looks_like_another_is_refused_by_a_strict_server_only(
    server: LockServerProcess, tmp_path: Path, path: str
) -> None:
    lease = {"op": "acquire", "lock_name": unquote(path), **OWNER}
    assert acquire(server, path).json()["lock_name"] == unquote(path)
    with lock_server(tmp_path, "--strict-names") as strict:
        refused = acquire(strict, path)
        assert (refused.status, "--strict-names" in refused.json()["error"]) == (400, True)
        batch = [lease, {**lease, "lock_name": "caf\u00e9 job"}]
        results = strict.ask("POST", "/v1/batch", {"operations": batch}).json()["results"]
        assert [result["status"] for result in results] == [400, 200]


def test_each_operation_is_logged_with_owner_token_and_outcome_and_no_lease_id(tmp_path: Path) -> None:
    with lock_server(tmp_path, "--access-log", "--log-format", "json") as server:
        lease = lease_of(acquire(server, "job"))
        acquire(server, "job", "w2")
        server.ask("POST", "/v1/locks/job/renew", {**lease, "extend_by_ms": 60_000})
        operations = [{"op": "release", "lock_name": "job", **lease}, {"op": "release", "lock_name": "job", **lease}]
        server.ask("POST", "/v1/batch", {"operations": operations})
        server.program.until("not_released")
        server.stop()
        lines = [json.loads(line) for line in server.program.err.splitlines()]
    shown = ("op", "lock", "owner", "by", "fencing_token", "outcome")
    assert [tuple(line[key] for key in shown) for line in lines if line["event"] == "operation"] == [
        ("acquire", "job", "w1", "-", 1, "granted"),
        ("acquire", "job", "w2", "-", "-", "held"),
        ("renew", "job", "w1", "-", 1, "renewed"),
        ("release", "job", "w1", "-", 1, "released"),
        ("release", "job", "w1", "-", 1, "not_released"),
    ]
    assert lease["lease_id"] not in server.program.err


def test_a_path_may_end_in_a_slash(server: LockServerProcess) -> None:
    lease = lease_of(acquire(server, "slash"))
    held = server.ask("POST", "/v1/locks/slash/acquire/", OWNER)
    assert (held.status, held.json()["lock_name"]) == (409, "slash")
    assert server.ask("GET", "/v1/locks/slash/").json()["held"] is True
    assert server.ask("GET", "/healthz/").status == 200
    assert server.ask("POST", "/v1/locks/slash/release/", lease).json() == {"released": True}
    for nothing in ("/v1/locks/slash//", "/v1/locks/", "/v1/locks//", "/v1/locks//acquire/", "/v1/"):
        assert server.ask("GET", nothing).status == 404


def test_a_repeated_acquire_with_the_same_key_gets_the_same_lease(server: LockServerProcess) -> None:
    def ask(key: str) -> Reply:
        return server.ask("POST", "/v1/locks/once/acquire", OWNER, headers={"Idempotency-Key": key})

    first, second = ask("key-1"), ask("key-1")
    assert lease_of(first) == lease_of(second)
    assert (first.json()["replayed"], second.json()["replayed"]) == (False, True)
    assert ask("key-2").status == 409


@pytest.mark.parametrize("changed", [{"ttl_ms": 30_000}, {"owner_id": "w2"}, {"lock_name": "another"}], ids=str)
def test_a_key_repeated_with_another_body_is_a_422_with_the_reason(
    server: LockServerProcess, changed: dict[str, Any]
) -> None:
    (field,) = changed
    asked = {"lock_name": f"reused-{field}", **OWNER}
    other = {**asked, **changed}
    key = f"reused-{field}"

    def ask(body: dict[str, Any]) -> Reply:
        named = dict(body)
        path = f"/v1/locks/{named.pop('lock_name')}/acquire"
        return server.ask("POST", path, named, headers={"Idempotency-Key": key})

    first = ask(asked)
    refused = ask(other)
    assert (first.status, refused.status) == (200, 422)
    assert field.removesuffix("_name") in refused.json()["error"]
    operations = [{"op": "acquire", "idempotency_key": key, **body} for body in (other, asked)]
    results = server.ask("POST", "/v1/batch", {"operations": operations}).json()["results"]
    assert [result["status"] for result in results] == [422, 200]
    assert lease_of(ask(asked)) == lease_of(first)


def test_replies_tell_what_was_granted_and_what_is_left(server: LockServerProcess) -> None:
    granted = acquire(server, "left")
    assert granted.json()["ttl_ms"] == granted.json()["remaining_ms"] == OWNER["ttl_ms"]
    renewed = server.ask("POST", "/v1/locks/left/renew", {**lease_of(granted), "extend_by_ms": 90_000}).json()
    assert (renewed["ttl_ms"], renewed["remaining_ms"]) == (90_000, 90_000)


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
        assert renews(second, "kept", lease)


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
        ("GET", "/nothing", None, {}, 404),
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
    with connected(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 2 + b"0\r\n\r\n") as connection:
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
        assert moved[f'lock_op_latency_seconds_count{{op="{op}"}}'] == times
    assert {'lock_db_busy_total{op="acquire"}', "locks_held"} <= set(after)
