"""A ledger that was written by hand, and a real dashboard in front of it: `pgleaderlock dashboard` as a process.

    with ledger() as book:                               # a server of its own: other tests count their sessions
        a = book.session("a"); book.led("role", a)
        with dashboard(book.reader) as server: server.ask("GET", "/v1/leaders")

Imports psycopg, the standard library and its neighbours. `reader` is a role that may SELECT from the ledger's tables,
and nothing else.
"""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock.migrate import sql
from support.lockserver import TOKEN_FILE, LockServerProcess, Reply
from support.program import PATIENCE_S, running
from support.servers import throwaway

__all__ = ["SPACE", "UGLY", "Book", "Stream", "dashboard", "json_of", "ledger", "opened", "token_file"]

SPACE = "pgleaderlock"
READER = "dashboard_reader"
PASSWORD = "only-for-looking"
UGLY = [
    "<script>alert(1)</script>",
    "\"quotes\" and 'quotes' and \\ and `",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd",
    "x" * 200,
    "a/b?c=d&e#f%20%",
    "two\nlines\u2028and\u0007more",
    "\U0001f5f3 </script><!--",
]

_SESSION = """
INSERT INTO pgleaderlock.sessions (
    namespace, instance, node_id, host, os_pid, holder_identity, backend_pid, backend_start, database_role, gate_s,
    lease_s, candidate, library_version, started_at, last_heartbeat, ended_at)
VALUES (%(space)s, coalesce(%(instance)s::uuid, gen_random_uuid()), %(node)s, 'host of ' || %(node)s, 1, 'x', 1, now(),
    'x', 3600, 7200, %(candidate)s, '1.2', now() - make_interval(secs => %(up_s)s),
    now() - make_interval(secs => %(age_s)s), CASE WHEN %(ended)s THEN now() END)
RETURNING session_id
"""


class Book:
    """The ledger's owner, who writes what no function would. A session's gate is 3600 s and its lease 7200 s."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.reader = make_conninfo(dsn, user=READER, password=PASSWORD)
        self.conn = psycopg.connect(dsn, autocommit=True)

    def session(
        self,
        node: str,
        *,
        age_s: float = 0,
        up_s: float = 100_000,
        candidate: bool = True,
        ended: bool = False,
        instance: str | None = None,
    ) -> int:
        values = {"space": SPACE, "node": node, "age_s": age_s, "up_s": up_s, "candidate": candidate, "ended": ended}
        row = self.conn.execute(_SESSION, {**values, "instance": instance}).fetchone()
        assert row is not None
        return int(row[0])

    def led(self, role: str, session: int | None, *, epoch: int = 2, ended: bool = False, wait_s: float = 1) -> None:
        self.conn.execute(
            "INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2, epoch, session_id, ended, acquired_at,"
            " wait_t) VALUES (%s, %s, hashtext(%s), hashtext(%s || 'x'), %s, %s, %s, now(), %s)",
            (SPACE, role, role, role, epoch, session, ended, wait_s),
        )

    def term(self, role: str, epoch: int, session: int, node: str, *span: str) -> None:
        """`span`: its beginning, and perhaps its end and why. Moments, or times before now such as `-5 min`."""
        began, end, reason = (*span, None, None) if len(span) == 1 else span

        def moment(text: str) -> str:
            return f"now() - interval '{text[1:]}'" if text.startswith("-") else f"timestamptz '{text}'"

        self.conn.execute(
            "INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity, began_at,"
            f" ended_at, reason) VALUES (%s, %s, %s, %s, %s, 'x', {moment(began)}, {moment(end) if end else 'NULL'},"
            " %s)",
            (SPACE, role, epoch, session, node, reason),
        )

    def slot(self, name: str, slot: str, node: str, *, outcome: str | None = None, began_s: float = 60) -> None:
        self.conn.execute(
            "INSERT INTO pgleaderlock.slots (namespace, name, slot, epoch, holder_identity, claimed_at, ended_at,"
            " outcome) VALUES (%s, %s, %s, 2, %s, now() - make_interval(secs => %s), CASE WHEN %s THEN now() END, %s)",
            (f"{SPACE}.once", name, slot, node, began_s, outcome is not None, outcome),
        )

    def event(self, kind: str, role: str | None = None, node: str | None = None, **more: Any) -> int:
        row = self.conn.execute(
            "INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, epoch, detail)"
            " VALUES (%s, %s, %s, %s, %s, %s) RETURNING event_id",
            (kind, more.get("space", SPACE), role, node, more.get("epoch"), more.get("detail")),
        ).fetchone()
        assert row is not None
        return int(row[0])

    def notify(self) -> None:
        self.conn.execute("SELECT pg_notify('pgleaderlock', 'acquired')")

    @property
    def url(self) -> str:
        given = conninfo_to_dict(self.dsn)
        where = f"{given['host']}:{given['port']}/{given['dbname']}?sslmode=disable"
        return f"postgresql://{given['user']}:{given['password']}@{where}"


@contextlib.contextmanager
def ledger() -> Iterator[Book]:
    with throwaway() as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(sql().encode())
            conn.execute(f"CREATE ROLE {READER} LOGIN PASSWORD '{PASSWORD}'")
            conn.execute(f"GRANT USAGE ON SCHEMA pgleaderlock TO {READER}")
            for table in ("schema_version", "sessions", "leaders", "terms", "events", "requests", "slots"):
                conn.execute(f"GRANT SELECT ON pgleaderlock.{table} TO {READER}")
        book = Book(server.dsn)
        with contextlib.closing(book.conn):
            yield book


def token_file(folder: Path) -> Path:
    path = folder / "tokens.toml"
    path.write_text(TOKEN_FILE)
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def dashboard(dsn: str, *options: str, tokens: Path | None = None, code: str = "") -> Iterator[LockServerProcess]:
    """Starts one on a free port; kills it at the end."""
    more = [] if tokens is None else ["--token-file", str(tokens)]
    with running("dashboard", "--dsn", dsn, "--port", "0", *more, *options, code=code) as program:
        program.until("listening on ", "out")
        program.until("\n", "out")
        found = re.search(r"listening on (\S+)", program.out)
        assert found is not None
        yield LockServerProcess(program, found[1], tokens=tokens is not None)


def json_of(reply: Reply) -> Any:
    assert reply.status == 200, reply
    return reply.json()


class Stream:
    """A live stream, read message by message."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def until(self, *kinds: str) -> tuple[dict[str, str], Any]:
        """The next message of one of these kinds: its fields, and its data."""
        while True:
            while b"\n\n" not in self._rest:
                said = self.connection.recv(65536)
                assert said, f"the stream has ended: {self._rest!r}"
                self._rest += said
            text, _, self._rest = self._rest.partition(b"\n\n")
            lines = [line for line in text.decode().split("\n") if re.match(r"(id|event|data): ", line)]
            fields = dict(line.split(": ", 1) for line in lines)
            if fields.get("event") in kinds:
                return fields, json.loads(fields["data"])


@contextlib.contextmanager
def opened(server: LockServerProcess, query: str = "", **headers: str) -> Iterator[Stream]:
    """Opens a stream in HTTP/1.0, which has no chunks in it."""
    shown = {
        "Host": f"localhost:{server.port}",
        "Accept": "text/event-stream",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in shown.items())
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"GET /v1/events{query} HTTP/1.0\r\n{head}\r\n".encode())
        yield Stream(connection)
