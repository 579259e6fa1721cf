"""The commits of a server in their order, as its write-ahead log has them, and what fenced writes look like in it.

A logical replication slot gives whole transactions in the order of their commit records. No clock and no snapshot of
anybody's comes into it. The server needs `wal_level=logical`; the plugin is the one that comes with PostgreSQL.
"""

import re

import psycopg

__all__ = ["WRITES_TABLE", "CommitOrder"]

WRITES_TABLE = "CREATE TABLE public.writes (role text NOT NULL, epoch bigint NOT NULL)"

_SLOT = "commit_order"
_CREATE = "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')"
_READ = """
SELECT lsn - '0/0'::pg_lsn, data FROM pg_logical_slot_get_changes(%s, NULL, NULL, 'skip-empty-xacts', '1')
WHERE data ^@ 'COMMIT' OR data ^@ 'table pgleaderlock.leaders:' OR data ^@ 'table public.writes:'
"""
_ROLE = re.compile(r" role\[text\]:'([^']*)'")
_EPOCH = re.compile(r" epoch\[bigint\]:(\d+)")
_SESSION = re.compile(r" session_id\[bigint\]:(\w+)")


class CommitOrder:
    """Reads on where it stopped, and judges: in the order of commits, each write is of the epoch that is current."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._read_to = 0
        self._current: dict[str, tuple[int, str]] = {}
        self.violations: list[str] = []
        self.writes = 0
        self.changes = 0
        """How often an epoch of a role began."""

    async def begin(self) -> None:
        """What is committed from now on counts."""
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as conn:
            await conn.execute(_CREATE, (_SLOT,))

    async def read(self) -> None:
        """Judge what was committed since the last time."""
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as conn:
            rows = await (await conn.execute(_READ, (_SLOT,))).fetchall()
        transaction: list[str] = []
        for lsn, data in rows:
            if not data.startswith("COMMIT"):
                transaction.append(data)
                continue
            # A slot that was not saved before a crash gives again what was read since.
            if lsn > self._read_to:
                self._read_to = lsn
                for change in transaction:
                    self._judge(change)
            transaction = []

    def _judge(self, change: str) -> None:
        role, epoch = _found(_ROLE, change), int(_found(_EPOCH, change))
        current, session = self._current.get(role, (0, "null"))
        if change.startswith("table public.writes:"):
            self.writes += 1
            if epoch != current:
                self.violations.append(f"a write of epoch {epoch} of {role} when {current} was current")
        elif epoch > current:
            self.changes += 1
            self._current[role] = (epoch, _found(_SESSION, change))
        elif (epoch, _found(_SESSION, change)) != (current, session):
            self.violations.append(f"epoch {current} of {role} was followed by {epoch}: {change}")


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    assert match is not None, text
    return match[1]
