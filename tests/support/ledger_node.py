"""A node of an election played by hand: one connection, and the functions of the ledger called one at a time.

It has no gate, no timers and no loop: a test decides when it beats, falls silent or dies. Imports psycopg, `keys` and
the standard library.
"""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pgleaderlock.keys import KeyPair, key_pair

__all__ = ["LedgerNode", "ledger_node"]


class LedgerNode:
    """One recorded session."""

    def __init__(self, dsn: str, node_id: str, *, gate_s: float, lease_s: float, namespace: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True, row_factory=dict_row, application_name=f"by hand: {node_id}")
        self.node_id, self.namespace, self.instance = node_id, namespace, uuid.uuid4()
        row = self.ask(
            "SELECT * FROM pgleaderlock.open_session(%s, %s, %s, 'host', 1, %s, %s, %s, true, 'test',"
            " (SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid())))",
            namespace, self.instance, node_id, f"{node_id}-by-hand", gate_s, lease_s,
        )  # fmt: skip
        self.session_id: int = row["session_id"]

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
        return bool(
            self.ask(
                "SELECT * FROM pgleaderlock.end_term(%s, %s, %s, %s, 'released')",
                self.session_id,
                [role],
                [epoch],
                [clean],
            )
        )

    def _keys(self, role: str, keys: KeyPair | None) -> KeyPair:
        return key_pair(role, self.namespace) if keys is None else keys


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
