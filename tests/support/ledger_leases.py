"""Leases that are played by hand, beside the sessions of a `World`, and the advisory locks that they have.

Imports `keys`, `ledger_node`, `ledger_world` and the standard library.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from pgleaderlock.keys import KeyPair
from support.ledger_node import LeasedNode, LedgerNode, leased_node
from support.ledger_world import LEASE_S, LONG_LEASE_S, Changes, World

__all__ = ["Leases", "exclusive", "lock", "locks", "take"]


class Leases(World):
    """Beside the sessions, `lea` leads l and m, `lou` leads n, and `lex` an l of the other namespace."""

    def __init__(self, dsn: str, nodes: contextlib.ExitStack) -> None:
        super().__init__(dsn, nodes)
        self.lou = self.lease("lou", lease_s=LONG_LEASE_S)
        self.lex = self.lease("lea", namespace=self.elsewhere)
        self.lea = self.lease("lea")
        for lease, roles in ((self.lou, "n"), (self.lex, "l"), (self.lea, "lm")):
            for role in roles:
                assert take(lease, role)["outcome"] == "won"

    def lease(self, node_id: str, *, lease_s: float = LEASE_S, namespace: str | None = None) -> LeasedNode:
        return self.nodes.enter_context(
            leased_node(self.dsn, node_id, lease_s=lease_s, namespace=namespace or self.namespace)
        )

    def session(self, node: LedgerNode) -> dict[str, Any]:
        return self.rows()["sessions", node.session_id]

    def sleep(self, *leases: LeasedNode) -> None:
        """They were heard a day ago."""
        for lease in leases:
            self.write(
                "UPDATE pgleaderlock.sessions SET last_heartbeat = last_heartbeat - interval '1 day'"
                " WHERE session_id = %s",
                lease.session_id,
            )

    def end(self, lease: LeasedNode) -> None:
        self.write("UPDATE pgleaderlock.sessions SET ended_at = '2020-01-01' WHERE session_id = %s", lease.session_id)

    def changed_by_others(self, act: Callable[[], object], own: LedgerNode) -> Changes:
        """What it changed but for the caller's own row."""
        changes = self.changed(act)
        changes.pop(("sessions", own.session_id))
        return changes


def take(lease: LeasedNode, role: str, keys: KeyPair | None = None) -> dict[str, Any]:
    """One message that takes a role."""
    with lease.message():
        return lease.take(role, keys)


def locks(node: LedgerNode) -> set[tuple[int, int, str]]:
    """The advisory locks of its backend."""
    rows = node.conn.execute(
        "SELECT classid::bigint AS key1, objid::bigint AS key2, mode FROM pg_locks"
        " WHERE locktype = 'advisory' AND objsubid = 2 AND pid = pg_backend_pid()"
    ).fetchall()
    signed = [tuple(value - 2**32 if value >= 2**31 else value for value in (r["key1"], r["key2"])) for r in rows]
    return {(pair[0], pair[1], row["mode"]) for pair, row in zip(signed, rows, strict=True)}


def lock(lease: LedgerNode, roles: dict[str, KeyPair], session_id: int | None = None) -> None:
    """Ask for the locks of roles, in a message that has begun."""
    pairs = list(roles.values())
    own = lease.session_id if session_id is None else session_id
    lease.ask(
        "SELECT pgleaderlock.lease_lock(%s, %s, %s, %s)",
        own,
        list(roles),
        [pair[0] for pair in pairs],
        [pair[1] for pair in pairs],
    )


def exclusive(*pairs: KeyPair) -> set[tuple[int, int, str]]:
    return {(*pair, "ExclusiveLock") for pair in pairs}
