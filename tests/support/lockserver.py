"""A real lock server: `pgleaderlock serve` as a process of its own, on a free port of this machine.

    with lock_server(tmp_path) as server:                 # no tokens
        server.url, server.host, server.port
    with lock_server(tmp_path, tokens=True) as server:    # .token (any lock), .prefix_token ("team/"), .admin_token

Imports the standard library, `support.program` and trustme. What a test changes is in its own folder.
"""

import contextlib
import http.client
import json
import re
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import trustme
from psycopg.conninfo import conninfo_to_dict

from support.program import PATIENCE_S, Program, running

__all__ = [
    "ADMIN_TOKEN",
    "OWNER",
    "PLAIN_TOKEN",
    "PREFIX",
    "PREFIX_TOKEN",
    "LockServerProcess",
    "Reply",
    "acquire",
    "certificate",
    "connected",
    "everything",
    "is_answered_200",
    "lease_of",
    "lock_server",
    "metrics",
    "raw",
    "renews",
    "until",
]

ADMIN_TOKEN = "admin-token-for-tests-0001"
PLAIN_TOKEN = "plain-token-for-tests-0002"
PREFIX_TOKEN = "prefix-token-for-tests-0003"
PREFIX = "team/"
OWNER = {"owner_id": "w1", "ttl_ms": 60_000}

TOKEN_FILE = f"""
[[token]]
name = "root"
token = "{ADMIN_TOKEN}"
admin = true

[[token]]
name = "worker"
token = "{PLAIN_TOKEN}"

[[token]]
name = "team"
token = "{PREFIX_TOKEN}"
prefix = "{PREFIX}"
"""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class LockServerProcess:
    """A running server. `token`, `prefix_token` and `admin_token` are None on a server without tokens."""

    def __init__(self, program: Program, url: str, *, tokens: bool) -> None:
        self.program = program
        self.url = url
        self.host, _, port = url.partition("://")[2].rpartition(":")
        self.port = int(port)
        self.token = PLAIN_TOKEN if tokens else None
        self.prefix_token = PREFIX_TOKEN if tokens else None
        self.admin_token = ADMIN_TOKEN if tokens else None

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request on a connection of its own. `body` is sent as JSON, or as it is if it is bytes."""
        given: dict[str, str] = {} if body is None else {"Content-Type": "application/json"}
        token = token if token is not None else self.token
        if token:
            given["Authorization"] = f"Bearer {token}"
        given |= headers or {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            shown = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, shown, answer.read())

    def reload(self, times: int = 1) -> None:
        """Asks it to read its files again, and waits until it has, so many times since its start."""
        self.program.signal(signal.SIGHUP)
        self.program.until("reloaded", times=times)

    def over_tls(self, cert: Path) -> ssl.SSLSocket:
        """A connection that trusts this certificate alone."""
        connection = socket.create_connection((self.host, self.port), timeout=PATIENCE_S)
        return ssl.create_default_context(cafile=str(cert)).wrap_socket(connection, server_hostname="127.0.0.1")

    def stop(self) -> int:
        """Ends it gracefully; gives its exit code."""
        self.program.signal(signal.SIGTERM)
        return self.program.end()


@contextlib.contextmanager
def lock_server(
    folder: Path, *options: str, store: str | None = None, port: int = 0, tokens: bool = False, code: str = ""
) -> Iterator[LockServerProcess]:
    """Starts a server whose store is a new SQLite file in `folder`, unless `store` says otherwise; kills it at the end.

    `code` runs in its process before it starts. A second server with the same `folder` and without `store` finds the
    first one's file: that is a restart.
    """
    arguments = ["serve", "--port", str(port), "--store", store or f"sqlite:///{folder}/locks.db", *options]
    if tokens:
        token_file = folder / "tokens.toml"
        token_file.write_text(TOKEN_FILE)
        token_file.chmod(0o600)
        arguments += ["--token-file", str(token_file)]
    with running(*arguments, code=code) as program:
        program.until("listening on ", "out")
        program.until("\n", "out")
        found = re.search(r"listening on (\S+)", program.out)
        assert found is not None
        yield LockServerProcess(program, found[1], tokens=tokens)


# --- What tests ask it again and again


def acquire(server: LockServerProcess, lock: str, owner: str = "w1", ttl_ms: int = 60_000, **more: Any) -> Reply:
    return server.ask("POST", f"/v1/locks/{lock}/acquire", {"owner_id": owner, "ttl_ms": ttl_ms, **more})


def lease_of(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply
    return {key: reply.json()[key] for key in ("owner_id", "lease_id", "fencing_token")}


def metrics(server: LockServerProcess) -> dict[str, float]:
    text = server.ask("GET", "/metrics").body.decode()
    return {name: float(value) for name, value in re.findall(r"^([a-z_]+(?:\{.*?\})?) (\S+)$", text, re.MULTILINE)}


def until(what: Callable[[], bool]) -> None:
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


def renews(server: LockServerProcess, lock: str, lease: dict[str, Any]) -> bool:
    return server.ask("POST", f"/v1/locks/{lock}/renew", {**lease, "extend_by_ms": 1000}).status == 200


def postgres_url(dsn: str) -> str:
    """A `--store` on this database, from a DSN of key words."""
    parts = {key: quote(str(value), safe="") for key, value in conninfo_to_dict(dsn).items()}
    return f"postgresql://{parts['user']}:{parts['password']}@{parts['host']}:{parts['port']}/{parts['dbname']}"


def is_answered_200(connection: socket.socket, path: str, *lines: str) -> bool:
    connection.sendall("\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode())
    return connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """One for this machine, signed by an authority of its own, and its key. The file trusts itself: it holds both."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
    made.private_key_pem.write_to_path(key)
    for part in (*made.cert_chain_pems, authority.cert_pem):
        part.write_to_path(cert, append=True)
    return cert, key
