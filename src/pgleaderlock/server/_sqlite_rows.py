"""What a row of the SQLite store means: whose lock it is, until when, in this run of the server or from an earlier one.

Imports the store's protocol. Must never read a file or a clock.
"""

from typing import Any

from pgleaderlock.server.store import LockView

__all__ = ["MS", "Row", "Run", "view"]

MS = 1_000_000

# A row as sqlite_find gives it:
# owner_id, lease_id, fencing_token, ttl_ms, run, deadline_ns, lease_expiry_ns, version, idempotency_key
Row = tuple[Any, ...]


class Run:
    """One opening of the file: its number and when it began, on the boot-time clock and for people."""

    __slots__ = ("number", "start_ns", "start_wall_ns")

    def __init__(self, number: int, start_ns: int, start_wall_ns: int) -> None:
        self.number = number
        self.start_ns = start_ns
        self.start_wall_ns = start_wall_ns

    def deadline_ns(self, row: Row) -> int:
        """When a held row's lease ends. One of an earlier run counts for its full duration from the start of this."""
        deadline_ns: int = row[5] if row[4] == self.number else self.start_ns + row[3] * MS
        return deadline_ns

    def expiry_ms(self, row: Row) -> int:
        """The same for people, as Unix time."""
        expiry_ns: int = row[6] if row[4] == self.number else self.start_wall_ns + row[3] * MS
        return expiry_ns // MS


def view(run: Run, lock_name: str, row: Row | None, token: tuple[int, int] | None, now_ns: int) -> LockView:
    """A lock as its row, or what is left of it, tells at this moment."""
    if row is None:
        last_token, version = token or (0, 0)
        return LockView(lock_name, False, None, None, last_token, None, version)
    if row[0] is None or run.deadline_ns(row) <= now_ns:
        return LockView(lock_name, False, None, None, row[2], None, row[7])
    return LockView(lock_name, True, row[0], row[1], row[2], run.expiry_ms(row), row[7])
