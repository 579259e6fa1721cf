"""Any bytes on the lock server's socket: an answer below 500 or a closed connection, and the server serves on."""

import errno
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.counts import count
from support.lockserver import LockServerProcess, lock_server

ANSWER_TIMEOUT_S = 10.0
SENDERS = 4
SEED = 20_261_115

BODIES = {
    "acquire": b'{"owner_id":"me","ttl_ms":1000}',
    "renew": b'{"owner_id":"me","lease_id":"x","fencing_token":1,"extend_by_ms":1000}',
    "release": b'{"owner_id":"me","lease_id":"x","fencing_token":1}',
}
BATCH = b'{"operations":[{"op":"acquire","lock_name":"a","owner_id":"me","ttl_ms":1000}]}'
# What parsers have stumbled over elsewhere: lengths, chunks, smuggling, encodings, deep nesting, huge numbers.
FRAGMENTS = [
    b"\r\n",
    b"\n",
    b"\0",
    b"\xff\xfe",
    b"%00",
    b"%",
    b"%zz",
    b"/../",
    b"Content-Length: 0\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity, chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
    b"Host: evil.example\r\n",
    b"X-Request-ID: \x80\x81\r\n",
    b"Idempotency-Key: " + b"k" * 300 + b"\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"[" * 200,
    b'{"a":' * 50,
    b"1e999",
    b"-0",
    b"\xed\xa0\x80",
    b"A" * 9000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LockServerProcess]:
    # What never becomes a whole request is dropped soon, or fifty thousand of them would take all day.
    with lock_server(tmp_path, "--header-timeout", "1s", "--body-timeout", "500ms") as running:
        yield running


def _whole_request(rng: random.Random, server: LockServerProcess) -> bytes:
    what = rng.choice([*BODIES, "batch", "get", "list", "metrics"])
    if what in BODIES:
        start, body = f"POST /v1/locks/job-{rng.randrange(50)}/{what} HTTP/1.1", BODIES[what]
    elif what == "batch":
        start, body = "POST /v1/batch HTTP/1.1", BATCH
    else:
        path = {"get": "/v1/locks/job", "list": "/v1/locks?limit=5", "metrics": "/metrics"}[what]
        start, body = f"GET {path} HTTP/1.1", b""
    head = f"{start}\r\nHost: {server.host}:{server.port}\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def _mutated(rng: random.Random, request: bytes) -> bytes:
    data = bytearray(request)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = rng.choice(FRAGMENTS)
            case 1:
                del data[at : at + rng.randint(1, 20)]
            case 2 if data:
                data[min(at, len(data) - 1)] = rng.randrange(256)
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 60)]
            case _:
                del data[at:]
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


def _answer(server: LockServerProcess, data: bytes, *, end: bool) -> bytes:
    """Whatever came back until the server closed. With `end` we say at once that no more will come, or else the server
    would wait for the rest of what is not whole."""
    with socket.create_connection((server.host, server.port), timeout=ANSWER_TIMEOUT_S) as conn:
        answer = b""
        # A server that has had enough may close while we still send. A timeout is something else: nobody answers.
        try:
            conn.sendall(data)
            if end:
                conn.shutdown(socket.SHUT_WR)
            while part := conn.recv(65536):
                answer += part
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                raise
        return answer


# A transfer coding that this server does not have: the one answer above 500 that a client can ask for.
NO_SUCH_CODING = b"501"


@pytest.mark.timeout(1500)
def test_mutated_requests_fail_for_their_own_fault_or_lose_their_connection(server: LockServerProcess) -> None:
    total = count(400, 50_000)
    seen: Counter[str] = Counter()
    wrong: list[tuple[bytes, bytes]] = []
    lock = threading.Lock()

    def send(number: int) -> None:
        rng = random.Random(SEED + number)
        for turn in range(total // SENDERS):
            request = _whole_request(rng, server)
            # Every tenth is left whole: "nothing was accepted" would prove nothing.
            whole = turn % 10 == 0
            data = request if whole else _mutated(rng, request)
            # Now and then the server has to find out by itself that nothing more comes.
            answer = _answer(server, data, end=not whole and turn % 100 != 1)
            statuses = re.findall(rb"^HTTP/1\.[01] (\d{3})", answer[:20])
            with lock:
                seen[statuses[0].decode() if statuses else "closed"] += 1
                if answer and (not statuses or (statuses[0] >= b"500" and statuses[0] != NO_SUCH_CODING)):
                    wrong.append((data, answer))

    senders = [threading.Thread(target=send, args=(number,)) for number in range(SENDERS)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert [(data[:300], answer[:300]) for data, answer in wrong[:3]] == []
    assert sum(seen.values()) == total // SENDERS * SENDERS
    assert seen["200"] >= total // 20
    assert seen["400"] > 0
    assert server.ask("GET", "/readyz").status == 200
    assert server.stop() == 0
