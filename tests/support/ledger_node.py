"""A node of an election played by hand: one connection, and the functions of the ledger called one at a time.

It has no gate, no timers and no loop: a test decides when it beats, falls silent or dies. Imports psycopg, `keys` and
the standard library.
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psycopg
from psycopg.rows import dict_row

from pgleaderlock.keys import KeyPair, key_pair

__all__ = ["LeasedNode", "LedgerNode", "eventually", "leased_node", "ledger_node"]

# A bound against hanging, never a measure.
WAIT_S = 20.0
POLL_S = 0.01

T = TypeVar("T")


class LedgerNode:
    """One recorded session."""

    def __init__(self, dsn: str, node_id: str, *, gate_s: float, lease_s: float, namespace: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True, row_factory=dict_row, application_name=f"by hand: {node_id}")
        self.node_id, self.namespace, self.instance = node_id, namespace, uuid.uuid4()
        self._timing = gate_s, lease_s
        self.session_id = 0
        self.open()

    def open(self) -> None:
        """Record a session of this process; the one before is over."""
        row = self.ask(
            "SELECT * FROM pgleaderlock.open_session(%s, %s, %s, 'host', 1, %s, %s, %s, true, 'test',"
            " (SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid())))",
            self.namespace, self.instance, self.node_id, f"{self.node_id}-by-hand", *self._timing,
        )  # fmt: skip
        self.session_id = int(row["session_id"])

    def reopen_if_ended(self) -> None:
        """Record a new session if this one was ended by somebody."""
        if self.ask("SELECT ended_at FROM pgleaderlock.sessions WHERE session_id = %s", self.session_id)["ended_at"]:
            self.open()

    def ask(self, query: str, *params: object) -> dict[str, Any]:
        """The first row of a query."""
        row = self.conn.execute(query.encode(), params).fetchone()
        return {} if row is None else dict(row)

    def lock(self, role: str, keys: KeyPair | None = None) -> bool:
        """Try the role's lock."""
        return bool(self.ask("SELECT pg_try_advisory_lock(%s, %s) AS held", *self._keys(role, keys))["held"])

    def wait_for_lock(self, role: str) -> None:
        """Queue up for the role's lock at the server."""
        self.ask("SELECT pg_advisory_lock(%s, %s)", *self._keys(role, None))

    def unlock(self, role: str, keys: KeyPair | None = None) -> bool:
        return bool(self.ask("SELECT pg_advisory_unlock(%s, %s) AS freed", *self._keys(role, keys))["freed"])

    def bump(self, role: str, keys: KeyPair | None = None, wait_ms: int = 0) -> dict[str, Any]:
        """Begin a term, if the lock is held."""
        key1, key2 = self._keys(role, keys)
        return self.ask(
            "SELECT * FROM pgleaderlock.bump(%s, %s, %s, %s, %s, 'pgleaderlock')",
            self.session_id, [role], [key1], [key2], wait_ms,
        )  # fmt: skip

    def lead(self, role: str, keys: KeyPair | None = None) -> int:
        """Take the lock and begin a term; answers its epoch."""
        assert self.lock(role, keys), f"{role} is held by somebody else"
        won = self.bump(role, keys)
        assert won["outcome"] == "won", won
        return int(won["epoch"])

    def tick(self, *settled: str) -> dict[str, Any]:
        """A heartbeat; `settled` are the roles whose predecessor has been waited out."""
        return self.ask("SELECT * FROM pgleaderlock.tick(%s, %s, NULL)", self.session_id, list(settled))

    def end_term(self, role: str, epoch: int, *, clean: bool) -> bool:
        """End a term; False if it was not this session's."""
        query = "SELECT * FROM pgleaderlock.end_term(%s, %s, %s, %s, 'released')"
        return bool(self.ask(query, self.session_id, [role], [epoch], [clean]))

    def _keys(self, role: str, keys: KeyPair | None) -> KeyPair:
        return key_pair(role, self.namespace) if keys is None else keys


class LeasedNode(LedgerNode):
    """One lease. What it calls is called in a message."""

    def open(self, previous: int | None = None) -> None:
        """Record a lease of this process; the `previous` one is over."""
        self.key, self.number = uuid.uuid4(), 0
        row = self.ask(
            "SELECT * FROM pgleaderlock.lease_open(%s, %s, %s, %s, %s, 'host', 1, %s, %s, %s, true, 'test', false)",
            self.namespace, self.instance, self.key, previous, self.node_id, f"{self.node_id}-by-hand", *self._timing,
        )  # fmt: skip
        self.session_id = int(row["session_id"])

    @contextlib.contextmanager
    def message(self) -> Iterator[None]:
        """One message, under the next number."""
        with self.conn.transaction():
            self.begin()
            yield
            self.done()

    def begin(self) -> None:
        self.number += 1
        self.ask("SELECT pgleaderlock.lease_begin(%s, %s, %s)", self.session_id, self.key, self.number)

    def done(self) -> None:
        self.ask("SELECT pgleaderlock.lease_done(%s, %s)", self.session_id, self.key)

    def take(self, role: str, keys: KeyPair | None = None) -> dict[str, Any]:
        """Get the lock until the commit, and begin a term."""
        key1, key2 = self._keys(role, keys)
        self.ask("SELECT pgleaderlock.lease_lock(%s, %s, %s, %s)", self.session_id, [role], [key1], [key2])
        return self.bump(role, keys)


@contextlib.contextmanager
def ledger_node(
    dsn: str,
    node_id: str = "by-hand",
    *,
    gate_s: float = 500.0,
    lease_s: float = 600.0,
    namespace: str = "pgleaderlock",
) -> Iterator[LedgerNode]:
    node = LedgerNode(dsn, node_id, gate_s=gate_s, lease_s=lease_s, namespace=namespace)
    with contextlib.closing(node.conn):
        yield node


@contextlib.contextmanager
def leased_node(
    dsn: str,
    node_id: str = "by-hand",
    *,
    gate_s: float = 500.0,
    lease_s: float = 600.0,
    namespace: str = "pgleaderlock",
) -> Iterator[LeasedNode]:
    node = LeasedNode(dsn, node_id, gate_s=gate_s, lease_s=lease_s, namespace=namespace)
    with contextlib.closing(node.conn):
        yield node


def eventually(condition: Callable[[], T]) -> T:
    """The first true answer: for what the server notices by itself, and nobody announces."""
    deadline = time.monotonic() + WAIT_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"did not happen in {WAIT_S:g} s"
        time.sleep(POLL_S)
    return answer
