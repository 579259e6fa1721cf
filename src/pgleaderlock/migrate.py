"""Creates and upgrades the ledger. Any number of nodes may do so at the same time; each version is applied once.

Each migration is one file and one transaction, under an advisory lock: a second node finds it done. No migration is
ever half applied, and a newer, unknown ledger is not changed. The library works with a ledger one version older or
newer than its own, so that nodes can be upgraded one after the other.

Must never drop or overwrite what it has not created.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import psycopg

from pgleaderlock._pg.connect import connect, resolved
from pgleaderlock._pg.conninfo import Dsn, check_dsn, plain_params, scrub
from pgleaderlock._pg.explain import connect_error, safe_cause, standby_error, version_error
from pgleaderlock._pg.reader import execute
from pgleaderlock._pg.session import VERSION_MIN
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConfigurationError, ConnectionError, SchemaError
from pgleaderlock.keys import key_pair, key_params

__all__ = ["LEDGER_VERSION", "advance_epoch", "check_schema", "migrate", "pending", "sql"]

LEDGER_VERSION = 5
# Longer than the wait for another node's migration: 60 s, in migrate_lock.
TIMEOUT_S = 120.0
NAME_BYTES_MAX = 63

# A namespace that users have no reason to choose.
_LOCK = key_pair("migrate", "pgleaderlock ledger")
_CREATE_ROLE = "create the role first (CREATE ROLE … LOGIN)"
_RUN_MIGRATE = "run `pgleaderlock migrate` on this database"


async def migrate(
    dsn: Dsn,
    *,
    grant_to: str | None = None,
    grant_lock_server_to: str | None = None,
    grant_reader_to: str | None = None,
) -> list[int]:
    """Bring the ledger to this library's version; returns the versions that were applied now.

    `grant_to` names a role that gets the privileges of an election's node, `grant_lock_server_to` one that gets those
    of a lock server, `grant_reader_to` one that may read the ledger, as a dashboard does. Raises `SchemaError`, and
    changes nothing, if this role may not do that, or if the ledger is too new for this library.
    """
    grants = _all_grants(grant_to, grant_lock_server_to, grant_reader_to)
    applied: list[int] = []
    async with _connected(dsn) as conn:
        todo = _todo(await _looked(conn))
        roles = [role for role in (grant_to, grant_lock_server_to, grant_reader_to) if role is not None]
        for missing in await execute(conn, "migrate_no_role", {"roles": roles}):
            raise SchemaError(f'role "{missing["role"]}" does not exist: {_CREATE_ROLE}')
        for version in todo:
            async with conn.transaction():
                await _row(conn, "migrate_lock", key_params(_LOCK))
                # Read again: another node may have applied it while we waited for the lock.
                if version in _todo(await _looked(conn)):
                    await _apply(conn, version)
                    applied.append(version)
        if grants:
            async with conn.transaction():
                await _row(conn, "migrate_lock", key_params(_LOCK))
                await _grant(conn, ";\n".join(grants))
    return applied


async def pending(dsn: Dsn) -> list[int]:
    """The versions that `migrate` would apply now."""
    async with _connected(dsn) as conn:
        return _todo(await _looked(conn), only_look=True)


async def advance_epoch(dsn: Dsn, role: str, *, namespace: str, channel: str) -> tuple[int, int]:
    """Move a role's epoch far ahead, after a restore or a lost commit; returns the old and the new one.

    Waits for fenced transactions to end, up to 10 s. For operators: a run-time role may not do this.
    """
    key_pair(role, namespace)  # only to check the name
    async with _connected(dsn) as conn:
        seen = await _looked(conn)
        check_schema(seen["version"])
        async with conn.transaction():
            await _row(conn, "epoch_patience", {})
            row = await _row(conn, "epoch_advance", {"role": role, "namespace": namespace, "channel": channel})
        with contextlib.suppress(psycopg.Error):  # only a hint: without it, the nodes notice at their next tick
            await _row(conn, "ledger_hint", {"channel": channel, "hint": "advanced"})
    return row["old_epoch"], row["new_epoch"]


def check_schema(version: int | None) -> None:
    """Raise `SchemaError` unless this library works with a ledger of this version; None means that there is none."""
    if version is None:
        raise SchemaError(f"there is no ledger in this database: {_RUN_MIGRATE}")
    if version < LEDGER_VERSION - 1:
        raise SchemaError(f"the ledger's version is {version}, and this library needs {LEDGER_VERSION}: {_RUN_MIGRATE}")
    if version > LEDGER_VERSION + 1:
        raise SchemaError(
            f"the ledger's version is {version}, and this library serves {LEDGER_VERSION + 1} at most: "
            "upgrade the library on this node"
        )


def sql(
    *, grant_to: str | None = None, grant_lock_server_to: str | None = None, grant_reader_to: str | None = None
) -> str:
    """The SQL that `migrate` would run on an empty database, for a DBA to run."""
    lock = statement("migrate_lock").decode() % key_params(_LOCK)
    parts = []
    for version, text in sorted(_migrations().items()):
        parts.append(
            f"-- pgleaderlock: the ledger, version {version}.\n\nBEGIN;\n{lock};\n\n{text.strip()}\n\nCOMMIT;\n"
        )
    parts.extend(
        f"-- pgleaderlock: what a role needs at run time.\n\nBEGIN;\n{grants};\nCOMMIT;\n"
        for grants in _all_grants(grant_to, grant_lock_server_to, grant_reader_to)
    )
    return "\n".join(parts)


# --- What there is, and what is to be done


@cache
def _migrations() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in files("pgleaderlock._pg").joinpath("sql", "migrations").iterdir():
        if entry.name.endswith(".sql"):
            version = int(entry.name.partition("_")[0])
            if version in found:
                raise ValueError(f"two migrations have the number {version}")
            found[version] = entry.read_text(encoding="utf-8")
    return found


async def _looked(conn: psycopg.AsyncConnection[Any]) -> dict[str, Any]:
    seen = await _row(conn, "migrate_look", {})
    seen["version"] = (await _row(conn, "ledger_version", {}))["version"] if seen["has_ledger"] else None
    return seen


def _todo(seen: Mapping[str, Any], *, only_look: bool = False) -> list[int]:
    """The versions to apply. Raises a `SchemaError` that says why they cannot be applied."""
    version = seen["version"] or 0
    if version > LEDGER_VERSION:
        check_schema(version)
        return []  # one version newer: another node was upgraded first, and this one still works with it
    todo = [number for number in sorted(_migrations()) if number > version]
    if not todo or only_look:
        return todo
    if seen["in_recovery"]:
        raise standby_error()
    if seen["owner"] is None and not seen["may_create"]:
        raise SchemaError(
            f"role {seen['role']!r} may not create a schema in database {seen['database']!r}: "
            "run `pgleaderlock migrate` as the database's owner, or give `pgleaderlock migrate --print` to your DBA"
        )
    # The owner of the schema can replace its contents, so another role must not own it.
    if seen["owner"] is not None and not seen["is_owner"]:
        raise SchemaError(
            f"the schema pgleaderlock belongs to role {seen['owner']}, and this is {seen['role']!r}: "
            f"run `pgleaderlock migrate` as {seen['owner']}"
        )
    return todo


async def _apply(conn: psycopg.AsyncConnection[Any], version: int) -> None:
    try:
        await conn.execute(_migrations()[version].encode())
    except psycopg.Error as error:
        if error.sqlstate is None:  # the connection was lost: not an error of the schema
            raise
        raise SchemaError(f"migration {version} failed, and nothing of it was applied: {_text(error)}") from error


def _all_grants(node_role: str | None, lock_server_role: str | None, reader_role: str | None) -> list[str]:
    wanted = {"grants": node_role, "grants_lock_server": lock_server_role, "grants_reader": reader_role}
    return [_grants(name, role) for name, role in wanted.items() if role is not None]


def _grants(name: str, role: str) -> str:
    size = len(role.encode(errors="replace"))
    if not 1 <= size <= NAME_BYTES_MAX or "\0" in role or not _is_utf8(role):
        raise ConfigurationError(f"what to grant to must be the name of a role, of 1 to {NAME_BYTES_MAX} bytes")
    quoted = '"' + role.replace('"', '""') + '"'
    return statement(name).decode().replace("{role}", quoted)


def _is_utf8(text: str) -> bool:
    return text.encode(errors="ignore").decode() == text


async def _grant(conn: psycopg.AsyncConnection[Any], grants: str) -> None:
    seen = await _looked(conn)
    check_schema(seen["version"])
    if not seen["acts_for_owner"]:  # a GRANT without the right to grant may only cause a warning
        raise SchemaError(
            f"the ledger belongs to role {seen['owner']}, and {seen['role']!r} may not grant anything on it: "
            f"run this as {seen['owner']}"
        )
    try:
        await conn.execute(grants.encode())
    except psycopg.errors.UndefinedObject as error:
        raise SchemaError(f"{_text(error)}: {_CREATE_ROLE}") from error
    except psycopg.errors.UndefinedFunction as error:
        raise SchemaError(f"the ledger is not the one this library knows ({_text(error)})") from error


# --- The connection


@contextlib.asynccontextmanager
async def _connected(dsn: Dsn) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A plain connection, which may lead through a pooler, because each step is a single transaction."""
    params: dict[str, str] = {}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            check_dsn(dsn)
            params = plain_params(await resolved(dsn), "pgleaderlock migrate")
            async with await _connect(params) as conn:
                yield conn
    except TimeoutError:
        raise ConnectionError(f"the server did not answer within {TIMEOUT_S:g} s") from None
    except psycopg.Error as error:
        raise _explained(error, params) from safe_cause(error, params)


