"""A ledger with nodes played by hand that lead, and with bystanders: what a call changes, of any row of any table.

Imports psycopg, `keys`, `ledger_node`, `elections` and the standard library.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg.rows import dict_row

from support.elections import admin, until
from support.ledger_node import LedgerNode, ledger_node

__all__ = ["LEASE_S", "LONG_LEASE_S", "Changes", "World"]

KEYS = {
    "sessions": ("session_id",),
    "leaders": ("namespace", "role"),
    "terms": ("namespace", "role", "epoch"),
    "requests": ("request_id",),
    "events": ("event_id",),
    "histories": ("system_identifier", "timeline"),
    "slots": ("namespace", "name", "slot"),
}
LEASE_S, LONG_LEASE_S = 600.0, 900.0

Changes = dict[tuple[Any, ...], dict[str, Any]]


class World:
    """A ledger with nodes that lead: `one` leads r and s, `two` leads t, and `stranger` an r of its own namespace.

    Each role has a term before that was released. `two` has the longer lease.
    """

    def __init__(self, dsn: str, nodes: contextlib.ExitStack) -> None:
        self.dsn = dsn
        self.nodes = nodes
        unique = uuid.uuid4().hex[:12]
        self.namespace, self.elsewhere = f"here-{unique}", f"there-{unique}"
        self._look = nodes.enter_context(admin(dsn))
        for table in KEYS:
            # Of the histories, all but the first: the ledger was made in that one.
            self.write(
                f"DELETE FROM pgleaderlock.{table} x WHERE to_jsonb(x) ->> 'seen_at' IS DISTINCT FROM '-infinity'"
            )
        # The one with another lease comes first: a mistake in a join finds it before the right one.
        self.two = self.node("two", lease_s=LONG_LEASE_S)
        self.stranger = self.node("one", namespace=self.elsewhere)
        self.one = self.node("one")
        self.three = self.one
        """For tests that need one more."""
        for node, roles in ((self.two, "t"), (self.stranger, "r"), (self.one, "rs")):
            for role in roles:
                node.end_term(role, node.lead(role), clean=True)
                node.bump(role)

    def node(self, node_id: str, *, lease_s: float = LEASE_S, namespace: str | None = None) -> LedgerNode:
        return self.nodes.enter_context(
            ledger_node(self.dsn, node_id, gate_s=100.0, lease_s=lease_s, namespace=namespace or self.namespace)
        )

    def hand(self, dsn: str | None = None) -> psycopg.Connection[dict[str, Any]]:
        """One more connection. No statement on it waits for long."""
        conn = self.nodes.enter_context(psycopg.connect(dsn or self.dsn, autocommit=True, row_factory=dict_row))
        conn.execute("SET statement_timeout = '5s'")
        return conn

    @contextlib.contextmanager
    def held(self, table: str, *key: object) -> Iterator[None]:
        """Somebody holds this row, and does not end. Who waits for it fails, soon."""
        for node in (self.one, self.two, self.stranger):
            if not node.conn.closed:
                node.conn.execute("SET statement_timeout = '2s'")
        condition = " AND ".join(f"{column} = %s" for column in KEYS[table])
        other = self.hand()
        with other.transaction():
            found = other.execute(f"SELECT 1 FROM pgleaderlock.{table} WHERE {condition} FOR UPDATE".encode(), key)
            assert len(found.fetchall()) == 1
            yield

    async def die(self, node: LedgerNode) -> None:
        """Its backend ends, and its record does not."""
        pid = node.conn.info.backend_pid
        node.conn.close()
        await until(lambda: not self.runs(pid), "its backend ends")

    def rows(self) -> Changes:
        found: Changes = {}
        for table, columns in KEYS.items():
            query = f"SELECT to_jsonb(x) AS row FROM pgleaderlock.{table} x"  # as JSON, for times like -infinity
            for row in [found["row"] for found in self._look.execute(query.encode()).fetchall()]:
                found[table, *(row[column] for column in columns)] = row
        return found

    def leader(self, role: str) -> dict[str, Any]:
        return self.rows()["leaders", self.namespace, role]

    def changed(self, act: Callable[[], object], *, beats: LedgerNode | None = None) -> Changes:
        """What it changed of each row, and the rows that are new, but for events.

        Of the session that `beats`, exactly one beat is expected, and left out.
        """
        before = self.rows()
        session = dict(before["sessions", beats.session_id]) if beats is not None else {}
        act()
        changes: Changes = {}
        for key, row in self.rows().items():
            old = before.pop(key, {})
            new = {column: value for column, value in row.items() if column not in old or old[column] != value}
            if new and key[0] != "events":
                changes[key] = new
        assert not before, "nothing is deleted"
        if beats is not None:
            beaten = changes.pop(("sessions", beats.session_id))
            assert beaten.pop("beat") == session["beat"] + 1
            assert beaten.pop("last_heartbeat") > session["last_heartbeat"]
            changes |= {("sessions", beats.session_id): beaten} if beaten else {}
        return changes

    def events(self, act: Callable[[], object]) -> list[dict[str, Any]]:
        """Those that it left, in order, without number and time."""
        before = self.rows()
        act()
        new = [row for key, row in self.rows().items() if key[0] == "events" and key not in before]
        hidden = ("event_id", "at")
        rows = sorted(new, key=lambda row: int(row["event_id"]))
        return [{name: value for name, value in row.items() if name not in hidden} for row in rows]

    def write(self, query: str, *params: object) -> None:
        self._look.execute(query.encode(), params)

    def waits(self, node: LedgerNode, *, for_: str = "%") -> bool:
        """Whether its statement waits for a lock: any, or one that pg_stat_activity calls so."""
        query = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock' AND wait_event LIKE %s"
        return bool(self._look.execute(query, (node.conn.info.backend_pid, for_)).fetchall())

    def runs(self, pid: int) -> bool:
        return bool(self._look.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchall())

    def notices(self, act: Callable[[], object]) -> list[str]:
        """What a listener hears of it."""
        listener = self.hand()
        listener.execute("LISTEN pgleaderlock")
        act()
        return [heard.payload for heard in listener.notifies(timeout=0.2, stop_after=1)]

    def ask_step_down(self, role: str, to: str | None = None, namespace: str | None = None) -> int:
        row = self._look.execute(
            "SELECT pgleaderlock.request_step_down(%s, %s, %s, 'pgleaderlock') AS request_id",
            (role, namespace or self.namespace, to),
        ).fetchone()
        assert row is not None
        return int(row["request_id"] or 0)

    def ask_node(self, kind: str, node_id: str) -> int:
        row = self._look.execute(
            f"SELECT pgleaderlock.request_{kind}(%s, %s, 'pgleaderlock') AS request_id".encode(),
            (node_id, self.namespace),
        ).fetchone()
        assert row is not None
        return int(row["request_id"] or 0)
