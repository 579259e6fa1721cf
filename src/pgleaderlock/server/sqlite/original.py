"""Reads the database of the Go LockServer, so that a store can take over its leases and the highest token of each lock.

Its tables are recognised by their columns: `lock_name`, `owner_id`, `lease_id`, `fencing_token`, `lease_expiry_ns` and
`version` of the locks, `lock_name` and `last_token` of the tokens. A row with other types is an error, because skipping
it could lose a token.

Must never change that database or its log, and never read it while its server runs.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw

from pgleaderlock.server.sqlite.file import sql
from pgleaderlock.server.sqlite.locks import MS
from pgleaderlock.server.store import Adopted, StoreError

__all__ = ["read_original"]

_LOCKS = ("lock_name", "owner_id", "lease_id", "fencing_token", "lease_expiry_ns", "version")
_TOKENS = ("lock_name", "last_token")
_NOT_WRITABLE = (apsw.IOError, apsw.ReadOnlyError, apsw.CantOpenError)
"""What SQLite raises, among other reasons, if file or folder cannot be written."""


def read_original(path: Path) -> list[Adopted]:
    """Every lock in the database. Raises `StoreError`, whose text says what to do."""
    if not path.is_file():
        raise StoreError(f"--import-go {path}: there is no such file")
    file = path.resolve()  # SQLite finds the log beside the file, not beside a link to it
    try:
        with contextlib.closing(apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
            # The log of a server that was killed must stay. One that this connection creates must not.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, Path(f"{file}-wal").exists())
            # In this mode a transaction excludes every other program: it fails while another one has the database open.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            try:
                return list(_locks(connection, path, time.time_ns()))
            finally:
                connection.execute("ROLLBACK")
    except (apsw.BusyError, apsw.LockedError) as error:
        raise StoreError(f"--import-go {path} is in use: stop the server that it belongs to") from error
    except apsw.Error as error:
        if isinstance(error, _NOT_WRITABLE) and not all(os.access(each, os.W_OK) for each in (file, file.parent)):
            raise StoreError(
                f"--import-go {path} cannot be read where this user may not write, because SQLite has to lock it: copy "
                "the file, and its -wal if there is one, to a folder that can be written"
            ) from error
        raise StoreError(f"--import-go {path} cannot be read: {error}") from error


def _locks(connection: apsw.Connection, path: Path, now_ns: int) -> Iterator[Adopted]:
    tokens = dict(_rows(connection, path, "tokens", _TOKENS))
    for name, owner_id, lease_id, token, expiry_ns, version in _rows(connection, path, "locks", _LOCKS):
        last = max(_checked(path, name, tokens.pop(name, 0)), _checked(path, name, token or 0))
        good = owner_id is not None and lease_id is not None and (expiry_ns or 0) > now_ns
        if good and last == token:
            left_ms = -((now_ns - expiry_ns) // MS)  # rounded up: no lease ends early
            yield Adopted(name, last, version or 0, str(owner_id), str(lease_id), left_ms)
        elif last > 0:
            yield Adopted(name, last, version or 0)
    for name, last in tokens.items():
        if _checked(path, name, last) > 0:  # nothing has to be kept of a lock that was never granted
            yield Adopted(name, last, 0)


def _rows(connection: apsw.Connection, path: Path, what: str, columns: tuple[str, ...]) -> Iterator[Any]:
    table = connection.execute(sql("original_table"), (json.dumps(columns),)).get
    if not isinstance(table, str):
        raise StoreError(f"--import-go {path} has no table of {what}: it is not the database of the Go LockServer")
    yield from connection.execute(sql(f"original_{what}").replace("TABLE_FOUND", '"' + table.replace('"', '""') + '"'))


def _checked(path: Path, name: object, token: object) -> int:
    if not isinstance(name, str) or not isinstance(token, int):
        raise StoreError(f"--import-go {path}: the lock {name!r} has the token {token!r}: nothing was taken over")
    return token