async def _connect(params: Mapping[str, str]) -> psycopg.AsyncConnection[Any]:
    try:
        conn = await connect(params)
    except psycopg.Error as error:
        raise connect_error(error, params) from safe_cause(error, params)
    # Other defaults, chosen by the DBA, could make us read a snapshot from before the lock, or refuse writes.
    await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
    await conn.set_read_only(False)
    if conn.pgconn.server_version < VERSION_MIN:
        await conn.close()
        raise version_error(conn.pgconn.server_version)
    return conn


async def _row(conn: psycopg.AsyncConnection[Any], name: str, params: Mapping[str, object]) -> dict[str, Any]:
    (row,) = await execute(conn, name, params)
    return row


_EXPLAINED = {
    "42501": "this role may not do that: see the GRANTs in docs/ledger.md",
    "42883": f"the ledger is older than this library: {_RUN_MIGRATE}",
    "55P03": "another session has held the lock for too long: look for it in pg_locks, then run this again",
    "25006": "the server takes no writes: connect to the primary",
}


def _explained(error: psycopg.Error, params: Mapping[str, str]) -> SchemaError | ConnectionError:
    text = scrub(_text(error), params)
    if error.sqlstate in _EXPLAINED:
        return SchemaError(f"{text}; {_EXPLAINED[error.sqlstate]}")
    if error.sqlstate == "PGL01":
        return SchemaError(text)
    return ConnectionError(f"the database failed: {text}")


def _text(error: psycopg.Error) -> str:
    return " ".join((error.diag.message_primary or str(error)).split())
